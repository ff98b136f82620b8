"""The transfer benchmark runs, checks its bytes and says what it measured."""

import pytest

from gyre_core.bench.transfer import bench_transfer, transfer_lines


@pytest.mark.integration
def test_bench_transfer_measures_three_ways_and_the_ratio() -> None:
    result = bench_transfer([1, 2], rounds=2)
    assert [row["mib"] for row in result["table"]] == [1, 2]
    assert all(set(row["ways"]) == {"mooncake", "socket", "shared_memory"} for row in result["table"])
    assert result["mooncake_ratio_vs_socket"] == min(row["mooncake_vs_socket"] for row in result["table"])
    assert result["goal_met"] == (result["mooncake_ratio_vs_socket"] >= 0.9)
    assert len(transfer_lines(result)) == 1 + 2 * 4 + 1


def test_bench_transfer_without_mooncake_has_no_ratio() -> None:
    result = bench_transfer([1], rounds=1, with_mooncake=False)
    assert set(result["table"][0]["ways"]) == {"socket", "shared_memory"}
    assert "mooncake_ratio_vs_socket" not in result


@pytest.mark.parametrize(("sizes", "rounds"), [([], 1), ([0], 1), ([1], 0)])
def test_bench_transfer_bad_sizes_are_refused(sizes: list[int], rounds: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        bench_transfer(sizes, rounds=rounds)
