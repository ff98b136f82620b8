"""How fast trainers are, and what follows: how long a lease lasts, how small the last micro-steps should be. Pure.

Enters: tokens and seconds of completed micro-steps. Leaves: tokens a second, lease lengths, numbers of parts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SMOOTHING = 0.5  # weight of the newest measurement; micro-steps are few and speeds change when others leave a machine


class Rates:
    """Measured tokens a second by trainer, exponentially smoothed.

    Example: rates = Rates(); rates.measured("cell-1", 4096, 2.0); rates.of("cell-1") == 2048.0
    """

    def __init__(self, known: Mapping[str, float] | None = None) -> None:
        self._rates = dict(known or {})

    def measured(self, trainer: str, num_tokens: int, seconds: float) -> None:
        """One completed micro-step. Without tokens or time it says nothing."""
        if num_tokens <= 0 or seconds <= 0:
            return
        rate = num_tokens / seconds
        old = self._rates.get(trainer)
        self._rates[trainer] = rate if old is None else _SMOOTHING * rate + (1.0 - _SMOOTHING) * old

    def of(self, trainer: str) -> float | None:
        """The trainer's own rate, else the slowest known one (a newcomer is not expected to be quick), else None."""
        return self._rates.get(trainer, min(self._rates.values(), default=None))

    def all(self) -> dict[str, float]:
        """Tokens a second by trainer."""
        return dict(self._rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRule:
    """How long a trainer has for a micro-step: a floor, plus the expected time times a factor, doubled at each retry.

    The doubling ends a circle in which every trainer is cut off just before it is done.

    Example: LeaseRule(min_s=30.0, slack=4.0).seconds(100_000, rate=1000.0, attempt=1) == 430.0
    """

    min_s: float = 60.0  # for requests, scheduling hiccups, a first micro-step that warms up
    slack: float = 4.0
    assumed_tokens_per_s: float = 100.0  # before anything was measured: slow, so that nobody is cut off by a guess

    def __post_init__(self) -> None:
        if self.min_s <= 0 or self.slack < 0 or self.assumed_tokens_per_s <= 0:
            raise ValueError(f"a lease needs min_s > 0, slack >= 0, assumed_tokens_per_s > 0, got {self}")

    def seconds(self, num_tokens: int, rate: float | None, attempt: int) -> float:
        """Length of a lease; `attempt` counts from 1."""
        expected = num_tokens / (rate or self.assumed_tokens_per_s)
        return (self.min_s + self.slack * expected) * 2.0 ** (attempt - 1)


def tail_parts(pending_tokens: Sequence[int], rates: Iterable[float], *, min_tokens: int) -> list[int]:
    """Into how many parts each pending micro-step (next first) should be split, so that all trainers end together.

    Guided self-scheduling: a piece is at most half of what the slowest trainer would get of everything that is left
    when it is handed out. So pieces shrink towards the end, and the last to finish is late by half a small piece at
    most. No piece is made smaller than `min_tokens` on purpose, and with one trainer there is nothing to gain.
    Source of the idea: Polychronopoulos and Kuck 1987, "Guided self-scheduling".
    """
    speeds = [rate for rate in rates if rate > 0]
    if len(speeds) < 2:
        return [1] * len(pending_tokens)
    share = min(speeds) / sum(speeds)
    parts, left = [], 0
    for tokens in reversed(pending_tokens):
        left += tokens
        allowed = max(min_tokens, left * share / 2.0, 1.0)
        parts.append(max(1, math.ceil(tokens / allowed)))
    return parts[::-1]
