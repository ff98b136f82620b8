"""Counters of a burst and the snapshot made of them, with values worked by hand."""

import threading

import pytest

from gyre_core.scheduler.burst import Burst, QueueView
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView, elastic

CELLS = tuple(CellView(cell_id=f"cell-{i}", state=CellState.ROLLOUT, slots=4) for i in range(2))


def test_burst_counts_from_dispatch_to_the_optimizer_step() -> None:
    burst = Burst()
    burst.dispatched(6, step=0)
    burst.begin(step=0, groups=2)
    for _ in range(4):
        burst.finished(step=0)
    burst.group_ready()
    seen = burst.snapshot(CELLS, QueueView())
    assert (seen.dispatched, seen.finished, seen.water_level, seen.due) == (6, 4, 2, 2)
    assert (seen.ready_groups, seen.untrained_groups, seen.pending_microsteps) == (1, 2, 0)
    burst.group_handed()
    seen = burst.snapshot(CELLS, QueueView(pending=3, leased=1))
    assert (seen.ready_groups, seen.pending_microsteps) == (1, 4), "one group handed over, whose micro-steps wait"
    seen = burst.snapshot(CELLS, QueueView(leased=1))
    assert (seen.ready_groups, seen.pending_microsteps) == (0, 1), "all of it is claimed"
    burst.trained()
    assert burst.snapshot(CELLS, QueueView()).untrained_groups == 0
    assert not burst.ended
    burst.end()
    assert burst.ended


def test_burst_tells_the_open_steps_rollouts_from_later_ones() -> None:
    burst = Burst()
    burst.dispatched(3, step=0)
    burst.dispatched(3, step=1)
    burst.begin(step=0, groups=1, next_ready=0, pending_dispatch=3)
    burst.finished(step=0)
    burst.finished(step=1)
    seen = burst.snapshot(CELLS, QueueView())
    assert (seen.water_level, seen.due, seen.pending_dispatch) == (4, 2, 3)
    burst.group_ready(of_next=True)
    assert burst.snapshot(CELLS, QueueView()).next_ready_groups == 1
    burst.trained()
    burst.end()
    burst.begin(step=1, groups=1)
    seen = burst.snapshot(CELLS, QueueView())
    assert (seen.dispatched, seen.finished, seen.due) == (4, 0, 2), "what still runs belongs to the new burst"


def test_burst_without_any_signal_still_calls_the_core_once_it_is_sealed() -> None:
    burst = Burst()
    burst.begin(step=0, groups=1)
    burst.group_ready()
    burst.group_handed()
    assert elastic(burst.snapshot(CELLS, QueueView())).moves == ()
    burst.sealed()
    (move,) = elastic(burst.snapshot(CELLS, QueueView())).moves
    assert (move.cell_id, move.to) == ("cell-0", "train")


def test_burst_whose_step_was_lost_has_all_its_groups_to_train_again() -> None:
    burst = Burst()
    burst.begin(step=0, groups=2)
    for _ in range(2):
        burst.group_ready()
        burst.group_handed()
    burst.sealed()
    burst.trained()
    burst.reopen(groups=2)
    seen = burst.snapshot(CELLS, QueueView())
    assert (seen.untrained_groups, seen.ready_groups) == (2, 2)


def test_burst_wakes_who_waits_at_once_and_not_without_a_change() -> None:
    burst = Burst()
    stamp = burst.stamp
    assert burst.wait(stamp, 0.01) == stamp
    threading.Timer(0.05, lambda: burst.dispatched(1, step=0)).start()
    assert burst.wait(stamp, 60.0) == stamp + 1


def test_burst_without_cells_has_no_snapshot() -> None:
    with pytest.raises(ValueError, match="at least one cell"):
        Burst().snapshot((), QueueView())
