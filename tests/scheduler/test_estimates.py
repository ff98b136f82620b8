"""What a run measures of itself for its policies."""

import pytest

from gyre_core.scheduler.estimates import Estimates


def add(estimates: Estimates, group_id: str, *, step: int = 0, problem_id: str = "p", rollouts: int = 1) -> None:
    estimates.group_added(group_id, step=step, problem_id=problem_id, rollouts=rollouts)


def run(estimates: Estimates, group_id: str, *, started_s: float, ended_s: float, member: int = 0) -> None:
    estimates.rollout_started(f"{group_id}-{member}", group_id, started_s)
    estimates.rollout_ended(f"{group_id}-{member}", group_id, ended_s)


def test_estimates_know_nothing_at_first() -> None:
    estimates = Estimates()
    assert (estimates.longest_s, estimates.microstep_s, estimates.tail_s(0, 5.0)) == (0.0, 0.0, 0.0)
    assert (estimates.group_microsteps, estimates.predicted("p")) == (1.0, 1.0)
    assert estimates.tail_ratio(staleness=0, cells=3, slots=4, rollouts=8, groups=2) == 1.0


def test_estimates_problem_is_foreseen_from_its_own_rollouts_and_one_mean_rollout() -> None:
    estimates = Estimates()
    add(estimates, "a", problem_id="long", rollouts=2)
    add(estimates, "b", problem_id="short")
    run(estimates, "a", started_s=0.0, ended_s=100.0)
    run(estimates, "a", started_s=0.0, ended_s=140.0, member=1)
    run(estimates, "b", started_s=10.0, ended_s=70.0)
    # The mean is 100 s: (100 + 140 + 100) / 3 and (60 + 100) / 2 of it.
    assert estimates.predicted("long") == pytest.approx(340 / 300)
    assert estimates.predicted("short") == pytest.approx(160 / 200)
    assert estimates.predicted("new") == 1.0


def test_estimates_tail_is_what_the_last_group_still_takes_as_foreseen() -> None:
    estimates = Estimates()
    add(estimates, "a", rollouts=2)
    run(estimates, "a", started_s=0.0, ended_s=40.0)
    assert estimates.tail_s(0, 50.0) == 0.0, "no group is over yet: nothing is known"
    run(estimates, "a", started_s=5.0, ended_s=80.0, member=1)  # the group took 80 s
    add(estimates, "b", step=1, problem_id="other")
    add(estimates, "c", step=1, problem_id="other")
    add(estimates, "d", step=2, problem_id="other")
    estimates.rollout_started("b-0", "b", 100.0)
    assert estimates.tail_s(1, 130.0) == pytest.approx(80.0), "c waits: all of it is to come"
    estimates.rollout_started("c-0", "c", 120.0)
    assert estimates.tail_s(1, 130.0) == pytest.approx(70.0)
    estimates.rollout_ended("c-0", "c", 190.0)
    assert estimates.tail_s(1, 200.0) == pytest.approx(0.05 * 100), "b is overdue"
    estimates.rollout_ended("b-0", "b", 210.0)
    assert estimates.tail_s(1, 210.0) == 0.0


def test_estimates_tail_of_a_long_problem_is_longer() -> None:
    estimates = Estimates()
    for group, problem, seconds in (("a", "long", 150.0), ("b", "short", 50.0)):
        add(estimates, group, problem_id=problem)
        run(estimates, group, started_s=0.0, ended_s=seconds)
    add(estimates, "c", step=1, problem_id="long")
    assert estimates.predicted("long") == pytest.approx(1.25)
    assert estimates.tail_s(1, 200.0) == pytest.approx(1.25 * 100), "groups took 150 and 50 s, each as foreseen then"


def test_estimates_longest_rollout_is_the_998th_of_a_thousand() -> None:
    estimates = Estimates()
    add(estimates, "a", rollouts=2)
    run(estimates, "a", started_s=0.0, ended_s=40.0)
    run(estimates, "a", started_s=0.0, ended_s=100.0, member=1)
    assert estimates.longest_s == pytest.approx(40 + 0.998 * 60)  # between the two values, linearly


def test_estimates_ratio_of_tail_and_work() -> None:
    estimates = Estimates()
    add(estimates, "a", rollouts=2)
    run(estimates, "a", started_s=0.0, ended_s=50.0)
    run(estimates, "a", started_s=0.0, ended_s=50.0, member=1)
    estimates.step_ended(groups=4, micro_steps=10, forward_backward_s=20.0, optimizer_s=2.0)
    assert (estimates.microstep_s, estimates.group_microsteps) == (2.0, 2.5)
    # Work: 8 rollouts of 50 s on 4 slots and 20 s of training: 120 cell-seconds, 40 s on three cells.
    # Tail: 50 s, the optimizer's 2 s, and one of two groups: 10 s.
    assert estimates.tail_ratio(staleness=0, cells=3, slots=4, rollouts=8, groups=2) == pytest.approx(62 / 40)
    assert estimates.tail_ratio(staleness=1, cells=3, slots=4, rollouts=8, groups=2) == pytest.approx(62 / 80)
