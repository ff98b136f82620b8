"""Exports and direct reading: what other programs see of a store."""

import json
import re
from pathlib import Path

import duckdb
import pandas as pd
import pytest
import yaml

from gyre_core.errors import StoreError
from gyre_core.store.export import export
from gyre_core.store.maintenance import compact
from gyre_core.store.records import StepRecord
from gyre_core.store.store import Store
from gyre_core.store.tables import rollout_tables
from tests.support.rollouts import branch_of, finished, two_turns

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two groups of two rollouts and a step, and an object that was never committed."""
    store = Store.open(str(tmp_path / "runs" / "r1" / "store"))
    for number in range(2):
        ids = [f"g{number}-{member}" for member in range(2)]
        rollouts = [finished(rollout_id, reward=member / 2) for member, rollout_id in enumerate(ids)]
        store.commit_rollouts("group", rollouts, [branch_of(two_turns(ids[0]), 3)], {}, f"g{number}")
    store.commit_step(StepRecord(step=0, version_before=0, version_after=1), token="step-0")
    store.put_table("nodes", rollout_tables([finished("orphan")])["nodes"])
    return store


@pytest.mark.parametrize("compacted", [False, True])
def test_export_hf_layout_is_read_by_pandas_and_duckdb(store: Store, tmp_path: Path, compacted: bool) -> None:
    if compacted:
        compact(store, apply=True)
    folder = tmp_path / "out"
    report = export(store, folder, "hf")
    assert report.rows == {"rollouts": 4, "nodes": 20, "calls": 12, "grades": 4, "selections": 2, "steps": 1}
    nodes = pd.read_parquet(folder / "nodes")
    assert nodes.rollout_id.unique().tolist() == ["g0-0", "g0-1", "g1-0", "g1-1"]
    assert nodes.tokens[1].tolist() == [10, 11]
    calls = pd.read_parquet(folder / "calls" / "train-00000-of-00001.parquet")
    assert calls.hints[0].tolist() == [{"key": "x-agent", "value": "main"}]
    query = f"select avg(reward) from read_parquet('{folder}/grades/*.parquet')"
    assert duckdb.sql(query).fetchall() == [(0.25,)]

    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    configs = {config["config_name"]: config["data_files"][0] for config in yaml.safe_load(header)["configs"]}
    assert configs.keys() == report.rows.keys()
    for name, files in configs.items():
        assert files["split"] == "train" and list(folder.glob(files["path"])), name
    assert str(tmp_path) not in text and "- `tokens`: list<" in text


def test_export_jsonl_has_a_line_a_row(store: Store, tmp_path: Path) -> None:
    report = export(store, tmp_path / "out", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").read_text().splitlines()]
    assert len(lines) == report.rows["calls"] == 12
    assert lines[0]["hints"] == {"x-agent": "main"} and lines[0]["rollout_id"] == "g0-0"
    (step,) = (json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines())
    assert step["version_after"] == 1


def test_export_into_a_folder_that_holds_something_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not empty"):
        export(store, tmp_path, "jsonl")


def test_examples_of_the_documentation_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "store.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    with_duckdb: dict = {}
    exec(blocks[0], with_duckdb)
    assert with_duckdb["rewards"] == [("p07", 4, 0.25)]
    assert with_duckdb["sampled"] == [(16,)]
    with_pandas: dict = {}
    exec(blocks[1], with_pandas)
    assert with_pandas["tokens"].to_dict() == dict.fromkeys(("g0-0", "g0-1", "g1-0", "g1-1"), 8)
