"""Lease lengths and the small tail, as pure functions."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.train.queue_rates import LeaseRule, Rates, tail_parts


def finish_spread(pieces: list[float], rates: list[float]) -> tuple[float, float]:
    """(when the last trainer ends, idle time summed over trainers) when free trainers take the next piece."""
    free = [(0.0, index) for index in range(len(rates))]
    for piece in pieces:
        at, index = heapq.heappop(free)
        heapq.heappush(free, (at + piece / rates[index], index))
    ends = [at for at, _ in free]
    return max(ends), sum(max(ends) - at for at in ends)


def test_rates_smooth_and_a_newcomer_counts_as_the_slowest() -> None:
    rates = Rates()
    assert rates.of("cell-1") is None
    rates.measured("cell-1", 100, 1.0)
    rates.measured("cell-1", 300, 1.0)
    rates.measured("cell-2", 50, 1.0)
    rates.measured("cell-2", 0, 1.0)
    rates.measured("cell-2", 9, 0.0)
    assert rates.all() == {"cell-1": 200.0, "cell-2": 50.0}
    assert rates.of("cell-3") == 50.0


def test_lease_of_a_hundred_times_longer_rollout_is_as_much_longer() -> None:
    rule = LeaseRule(min_s=1.0, slack=4.0)
    assert rule.seconds(100, 50.0, 1) == 1.0 + 8.0
    assert rule.seconds(10_000, 50.0, 1) == 1.0 + 800.0
    assert rule.seconds(100, 50.0, 3) == 4 * 9.0


@pytest.mark.parametrize("wrong", [{"min_s": 0.0}, {"slack": -1.0}, {"assumed_tokens_per_s": 0.0}])
def test_lease_rule_refuses_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a lease needs"):
        LeaseRule(**wrong)


def test_tail_is_small_and_the_beginning_is_left_alone() -> None:
    assert tail_parts([1000] * 8, [1.0] * 4, min_tokens=1) == [1, 2, 2, 2, 2, 3, 4, 8]
    assert tail_parts([1000] * 8, [1.0], min_tokens=1) == [1] * 8
    assert tail_parts([1000], [1.0] * 4, min_tokens=400) == [3]
    assert tail_parts([], [1.0, 2.0], min_tokens=1) == []


@given(
    tokens=st.lists(st.integers(100, 1000), min_size=1, max_size=40),
    rates=st.lists(st.floats(0.5, 4.0), min_size=2, max_size=8),
)
def test_tail_ends_together_within_the_largest_last_piece(tokens: list[int], rates: list[float]) -> None:
    parts = tail_parts(tokens, rates, min_tokens=1)
    pieces = [size / count for size, count in zip(tokens, parts, strict=True) for _ in range(count)]
    end, _ = finish_spread(pieces, rates)
    ideal = sum(tokens) / sum(rates)
    # Someone is idle at most as long as the slowest needs for one of the pieces that are handed out near the end.
    assert end <= ideal * 1.5 + 1e-6


def test_tail_saves_time_against_whole_micro_steps() -> None:
    tokens, rates = [1000] * 9, [1.0, 1.0, 1.0, 1.0]
    parts = tail_parts(tokens, rates, min_tokens=64)
    pieces = [size / count for size, count in zip(tokens, parts, strict=True) for _ in range(count)]
    whole, idle_whole = finish_spread([float(size) for size in tokens], rates)
    split, idle_split = finish_spread(pieces, rates)
    assert whole == 3000.0
    assert split < 2400.0
    assert idle_split < idle_whole / 5
