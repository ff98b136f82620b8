"""A cell's states and the moves between them.

    rollout -> draining -> training -> returning -> rollout        any state -> dead -> returning

Each role change has an epoch, one higher than the last. A message of an older epoch changes nothing: that is how a late
answer of a cell that was given up is kept from undoing newer decisions.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from gyre_core.errors import GyreError


class StaleEpochError(GyreError, ValueError):
    """A message of another epoch than the cell's current one: it changes nothing; ask for the status again."""


class CellState(StrEnum):
    """What a cell does now."""

    ROLLOUT = "rollout"  # its engine takes calls
    DRAINING = "draining"  # no new calls; those in flight are handed over or awaited
    TRAINING = "training"  # its trainer claims micro-steps
    RETURNING = "returning"  # gradients handed in, engine loads the published weights
    DEAD = "dead"  # no heartbeat, or its process ended


_NEXT = {
    CellState.ROLLOUT: {CellState.DRAINING, CellState.DEAD},
    CellState.DRAINING: {CellState.TRAINING, CellState.ROLLOUT, CellState.DEAD},
    CellState.TRAINING: {CellState.RETURNING, CellState.DEAD},
    CellState.RETURNING: {CellState.ROLLOUT, CellState.DEAD},
    CellState.DEAD: {CellState.RETURNING},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStatus:
    """One cell's state at one epoch.

    Example: CellStatus(cell_id="cell-0", state=CellState.ROLLOUT, epoch=0)
    """

    cell_id: str
    state: CellState
    epoch: int  # number of role changes begun

    def moved(self, state: CellState) -> "CellStatus":
        """The status after a legal transition; a role change begins a new epoch, and so does its cancellation.

        Raises ValueError for a transition that the state machine does not have.
        """
        if state not in _NEXT[self.state]:
            allowed = ", ".join(sorted(_NEXT[self.state]))
            raise ValueError(f"{self.cell_id} cannot go from {self.state} to {state}; it may go to {allowed}")
        cancelled = (self.state, state) == (CellState.DRAINING, CellState.ROLLOUT)
        begun = state in {CellState.DRAINING, CellState.RETURNING}
        epoch = self.epoch + 1 if begun or cancelled else self.epoch
        return replace(self, state=state, epoch=epoch)
