"""How fast engines sample, and how much slower with more calls at once: measured from the calls themselves.

Enters: when each call begins and ends on an engine, and the tokens that it sampled there. Leaves: sums that may be
added up over processes, and the fit of

    seconds of a call = start_s + tokens * (token_s + load_s * calls at once on its engine)

Calls at once are the mean over the call's own time. Older calls fade, so that a fit follows longer contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

KEPT = 0.998  # weight of all earlier calls after each one: about the last 500 count
LEAST_CALLS = 8.0  # weight of calls below which nothing is said
LEAST_SPREAD = 0.05  # standard deviation of the calls at once, in means, below which their effect cannot be told

_SIZE = 3  # unknowns
NO_SUMS: tuple[float, ...] = (0.0,) * (1 + _SIZE * _SIZE + _SIZE)  # weight of calls, X'X by rows, X'y


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpeed:
    """A fit. Example: TokenSpeed(start_s=0.2, token_s=0.02, load_s=0.0005)"""

    start_s: float  # of a call, however many tokens it samples
    token_s: float  # of a token on an engine that serves nothing else
    load_s: float  # what each call at once adds to it; 0 also where it cannot be told


@dataclass(slots=True)
class _Load:
    """Calls of one engine, and their integral over time."""

    calls: int = 0
    area_s: float = 0.0
    since_s: float = 0.0

    def change(self, by: int, now_s: float) -> float:
        self.area_s += self.calls * (now_s - self.since_s)
        self.calls, self.since_s = self.calls + by, now_s
        return self.area_s


@dataclass(slots=True)
class SpeedMeter:
    """The calls of one process. One event loop owns it.

    Example: meter.begin(4, url, now_s=1.0); meter.end(4, url, now_s=3.0, tokens=120)
    """

    sums: tuple[float, ...] = NO_SUMS
    _loads: dict[str, _Load] = field(default_factory=dict)
    _begun: dict[int, tuple[float, float]] = field(default_factory=dict)  # ticket -> time, area

    def begin(self, ticket: int, url: str, now_s: float) -> None:
        """A call runs on an engine from now on."""
        area_s = self._loads.setdefault(url, _Load(since_s=now_s)).change(1, now_s)
        self._begun[ticket] = (now_s, area_s)

    def end(self, ticket: int, url: str, now_s: float, tokens: int) -> None:
        """It has left the engine; without tokens it says nothing of the speed."""
        begun_s, begun_area_s = self._begun.pop(ticket)
        load = self._loads[url]
        area_s = load.change(-1, now_s)
        if not load.calls:
            del self._loads[url]
        if tokens and now_s > begun_s:
            self.sums = add_call(
                self.sums, tokens=tokens, seconds=now_s - begun_s, at_once=(area_s - begun_area_s) / (now_s - begun_s)
            )


def add_call(sums: Sequence[float], *, tokens: int, seconds: float, at_once: float) -> tuple[float, ...]:
    """The sums with one call more."""
    row = (1.0, float(tokens), tokens * at_once)
    new = (1.0, *(one * other for one in row for other in row), *(one * seconds for one in row))
    return tuple(KEPT * old + more for old, more in zip(sums, new, strict=True))


def add_sums(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """The sums of two processes' calls."""
    return [one + other for one, other in zip(left, right, strict=True)]


def fit_speed(sums: Sequence[float], *, processes: int = 1) -> TokenSpeed | None:
    """The least-squares fit, None for too few calls. No part is negative: those that come out so are 0.

    Each of several processes sees its own part of an engine's calls; `processes` times as many run at once.
    """
    if sums[0] < LEAST_CALLS:
        return None
    square = np.array(sums[1 : 1 + _SIZE * _SIZE]).reshape(_SIZE, _SIZE)
    right = np.array(sums[1 + _SIZE * _SIZE :])
    names = [0, 1, 2] if _spread(square) >= LEAST_SPREAD else [0, 1]
    while True:
        found, *_ = np.linalg.lstsq(square[np.ix_(names, names)], right[names], rcond=None)
        if found.min() >= 0 or len(names) == 1:
            break
        names.pop(int(found.argmin()))
    values = {name: max(0.0, float(value)) for name, value in zip(names, found, strict=True)}
    token_s, load_s = values.get(1, 0.0), values.get(2, 0.0) / processes
    return TokenSpeed(start_s=values.get(0, 0.0), token_s=token_s, load_s=load_s) if token_s + load_s else None


def _spread(square: np.ndarray) -> float:
    """Standard deviation of the calls at once in means, each call weighted by the square of its tokens."""
    mean = square[1, 2] / square[1, 1]
    return float(max(0.0, square[2, 2] / square[1, 1] - mean * mean) ** 0.5 / mean)
