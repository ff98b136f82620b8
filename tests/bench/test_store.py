"""`gyre bench store`: every key, sane sizes, and nothing left behind."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_core.bench.store import bench_store
from gyre_core.cli.main import app


def test_bench_store_counts_tokens_and_leaves_the_folder_empty(tmp_path: Path) -> None:
    result = bench_store(str(tmp_path / "s"), num_rollouts=3, num_calls=20, num_tokens=4_000, repeats=1, seed=1)
    assert result["rollouts"] == 3 and 3 * 3_500 < result["unique_tokens"] < 3 * 4_500
    assert result["stored_mb"] * 1e6 == pytest.approx(result["bytes_per_token"] * result["unique_tokens"], rel=1e-2)
    # Ids take 17 of 32 bits here and log-probs are on sampled tokens only: below the 8 bytes of the raw arrays.
    assert 1.0 < result["bytes_per_token"] < 8.0
    assert result["stored_mb"] < result["raw_mb"]
    for what in ("write", "read"):  # of one round: the ratio of the two speeds
        ratio = result[f"{what}_mb_s"] / result[f"pyarrow_{what}_mb_s"]
        assert result[f"{what}_ratio_vs_pyarrow"] == pytest.approx(ratio, rel=1e-2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_store_command_prints_one_json_object() -> None:
    arguments = ["bench", "store", "--rollouts", "1", "--calls", "5", "--tokens", "500", "--repeats", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert {
        "bytes_per_token",
        "write_ratio_vs_pyarrow",
        "read_ratio_vs_pyarrow",
        "one_rollout_ms",
        "write_mb_s",
        "read_mb_s",
    } <= json.loads(done.stdout.splitlines()[-1]).keys()
