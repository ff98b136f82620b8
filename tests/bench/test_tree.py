"""`gyre bench tree`: the synthetic rollout is what it says, and the numbers fit together."""

import json
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from gyre_core.bench.tree import bench_tree, tree_rows
from gyre_core.bench.tree_rollout import synthetic_calls
from gyre_core.cli.main import app
from gyre_core.types import Role


def test_bench_tree_small_rollout_adds_up() -> None:
    result = bench_tree(num_tokens=20_000, num_calls=60, seed=1)

    assert result["calls"] == 60
    assert 0.7 * 20_000 < result["unique_tokens"] < 1.3 * 20_000
    assert 0 < result["sampled_tokens"] < result["unique_tokens"] < result["flat_tokens"]
    assert result["flat_bytes"] == 4 * (result["flat_tokens"] + result["sampled_tokens"])
    assert result["kept_bytes"] > 4 * (result["unique_tokens"] + result["sampled_tokens"])  # ids, and log-probs
    assert result["bytes_per_unique_token"] == round(result["kept_bytes"] / result["unique_tokens"], 2)
    assert result["substitutions"] == {"substitution_clean": 60}
    for name in ("build_s", "restore_s", "seal_s", "ipc_read_s", "journal_bytes", "ipc_bytes", "ratio"):
        assert result[name] > 0, name


def test_bench_tree_cli_json_is_one_object_with_the_keys() -> None:
    done = CliRunner().invoke(app, ["bench", "tree", "--json", "--tokens", "4000", "--calls", "20"])

    assert done.exit_code == 0, done.output
    assert {"build_s", "unique_tokens", "bytes_per_unique_token", "flat_bytes", "ratio"} <= json.loads(
        done.stdout
    ).keys()


def test_bench_tree_rows_name_every_measurement() -> None:
    rows = dict(tree_rows(bench_tree(num_tokens=4_000, num_calls=20, seed=0)))

    assert {"build", "memory", "flat storage", "journal", "seal to Arrow IPC"} <= rows.keys()


def test_synthetic_calls_same_seed_gives_same_calls() -> None:
    first, second = (list(synthetic_calls(num_calls=40, num_tokens=8_000, seed=3)) for _ in range(2))

    assert [call.keys for call in first] == [call.keys for call in second]
    assert all(np.array_equal(a.added, b.added) for a, b in zip(first, second, strict=True))
    assert all(np.array_equal(a.output_ids, b.output_ids) for a, b in zip(first, second, strict=True))


def test_synthetic_calls_hold_compactions_sub_agents_and_repeats() -> None:
    calls = list(synthetic_calls(num_calls=300, num_tokens=60_000, seed=0))

    roles = Counter(call.role for call in calls)
    requests = Counter((call.context, call.keys) for call in calls)
    assert min(roles[Role.MAIN], roles[Role.SUB_AGENT], roles[Role.MAIN_SUMMARY]) > 0
    assert max(requests.values()) > 1  # a request that was sampled again


def test_synthetic_calls_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        list(synthetic_calls(num_calls=100, num_tokens=100, seed=0))
