"""The controller: looks at the run, asks the policy, makes its move, and says why.

    observe -> policy -> mechanism (enforce) -> move -> record

Enters: a policy, a way to look, a way to move. Leaves: the moves of one plan a tick, and decisions: the snapshot, the
plan with its refusals, what became of the moves. Moves are serial: `tick` returns when they are over, and one that
fails ends its plan. What is recorded is bounded: refusals of the same kinds as the last tick's are not recorded again.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gyre_core.clock import Clock, SystemClock
from gyre_core.scheduler.mechanism import enforce
from gyre_core.scheduler.policy import Move, Plan, Policy, Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one tick saw, decided and did.

    Example: controller.tick().moved
    """

    snapshot: Snapshot
    plan: Plan
    outcomes: tuple[Mapping[str, Any], ...]  # of the moves that were tried: seconds, phases, calls moved, `failed`

    @property
    def moved(self) -> bool:
        """Whether a move was made, or tried."""
        return bool(self.outcomes)

    @property
    def failed(self) -> str:
        """Why the last move did not come about; empty when it did or there was none."""
        return str(self.outcomes[-1].get("failed") or "") if self.outcomes else ""

    def as_json(self) -> dict[str, Any]:
        """For the store: the policy can be asked again with this snapshot."""
        return {
            "snapshot": asdict(self.snapshot),
            "moves": [asdict(move) for move in self.plan.moves],
            "refusals": [asdict(move) for move in self.plan.refusals],
            "outcomes": [dict(outcome) for outcome in self.outcomes],
        }


class Controller:
    """See the module. One thread ticks.

    Example: Controller(POLICIES["elastic"], observe=look, move=fleet.move, record=decisions.append).tick()
    """

    def __init__(
        self,
        policy: Policy,
        *,
        observe: Callable[[], Snapshot],
        move: Callable[[Move], Mapping[str, Any]],
        record: Callable[[Decision], None],
        clock: Clock | None = None,
        idle_warning_s: float = 600.0,
    ) -> None:
        """`move` returns its outcome, with `failed` when it did not come about. Without any change of what is observed
        for `idle_warning_s` a warning says so: with work left, something should always be moving.
        """
        self._policy, self._observe, self._move, self._record = policy, observe, move, record
        self._clock = clock or SystemClock()
        self._idle_warning_s = idle_warning_s
        self._refused: tuple[tuple[str, str, str], ...] = ()
        self._seen: Snapshot | None = None
        self._seen_s = self._clock.monotonic_s()

    def tick(self) -> Decision:
        """Decide once, and make the plan's moves."""
        snapshot = self._observe()
        plan = enforce(snapshot, self._policy(snapshot))
        self._watch(snapshot)
        outcomes: list[Mapping[str, Any]] = []
        for move in plan.moves:
            outcomes.append(self._move(move))
            if outcomes[-1].get("failed"):
                break
        decision = Decision(snapshot=snapshot, plan=plan, outcomes=tuple(outcomes))
        refused = tuple((move.cell_id, move.to, _kind(move.reason)) for move in plan.refusals)
        if outcomes or refused != self._refused:
            self._record(decision)
        self._refused = refused
        return decision

    def _watch(self, snapshot: Snapshot) -> None:
        now_s = self._clock.monotonic_s()
        snapshot = replace(snapshot, now_s=0.0, tail_s=0.0)
        if snapshot != self._seen:
            self._seen, self._seen_s = snapshot, now_s
        elif now_s - self._seen_s >= self._idle_warning_s and (snapshot.water_level or snapshot.untrained_groups):
            self._seen_s = now_s
            logger.warning("nothing has changed for %.0f s with work left: %s", self._idle_warning_s, snapshot)


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return "".join(character for character in reason if not character.isdigit())
