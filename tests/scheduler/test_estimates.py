"""What a run measures of itself for its policies."""

import pytest

from gyre_core.scheduler.estimates import Estimates


def test_estimates_know_nothing_at_first() -> None:
    estimates = Estimates()
    assert (estimates.longest_s, estimates.microstep_s, estimates.tail_s(0, 5.0)) == (0.0, 0.0, 0.0)
    assert estimates.tail_ratio(staleness=0, cells=3, slots=4, rollouts=8, groups=2) == 1.0


def test_estimates_tail_is_what_the_youngest_rollout_of_the_step_may_still_take() -> None:
    estimates = Estimates()
    for name, started_s, ended_s in (("a", 0.0, 40.0), ("b", 0.0, 100.0)):
        estimates.rollout_started(name, 0, started_s)
        estimates.rollout_ended(name, ended_s)
    assert estimates.longest_s == pytest.approx(40 + 0.998 * 60)  # between the two values, linearly
    estimates.rollout_started("c", 1, 100.0)
    estimates.rollout_started("d", 1, 110.0)
    estimates.rollout_started("e", 2, 120.0)
    assert estimates.tail_s(1, 130.0) == pytest.approx(40 + 0.998 * 60 - 20)
    assert estimates.tail_s(1, 500.0) == 0.0
    assert estimates.tail_s(0, 130.0) == 0.0


def test_estimates_ratio_of_tail_and_work() -> None:
    estimates = Estimates()
    for name in ("a", "b"):
        estimates.rollout_started(name, 0, 0.0)
        estimates.rollout_ended(name, 50.0)
    estimates.step_ended(micro_steps=10, forward_backward_s=20.0, optimizer_s=2.0)
    assert estimates.microstep_s == 2.0
    # Work: 8 rollouts of 50 s on 4 slots and 20 s of training: 120 cell-seconds, 40 s on three cells.
    # Tail: 50 s, the optimizer's 2 s, and one of two groups: 10 s.
    assert estimates.tail_ratio(staleness=0, cells=3, slots=4, rollouts=8, groups=2) == pytest.approx(62 / 40)
    assert estimates.tail_ratio(staleness=1, cells=3, slots=4, rollouts=8, groups=2) == pytest.approx(62 / 80)
