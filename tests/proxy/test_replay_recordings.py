"""What 556 recorded calls of eight harness versions become: none refused, every sampled token once, few branches.

The recordings hold no text of a harness (`infra/recordings.py distil`). The numbers in golden.json were read by people:
its `why` says what makes a run's second branch. `python infra/recordings.py golden tests/proxy/recordings` rewrites it.
"""

from pathlib import Path
from typing import Any

import orjson
import pytest

from gyre_core.trajectory.text import golden
from infra.recordings import harness_of, runs_of
from tests.support.replay import replay
from tests.support.tokenizer import save_model_folder

FOLDER = Path(__file__).parent / "recordings"
RECORDINGS = sorted(FOLDER.glob("*.jsonl.gz"))
GOLDEN: dict[str, dict[str, Any]] = orjson.loads((FOLDER / "golden.json").read_bytes())
RUNS = [(path, run) for path in RECORDINGS for run in runs_of(path)]


@pytest.mark.parametrize(("path", "run"), RUNS, ids=[run for _, run in RUNS])
async def test_recorded_run_replays_to_its_golden_tree(model_path: Path, path: Path, run: str) -> None:
    harness, version = harness_of(path)
    rows = runs_of(path)[run]
    result = await replay(model_path, rows, harness=harness, version=version)  # checks the tree against the engine
    assert result.refusals == []
    assert result.requests.total() == len(rows)
    expected = {key: value for key, value in GOLDEN[f"{harness} {version}"][run].items() if key != "why"}
    assert {"calls": len(rows), **result.summary()} == expected


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.name for path in RECORDINGS])
async def test_recorded_runs_are_refused_nothing_under_the_other_policy(model_path: Path, path: Path) -> None:
    harness, version = harness_of(path)
    for rows in runs_of(path).values():
        result = await replay(model_path, rows, harness=harness, version=version, on_change="fork")
        assert result.refusals == []
        kept = {"splice_changed_kept", "splice_empty_kept", "splice_joined", "splice_cut"}
        assert not kept & set(result.trajectory.counters)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("qwen3", {"thinking_retention": "tool_cycle"}), ("other", {"renderer": "default"})],
    ids=["thoughts-dropped", "any-template"],
)
@pytest.mark.parametrize("path", RECORDINGS, ids=[path.name for path in RECORDINGS])
async def test_recorded_runs_are_refused_nothing_with_other_templates(
    tmp_path: Path, path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    harness, version = harness_of(path)
    model_path = save_model_folder(tmp_path, model_type=model_type)
    for rows in runs_of(path).values():
        result = await replay(model_path, rows, harness=harness, version=version, proxy_fields=fields)
        assert result.refusals == []


@pytest.mark.parametrize(
    "run", ["cc220_fid", "cc220_c1", "cc220_529", "ccnew_cut_tool", "codex_cut", "qwen_cutcont", "oc_end"]
)
async def test_proxy_restarted_before_every_call_builds_the_same_tree(
    model_path: Path, tmp_path: Path, run: str
) -> None:
    path = next(path for path, name in RUNS if name == run)
    harness, version = harness_of(path)
    rows = runs_of(path)[run]
    once = await replay(model_path, rows, harness=harness, version=version)
    again = await replay(model_path, rows, harness=harness, version=version, journal_dir=tmp_path)
    assert again.refusals == []
    assert {**again.summary(), "counters": {}} == {**once.summary(), "counters": {}}  # retries are counted anew
    assert golden(again.trajectory.tree, str) == golden(once.trajectory.tree, str)


def test_golden_numbers_say_why_a_run_has_more_than_one_branch() -> None:
    runs = {run: golden for runs in GOLDEN.values() for run, golden in runs.items()}
    assert sum(golden["calls"] for golden in runs.values()) == 556
    unexplained = [run for run, golden in runs.items() if sum(golden["branches"].values()) > 1 and not golden["why"]]
    assert unexplained == []
