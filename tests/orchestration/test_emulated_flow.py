"""A whole emulated run: the real flow, fleet, proxies and scheduler around cells that take a cost model's time."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.train import train
from gyre_core.bench.elastic_run import run_config, to_toml, write_inputs
from gyre_core.bench.elastic_scale import scale
from gyre_core.bench.elastic_trace import bench_trace
from gyre_core.cli.trace import find_rollout, list_rollouts, show_trace
from gyre_core.config import load_run_config
from gyre_core.config.emulation import account_path
from gyre_core.sim.model import Cluster, Costs, Scenario, Workload
from gyre_core.sim.trace import read_rollouts
from gyre_core.store import Store

pytestmark = pytest.mark.integration

SCENARIO = Scenario(
    workload=Workload(groups=2, group_size=4, sampled_tokens=2000.0, max_tokens=6000.0, unique_ratio=2.0, segments=2),
    costs=Costs(train_tokens_per_node_s=200.0, optimizer_s=5.0, sync_s=1.0, grade_s=1.0),
    cluster=Cluster(cells=2, slots=8),
)


@pytest.fixture(scope="module")
def emulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run `tiny` of two steps, traced, in `runs`."""
    folder = tmp_path_factory.mktemp("emulated")
    write_inputs(folder, problems=3)
    scaled = scale(SCENARIO, groups=2, steps=2, compression=1.0, mean_tokens=60.0)
    tree = run_config(folder, scaled, name="tiny", policy="elastic", train_cells=1, steps=2, compression=100.0)
    tree["tracing"] = {"export": "file"}
    (folder / "tiny.toml").write_text(to_toml(tree))
    train(load_run_config(folder / "tiny.toml"), "tiny", quiet=True)
    return folder / "runs"


def test_emulated_run_moves_cells_and_trains_every_target_once(emulated_run: Path) -> None:
    store = Store.open(f"{emulated_run}/tiny/store")
    steps = store.read_steps()
    assert [step.version_after for step in steps] == [1, 2]
    groups = [name for step in steps for name in step.groups_trained]
    assert len(groups) == len(set(groups)) == 4
    assert sum(step.outcomes["finished"] for step in steps) == 16
    accounts = [json.loads(account_path(emulated_run / "tiny", f"cell-{i}").read_text()) for i in range(2)]
    targets = sum(int(step.stats["num_targets"]) for step in steps)
    assert accounts[0]["targets_trained"] == targets > 0  # the core's weights count what was trained
    decisions = [decision for step in steps for decision in step.extra["decisions"]]
    outcomes = [outcome for decision in decisions for outcome in decision["outcomes"]]
    moved = [outcome["to"] for outcome in outcomes if not outcome["failed"]]
    assert moved.count("train") >= 2  # the core at least, in each step


@pytest.mark.slow
def test_a_run_played_again_does_what_it_did(emulated_run: Path, tmp_path: Path) -> None:
    result = bench_trace(emulated_run, "tiny", policies=["colocate"], folder=tmp_path)
    row = result["policies"]["colocate"]
    assert row["measured_steps_per_hour"] is None, "the run was made under another policy"
    assert row["emulated_steps_per_hour"] > 0 and row["simulated_steps_per_hour"] > 0
    stores = [Store.open(f"{place}/store") for place in (emulated_run / "tiny", tmp_path / "runs" / "trace-colocate")]
    first, second = ({one.rollout_id: one for one in read_rollouts(store)} for store in stores)
    assert first.keys() == second.keys() and len(first) == 16
    for name, one in first.items():
        assert (one.reward, len(one.calls)) == (second[name].reward, len(second[name].calls))
    trained = [sorted(group for step in store.read_steps() for group in step.groups_trained) for store in stores]
    assert trained[0] == trained[1]


def test_each_rollout_and_each_step_is_one_trace(emulated_run: Path) -> None:
    check_traces(emulated_run / "tiny" / "traces", Store.open(f"{emulated_run}/tiny/store"))


def check_traces(folder: Path, store: Store) -> None:
    """Each rollout is one trace over flow, proxy and cells, and each step is one."""
    listed, text = list_rollouts(folder, "tiny")
    assert len(listed["rollouts"]) == 16
    assert listed["rollouts"][0]["rollout"] in text
    trained = {branch.rollout_id for commit in store.commits("group") for branch in store.read_branches(commit)}
    for row in listed["rollouts"]:
        rollout_id = find_rollout(folder, row["rollout"])
        shown, _ = show_trace(folder, "tiny", f"rollout/{rollout_id}")
        by_name: dict[str, list[dict[str, Any]]] = {}
        for span in shown["spans"]:
            by_name.setdefault(span["name"], []).append(span)
        assert shown["spans"][0]["name"] == "rollout"
        assert [span["process"] for name in ("prepare", "harness", "seal", "grade") for span in by_name[name]] == [
            "flow"
        ] * 4
        assert len(by_name["chat"]) == row["calls"] >= 1
        assert {span["process"] for span in by_name["chat"] + by_name["engine.generate"]} == {"proxy-0"}
        assert ("train" in by_name) == (rollout_id in trained)
        micro_steps = by_name.get("train.micro_step", [])
        assert {span["process"] for span in micro_steps} <= {"cell-0", "cell-1"}
        harness, end_s = by_name["harness"][0], shown["seconds"]
        for span in by_name["chat"]:
            assert harness["start_s"] - 0.1 <= span["start_s"] <= harness["start_s"] + harness["seconds"] <= end_s
    step, text = show_trace(folder, "tiny", "step/1")
    assert [span["name"] for span in step["spans"]] == ["step", "rollouts", "train tail", "publish and commit"]
    assert step["spans"][0]["attributes"]["gyre.groups_trained"] == 2
    assert "train tail [flow]" in text
