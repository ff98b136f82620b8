import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.selection.advantage import group_advantages

rewards_lists = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=16)


def test_advantage_by_hand():
    # mean 0.5, deviations -0.5 0.5 0.25 -0.25, variance (0.25 + 0.25 + 0.0625 + 0.0625) / 4 = 0.15625
    group = group_advantages([0.0, 1.0, 0.75, 0.25], min_group=2, eps=0.0)
    std = math.sqrt(0.15625)
    np.testing.assert_allclose(group.values, [-0.5 / std, 0.5 / std, 0.25 / std, -0.25 / std], rtol=1e-15)
    assert group.included.tolist() == [True] * 4 and group.dropped_reason is None


def test_advantage_eps_is_added_to_the_std():
    group = group_advantages([0.0, 1.0], min_group=2, eps=0.5)
    assert group.values.tolist() == [-0.5, 0.5]  # 0.5 / (0.5 + 0.5)


def test_advantage_14_of_16_members_use_statistics_of_14():
    rewards = [None] + [1.0] * 7 + [None] + [0.0] * 7
    group = group_advantages(rewards, min_group=2, eps=0.0)
    assert np.isnan(group.values[[0, 8]]).all()
    assert group.values[1:8].tolist() == [1.0] * 7 and group.values[9:].tolist() == [-1.0] * 7


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.0, 0.0, 1e-300])
@pytest.mark.parametrize("num", [2, 3, 7, 10, 16])
def test_advantage_all_equal_is_exactly_zero(value: float, num: int):
    group = group_advantages([value] * num, min_group=2, eps=1e-6)
    assert group.values.tolist() == [0.0] * num
    assert group.dropped_reason is None


def test_advantage_one_member_left_is_zero_or_dropped():
    assert group_advantages([None, 0.3, None], min_group=1, eps=1e-6).values[1] == 0.0
    group = group_advantages([None, 0.3, None], min_group=2, eps=1e-6)
    assert group.dropped_reason == "1 of 3 members are included, 2 are needed (selection.min_group)"
    assert np.isnan(group.values).all() and not group.included.any()


def test_advantage_of_nobody_is_dropped():
    assert group_advantages([], min_group=1, eps=0.0).dropped_reason is not None


@pytest.mark.parametrize("rewards", [[0.0, math.nan], [math.inf, 0.0]])
def test_advantage_of_a_reward_that_is_not_finite_raises(rewards: list[float]):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(rewards, min_group=1, eps=0.0)


@given(rewards_lists, st.integers(1, 4), st.randoms(use_true_random=False))
def test_advantage_does_not_depend_on_the_order(rewards: list[float | None], min_group: int, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(rewards, min_group=min_group, eps=1e-6)
    shuffled = group_advantages([rewards[i] for i in order], min_group=min_group, eps=1e-6)
    assert straight.values[order].tobytes() == shuffled.values.tobytes()


@given(rewards_lists, st.lists(st.integers(0, 15), max_size=5))
def test_advantage_excluded_members_change_nothing(rewards: list[float | None], places: list[int]):
    known = [reward for reward in rewards if reward is not None]
    more: list[float | None] = list(known)
    for place in places:
        more.insert(min(place, len(more)), None)
    alone, among = (group_advantages(group, min_group=1, eps=1e-6) for group in (known, more))
    assert among.values[among.included].tobytes() == alone.values[alone.included].tobytes()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantage_has_mean_zero_and_at_most_unit_std(rewards: list[float]):
    values = group_advantages(rewards, min_group=2, eps=1e-6).values
    assert np.isfinite(values).all()
    assert abs(values.sum()) < 1e-9
    assert values.std() <= 1 + 1e-9
    if len(set(rewards)) == 1:
        assert values.tolist() == [0.0] * len(rewards)
