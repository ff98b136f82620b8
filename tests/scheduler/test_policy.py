"""The colocate policy: what moves, what is refused, and why."""

from hypothesis import given
from hypothesis import strategies as st

from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView, Snapshot, colocate


def snapshot(
    state: CellState, *, dispatched: int = 8, finished: int = 8, ready: int = 1, untrained: int = 1
) -> Snapshot:
    cell = CellView(cell_id="cell-0", state=state, slots=4)
    return Snapshot(
        cells=(cell,), dispatched=dispatched, finished=finished, ready_groups=ready, untrained_groups=untrained
    )


def test_colocate_with_live_rollouts_stays_and_says_why() -> None:
    plan = colocate(snapshot(CellState.ROLLOUT, finished=5))
    assert plan.moves == ()
    assert plan.refusals[0].reason == "water level 3 > 0: rollouts still need the engine"


def test_colocate_all_finished_moves_to_training() -> None:
    (move,) = colocate(snapshot(CellState.ROLLOUT)).moves
    assert (move.cell_id, move.to) == ("cell-0", "train")


def test_colocate_nothing_ready_stays_in_rollout() -> None:
    plan = colocate(snapshot(CellState.ROLLOUT, ready=0))
    assert (plan.moves, plan.refusals[0].reason) == ((), "no graded group waits for training")


def test_colocate_ready_groups_that_are_trained_already_move_nothing() -> None:
    # Such a move would be undone at once, and made again, for ever.
    plan = colocate(snapshot(CellState.ROLLOUT, ready=2, untrained=0))
    assert (plan.moves, plan.refusals[0].reason) == ((), "no graded group waits for training")


def test_colocate_returns_only_when_the_step_is_trained() -> None:
    assert colocate(snapshot(CellState.TRAINING, untrained=2)).moves == ()
    (move,) = colocate(snapshot(CellState.TRAINING, untrained=0)).moves
    assert (move.to, move.reason) == ("rollout", "the step's groups are trained; its weights are published")


def test_colocate_rollouts_that_wait_bring_a_training_cell_back_and_the_reason_says_so() -> None:
    (move,) = colocate(snapshot(CellState.TRAINING, finished=5, untrained=2)).moves
    assert (move.to, move.reason) == ("rollout", "water level 3 > 0: rollouts need the engine again")


@given(
    state=st.sampled_from(list(CellState)),
    dispatched=st.integers(0, 50),
    finished=st.integers(0, 50),
    ready=st.integers(0, 9),
    untrained=st.integers(0, 9),
)
def test_colocate_never_takes_an_engine_from_live_rollouts(
    state: CellState, dispatched: int, finished: int, ready: int, untrained: int
) -> None:
    finished = min(finished, dispatched)
    plan = colocate(snapshot(state, dispatched=dispatched, finished=finished, ready=ready, untrained=untrained))
    assert len(plan.moves) + len(plan.refusals) <= 1
    for move in plan.moves:
        assert move.reason
        assert (move.to == "train") == (state is CellState.ROLLOUT)
        assert move.to == "rollout" or dispatched == finished
