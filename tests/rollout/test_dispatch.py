"""Dispatch: reproducible, without replacement, with ids that never collide."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.rollout.dispatch import plan_groups, problems_of_step, stable_seed


def test_stable_seed_known_value_does_not_change() -> None:
    assert stable_seed(0, "epoch", 0) == 1_374_375_797_575_617_893


@given(num_problems=st.integers(1, 20), groups=st.integers(1, 8), seed=st.integers(0, 1000))
def test_problems_one_epoch_holds_every_problem_once(num_problems: int, groups: int, seed: int) -> None:
    ids = [f"p{i:02d}" for i in range(num_problems)]
    drawn: list[str] = []
    for step in range(num_problems):  # num_problems steps of `groups` are `groups` whole epochs
        drawn += problems_of_step(ids, seed=seed, step=step, groups_per_step=groups)
    for epoch in range(groups):
        assert sorted(drawn[epoch * num_problems : (epoch + 1) * num_problems]) == ids


def test_problems_order_of_input_does_not_matter() -> None:
    forward = problems_of_step(["a", "b", "c"], seed=1, step=2, groups_per_step=2)
    assert forward == problems_of_step(["c", "a", "b"], seed=1, step=2, groups_per_step=2)


def test_problems_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no problems"):
        problems_of_step([], seed=0, step=0, groups_per_step=1)


def test_plan_repeated_problem_gets_ids_of_its_own() -> None:
    groups = plan_groups(["a", "b", "a"], prefix="s0000", step=0, group_size=2, seed=7, policy_version=3)
    assert [group[0].group_id for group in groups] == ["s0000-a", "s0000-b", "s0000-a.2"]
    specs = [spec for group in groups for spec in group]
    assert max(Counter(spec.rollout_id for spec in specs).values()) == 1
    assert len({spec.seed for spec in specs}) == 6
    assert {spec.dispatch_version for spec in specs} == {3}
