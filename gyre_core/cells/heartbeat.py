"""When a cell counts as dead: the rule by which the fleet reads its heartbeats.

Enters: what each look at a cell's process found (an answer of `GET /status`, or none). Leaves: None while it lives,
otherwise the reason why it must be killed and started again. Pure but for the clock, which is an argument.

A cell is dead when its process ended, when it answers nothing for `dead_after_s`, when its engine, which should serve,
answers nothing for as long, when its engine ended and does not come back by itself, or when it has something to do and
nothing about it changes for `stalled_after_s`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gyre_core.clock import Clock
from gyre_core.scheduler.cell import CellState

# Longer than any role change, publication or micro-step that is believed to get on: the longest is a publication's
# reading and hashing of all weights, which has 1800 s for the largest models (engine/sglang_client.py).
STALLED_AFTER_S = 2400.0
DEAD_LOOKS = 3  # looks in a row that find the engine ended; a publication that failed starts it again by itself

_PROGRESS = ("state", "epoch", "policy_version", "served_version")
_STEP_PROGRESS = ("step", "sealed", "groups", "pending", "leased", "completed", "taken", "requeued", "finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseRule:
    """The rule's numbers. Example: PulseRule(heartbeat_s=2.0, dead_after_s=20.0)"""

    heartbeat_s: float = 2.0  # between two looks
    dead_after_s: float = 20.0  # of silence
    stalled_after_s: float = STALLED_AFTER_S  # of work without progress

    @property
    def look_timeout_s(self) -> float:
        """How long one look waits for its answer: several fit into the silence that is allowed."""
        return max(0.2, self.dead_after_s / 3)


class Pulse:
    """One process's life as its looks saw it. Used by one thread.

    Example: pulse = Pulse(PulseRule(), clock); pulse.answered(status, busy=False) is None
    """

    def __init__(self, rule: PulseRule, clock: Clock) -> None:
        self._rule = rule
        self._clock = clock
        self._seen_s = self._moved_s = self._engine_s = clock.monotonic_s()
        self._progress: tuple[Any, ...] = ()
        self._dead_looks = 0

    def answered(self, status: Mapping[str, Any], *, busy: bool, engine_silent: bool = False) -> str | None:
        """It answered; `busy`: a request of ours runs on it. Returns why it is dead all the same, or None.

        `engine_silent`: its engine should serve and did not answer this look.
        """
        self._seen_s = self._clock.monotonic_s()
        if not engine_silent:
            self._engine_s = self._seen_s
        elif self._seen_s - self._engine_s >= self._rule.dead_after_s:
            return f"its engine did not answer for {self._seen_s - self._engine_s:.1f} s"
        self._dead_looks = self._dead_looks + 1 if status.get("state") == CellState.DEAD else 0
        if self._dead_looks >= DEAD_LOOKS and not busy:
            return "its engine ended"
        progress = progress_of(status)
        if progress != self._progress or not (busy or trains(status)):
            self._progress, self._moved_s = progress, self._seen_s
        elif self._seen_s - self._moved_s >= self._rule.stalled_after_s:
            return f"it has work and made no progress for {self._seen_s - self._moved_s:.0f} s"
        return None

    def silent(self) -> str | None:
        """It did not answer this look. Returns why it is dead, or None while it may still answer."""
        silence_s = self._clock.monotonic_s() - self._seen_s
        if silence_s >= self._rule.dead_after_s:
            return f"it did not answer for {silence_s:.1f} s"
        return None


def engine_answers(http: httpx.Client, engine: tuple[str, str | None]) -> bool:
    """Whether anything answers at an engine's address: what it says does not matter."""
    url, key = engine
    try:
        http.get(f"{url}/model_info", headers={"authorization": f"Bearer {key}"} if key is not None else None)
    except httpx.HTTPError:
        return False
    return True


def progress_of(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a status changes when the cell gets on with its work."""
    step = status.get("step") or {}
    return (*(status.get(name) for name in _PROGRESS), *(step.get(name) for name in _STEP_PROGRESS))


def trains(status: Mapping[str, Any]) -> bool:
    """Whether the cell is working off a step: micro-steps are pending or leased and it is in training."""
    step = status.get("step") or {}
    return status.get("state") == CellState.TRAINING and bool(step.get("pending") or step.get("leased"))
