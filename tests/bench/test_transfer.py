"""The transfer benchmark runs, checks its bytes and says what it measured."""

import pytest

from gyre_core.bench.transfer import bench_transfer, transfer_lines


@pytest.mark.integration
def test_bench_transfer_measures_three_ways_and_the_ratio() -> None:
    result = bench_transfer([1, 2], rounds=2)
    assert [row["mib"] for row in result["table"]] == [1, 2]
    assert all(set(row["ways"]) == {"mooncake", "socket", "shared_memory"} for row in result["table"])
    assert result["mooncake_ratio_vs_socket"] == min(row["mooncake_vs_socket"] for row in result["table"])
    assert result["mooncake_cpu_vs_socket"] == max(row["mooncake_cpu_vs_socket"] for row in result["table"])
    assert result["goal_met"] == (result["mooncake_ratio_vs_socket"] >= 0.9)


def test_transfer_lines_a_known_result_is_this_table() -> None:
    ways = {"mooncake": {"median_gb_s": 2.5, "best_gb_s": 3.0, "cpu_s_per_gb": 0.5}}
    row = {"mib": 256, "ways": ways, "checksum_gb_s": 20.0}
    result = {"table": [row], "mooncake_ratio_vs_socket": 0.884, "mooncake_cpu_vs_socket": 1.25}
    assert transfer_lines({**result, "load_1min": 0.5, "cpus": 2}) == [
        "   MiB way             median GB/s  best GB/s  CPU s/GB",
        "   256 mooncake               2.50       3.00      0.50",
        "   256 checksum              20.00",
        "Mooncake over the socket, worst size: 0.88 (goal 0.9)",
        "processor seconds, Mooncake over the socket, worst size: 1.25",
        "load of the machine: 0.5 on 2 processors",
    ]


def test_bench_transfer_without_mooncake_has_no_ratio() -> None:
    result = bench_transfer([1], rounds=1, with_mooncake=False)
    assert set(result["table"][0]["ways"]) == {"socket", "shared_memory"}
    assert "mooncake_ratio_vs_socket" not in result


@pytest.mark.parametrize(("sizes", "rounds"), [([], 1), ([0], 1), ([1], 0)])
def test_bench_transfer_bad_sizes_are_refused(sizes: list[int], rounds: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        bench_transfer(sizes, rounds=rounds)
