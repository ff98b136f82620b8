"""Scheduling policies: pure functions from a snapshot to a plan.

Enters: counters of the burst, the cells, and what waits for training. Leaves: moves with their reasons, and refusals
with theirs, as data that the run records. No I/O, clock or randomness: a decision can be replayed from its snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gyre_core.scheduler.cell import CellState

Target = Literal["train", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellView:
    """A cell as the policy sees it.

    Example: CellView(cell_id="cell-0", state=CellState.ROLLOUT, slots=8)
    """

    cell_id: str
    state: CellState
    slots: int  # rollouts it serves at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a decision is made from. Counters are rollouts of the current burst.

    Example: Snapshot(cells=(cell,), dispatched=64, finished=10, ready_groups=1, untrained_groups=8)
    """

    cells: tuple[CellView, ...]  # the core first, satellites in their fixed order
    dispatched: int
    finished: int  # graded, excluded and dropped ones included
    ready_groups: int  # graded groups that no trainer has yet
    untrained_groups: int  # groups of the open step that no optimizer step holds yet

    @property
    def water_level(self) -> int:
        """Dispatched minus finished: rollouts that still need an engine."""
        return self.dispatched - self.finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A role change to make now.

    Example: Move(cell_id="cell-0", to="train", reason="all 64 rollouts finished; 8 groups ready")
    """

    cell_id: str
    to: Target
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and why the rest is not done.

    Example: Plan(moves=(), refusals=(Move(cell_id="cell-0", to="train", reason="water level 3 > 0"),))
    """

    moves: tuple[Move, ...] = ()
    refusals: tuple[Move, ...] = ()


Policy = Callable[[Snapshot], Plan]


def colocate(snapshot: Snapshot) -> Plan:
    """All cells serve until every rollout of the step has finished, all train, all serve again.

    The classic alternation, kept as a baseline and for a single cell; the tail of the slowest rollout is idle time.
    """
    moves: list[Move] = []
    refusals: list[Move] = []
    for cell in snapshot.cells:
        if cell.state is CellState.ROLLOUT:
            if snapshot.water_level > 0:
                reason = f"water level {snapshot.water_level} > 0: rollouts still need the engine"
                refusals.append(Move(cell_id=cell.cell_id, to="train", reason=reason))
            elif snapshot.ready_groups == 0:
                refusals.append(Move(cell_id=cell.cell_id, to="train", reason="no graded group is ready"))
            else:
                reason = f"all {snapshot.dispatched} rollouts finished; {snapshot.ready_groups} groups ready"
                moves.append(Move(cell_id=cell.cell_id, to="train", reason=reason))
        elif cell.state is CellState.TRAINING:
            if snapshot.untrained_groups > 0:
                reason = f"{snapshot.untrained_groups} groups of the step are not trained yet"
                refusals.append(Move(cell_id=cell.cell_id, to="rollout", reason=reason))
            else:
                reason = "the step's groups are trained; its weights are published"
                moves.append(Move(cell_id=cell.cell_id, to="rollout", reason=reason))
    return Plan(moves=tuple(moves), refusals=tuple(refusals))


POLICIES: dict[str, Policy] = {"colocate": colocate}
