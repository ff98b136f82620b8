"""The cell's state machine: legal moves, epochs, refusals."""

import pytest

from gyre_core.scheduler.cell import CellState, CellStatus


def status(state: CellState, epoch: int = 0) -> CellStatus:
    return CellStatus(cell_id="cell-0", state=state, epoch=epoch)


def test_cell_full_circle_counts_two_epochs() -> None:
    cell = status(CellState.ROLLOUT)
    for state in (CellState.DRAINING, CellState.TRAINING, CellState.RETURNING, CellState.ROLLOUT):
        cell = cell.moved(state)
    assert (cell.state, cell.epoch) == (CellState.ROLLOUT, 2)


@pytest.mark.parametrize(
    ("start", "target"),
    [
        (CellState.ROLLOUT, CellState.TRAINING),  # calls would be cut off
        (CellState.TRAINING, CellState.ROLLOUT),  # unverified weights would serve
        (CellState.RETURNING, CellState.TRAINING),
        (CellState.DEAD, CellState.ROLLOUT),
    ],
)
def test_cell_illegal_move_is_refused_with_the_legal_ones(start: CellState, target: CellState) -> None:
    with pytest.raises(ValueError, match=f"cannot go from {start} to {target}; it may go to"):
        status(start).moved(target)


@pytest.mark.parametrize("state", [state for state in CellState if state is not CellState.DEAD])
def test_cell_any_live_state_may_die(state: CellState) -> None:
    assert status(state).moved(CellState.DEAD).state is CellState.DEAD
