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

    calls = list(synthetic_calls(num_calls=60, num_tokens=20_000, seed=1))
    requests = {(call.context, call.keys): call for call in calls}
    sampled = sum(len(call.output_ids) for call in calls)
    # A system prompt is 1.2 % of the tokens, 240; the first of each of the two kinds is new, later ones are shared.
    starts = sum(len(keys) == 2 for _context, keys in requests)
    prompts = sum(len(call.added) for call in requests.values()) - 240 * (starts - 2)
    assert (result["calls"], result["branches"]) == (60, 8)
    assert (result["sampled_tokens"], result["unique_tokens"]) == (sampled, prompts + sampled)
    assert result["flat_bytes"] == 4 * (result["flat_tokens"] + result["sampled_tokens"])
    assert result["kept_bytes"] > 4 * (result["unique_tokens"] + result["sampled_tokens"])  # ids, and log-probs
    assert result["bytes_per_unique_token"] == round(result["kept_bytes"] / result["unique_tokens"], 2)
    assert result["substitutions"] == {"substitution_clean": 60}
    assert result["ratio"] == round(result["flat_bytes"] / result["kept_bytes"], 1)
    # Ids of 4 bytes once each, a log-prob of 4 for each sampled token, and at most 1.5 KB a call for all else.
    arrays = 4 * (sum(len(call.added) for call in calls) + 2 * sampled)
    assert arrays < result["journal_bytes"] < arrays + 60 * 1_500
    arrays = 4 * (result["unique_tokens"] + sampled)
    assert arrays < result["ipc_bytes"] < arrays + 60 * 1_500


def test_bench_tree_cli_json_is_one_object_with_the_keys() -> None:
    done = CliRunner().invoke(app, ["bench", "tree", "--json", "--tokens", "4000", "--calls", "20"])

    assert done.exit_code == 0, done.output
    assert {"build_s", "unique_tokens", "bytes_per_unique_token", "flat_bytes", "ratio"} <= json.loads(
        done.stdout
    ).keys()


def test_tree_rows_a_known_result_is_told_in_these_words() -> None:
    result = {
        **{"calls": 20, "nodes": 41, "branches": 3, "unique_tokens": 4_000, "sampled_tokens": 1_000, "ratio": 2.5},
        **{"build_s": 0.03, "kept_bytes": 48_000, "flat_bytes": 120_000, "flat_tokens": 29_000, "seal_s": 0.004},
        **{"bytes_per_unique_token": 12.0, "journal_bytes": 2_000_000, "restore_s": 0.5, "ipc_bytes": 1_000_000},
        "ipc_read_s": 0.002,
    }
    assert tree_rows(result) == [
        ("rollout", "20 calls, 41 nodes, 3 branches"),
        ("unique tokens", "4,000 (1,000 sampled)"),
        ("build", "0.030 s (1.50 ms a call)"),
        ("memory", "0.0 MB, 12.0 bytes a unique token"),
        ("flat storage", "0.1 MB for 29,000 tokens"),
        ("flat / tree", "2.5"),
        ("journal", "2.0 MB, restored in 0.500 s"),
        ("seal to Arrow IPC", "1.0 MB in 0.004 s"),
        ("read Arrow IPC", "0.002 s"),
    ]


def test_synthetic_calls_same_seed_gives_same_calls() -> None:
    first, second = (list(synthetic_calls(num_calls=40, num_tokens=8_000, seed=3)) for _ in range(2))

    assert [call.keys for call in first] == [call.keys for call in second]
    assert all(np.array_equal(a.added, b.added) for a, b in zip(first, second, strict=True))
    assert all(np.array_equal(a.output_ids, b.output_ids) for a, b in zip(first, second, strict=True))


def test_synthetic_calls_hold_compactions_sub_agents_and_repeats() -> None:
    calls = list(synthetic_calls(num_calls=300, num_tokens=60_000, seed=0))

    roles = Counter(call.role for call in calls)
    requests = Counter((call.context, call.keys) for call in calls)
    # The main conversation is summarised after 50 calls, a sixth of 300: 134 calls hold two summaries.
    assert roles == {Role.MAIN: 132, Role.MAIN_SUMMARY: 2, Role.SUB_AGENT: 166}
    assert Counter(requests.values()) == {1: 288, 2: 6}  # six requests were sampled again


def test_synthetic_calls_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        list(synthetic_calls(num_calls=100, num_tokens=100, seed=0))
