"""elastic_predictive's own rules, whole-role moves, and the order of admission."""

from dataclasses import replace

from gyre_core.scheduler.admission import admission_of
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.mechanism import enforce
from gyre_core.scheduler.policy import CellView, Move, Plan, Snapshot, colocate, elastic_predictive


def cells(states: str, *, residents: int = 4, slots: int = 8, moved_s: float = -1e9) -> tuple[CellView, ...]:
    """R serves, T trains."""
    return tuple(
        CellView(
            cell_id=f"cell-{index}",
            state=CellState.ROLLOUT if letter == "R" else CellState.TRAINING,
            slots=slots,
            residents=residents if letter == "R" else 0,
            moved_s=moved_s,
        )
        for index, letter in enumerate(states)
    )


def snapshot(states: str, **values: object) -> Snapshot:
    """Rollouts all served, one group of the step graded; a token takes 1 s and 0.1 s more for each rollout a cell."""
    views = values.pop("cells", cells(states))
    live = sum(cell.residents for cell in views)  # pyright: ignore[reportAttributeAccessIssue]
    base = Snapshot(
        cells=views,  # pyright: ignore[reportArgumentType]
        dispatched=live,
        finished=0,
        ready_groups=1,
        untrained_groups=4,
        token_load_s=0.1,
        microstep_s=100.0,
        group_microsteps=4.0,
        tail_s=1_000.0,
        now_s=500.0,
    )
    return replace(base, **values)  # pyright: ignore[reportArgumentType]


def first(plan: Plan) -> tuple[str, str] | None:
    return (plan.moves[0].cell_id, plan.moves[0].to) if plan.moves else None


def test_core_leaves_for_a_backlog_that_pays() -> None:
    # 4 micro-steps of 100 s wait for one cell.
    assert first(elastic_predictive(snapshot("RRRR"))) == ("cell-0", "train")


def test_backlog_of_a_minute_does_not_pay_while_rollouts_are_due() -> None:
    plan = elastic_predictive(snapshot("RRRR", microstep_s=14.0))  # 56 s
    assert (first(plan), plan.refusals[0].reason) == (None, "56 s of training do not pay for a move yet")
    assert first(elastic_predictive(snapshot("RRRR", microstep_s=14.0, due_rollouts=0))) == ("cell-0", "train")


def test_second_cell_stays_while_the_first_will_be_done_before_the_last_rollout() -> None:
    slow = snapshot("TRRR", pending_microsteps=3)  # 3 + 4 micro-steps: 700 s of 1,000
    assert first(elastic_predictive(slow)) is None
    assert first(elastic_predictive(replace(slow, ungraded_groups=1))) == ("cell-1", "train")  # 1,100 s


def test_engine_that_load_does_not_slow_is_taken_at_once() -> None:
    free = snapshot("TRRR", pending_microsteps=3, token_load_s=0.001)
    assert first(elastic_predictive(free)) == ("cell-1", "train")


def test_idle_training_cell_returns_for_speed_after_its_dwell() -> None:
    idle = snapshot("TRRR", ready_groups=0)  # 12 rollouts on 3 cells: 1.4 s a token, on 4 cells 1.3 s
    assert first(elastic_predictive(idle)) == ("cell-0", "rollout")
    young = replace(idle, cells=cells("TRRR", moved_s=490.0))
    assert (first(elastic_predictive(young)), elastic_predictive(young).wake_after_s) == (None, 20.0)


def test_idle_training_cell_stays_where_sampling_would_not_get_faster() -> None:
    assert first(elastic_predictive(snapshot("TRRR", ready_groups=0, token_load_s=0.001))) is None


def test_training_first_counts_only_live_rollouts() -> None:
    # 12 live on 4 cells of 8 slots, 16 more queued: 28 > 24 slots that stay.
    queued = snapshot("RRRR", cells=cells("RRRR", residents=3), dispatched=28)
    assert first(elastic_predictive(queued)) is None
    assert first(elastic_predictive(replace(queued, staleness=1, tail_ratio=0.5))) == ("cell-0", "train")


def test_end_of_burst_keeps_a_cell_that_the_next_batch_keeps_busy() -> None:
    ended = snapshot("TRRR", untrained_groups=0, ready_groups=0)
    assert first(elastic_predictive(ended)) == ("cell-0", "rollout")
    assert first(elastic_predictive(replace(ended, next_ready_groups=2))) is None


def test_colocate_waits_for_the_steps_own_rollouts_and_moves_all_cells_together() -> None:
    later = snapshot("RRRR", due_rollouts=0)
    plan = enforce(later, colocate(later))
    assert [move.cell_id for move in plan.moves] == ["cell-0", "cell-1", "cell-2", "cell-3"]
    assert "16 later ones wait" in plan.moves[0].reason
    assert enforce(later, colocate(replace(later, due_rollouts=1))).moves == ()


def test_part_of_a_role_together_is_taken_as_single_moves() -> None:
    full = snapshot("RRRR", cells=cells("RRRR", residents=8))
    moves = tuple(Move(cell_id=f"cell-{index}", to="train", reason="bug") for index in range(3))
    plan = enforce(full, Plan(moves=moves, together=True))
    assert plan.moves == ()  # 32 live rollouts do not fit into 24 slots


def test_predictive_admits_the_older_step_first_and_longest_problems_first() -> None:
    waiting = [(1, 2.0), (0, 0.5), (0, 1.5)]
    assert sorted(waiting, key=lambda one: admission_of("elastic_predictive")(*one)) == [(0, 1.5), (0, 0.5), (1, 2.0)]
    assert sorted(waiting, key=lambda one: admission_of("elastic")(*one)) == [(0, 0.5), (0, 1.5), (1, 2.0)]
