"""A whole emulated run: the real flow, fleet, proxies and scheduler around cells that take a cost model's time."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.train import train
from gyre_core.bench.elastic_run import run_config, to_toml, write_inputs
from gyre_core.bench.elastic_scale import scale
from gyre_core.cli.trace import find_rollout, list_rollouts, show_trace
from gyre_core.config import load_run_config
from gyre_core.config.emulation import account_path
from gyre_core.sim.model import Cluster, Costs, Scenario, Workload
from gyre_core.store import Store

pytestmark = pytest.mark.integration

SCENARIO = Scenario(
    workload=Workload(groups=2, group_size=4, sampled_tokens=2000.0, max_tokens=6000.0, unique_ratio=2.0, segments=2),
    costs=Costs(train_tokens_per_node_s=200.0, optimizer_s=5.0, sync_s=1.0, grade_s=1.0),
    cluster=Cluster(cells=2, slots=8),
)


def test_emulated_run_moves_cells_and_trains_every_target_once(tmp_path: Path):
    write_inputs(tmp_path, problems=3)
    scaled = scale(SCENARIO, groups=2, steps=2, compression=1.0, mean_tokens=60.0)
    tree = run_config(tmp_path, scaled, name="tiny", policy="elastic", train_cells=1, steps=2, compression=100.0)
    tree["tracing"] = {"export": "file"}
    (tmp_path / "tiny.toml").write_text(to_toml(tree))
    config = load_run_config(tmp_path / "tiny.toml")
    train(config, "tiny", quiet=True)
    store = Store.open(f"{tmp_path}/runs/tiny/store")
    steps = store.read_steps()
    assert [step.version_after for step in steps] == [1, 2]
    groups = [name for step in steps for name in step.groups_trained]
    assert len(groups) == len(set(groups)) == 4
    assert sum(step.outcomes["finished"] for step in steps) == 16
    accounts = [json.loads(account_path(tmp_path / "runs" / "tiny", f"cell-{i}").read_text()) for i in range(2)]
    targets = sum(int(step.stats["num_targets"]) for step in steps)
    assert accounts[0]["targets_trained"] == targets > 0  # the core's weights count what was trained
    decisions = [decision for step in steps for decision in step.extra["decisions"]]
    outcomes = [outcome for decision in decisions for outcome in decision["outcomes"]]
    moved = [outcome["to"] for outcome in outcomes if not outcome["failed"]]
    assert moved.count("train") >= 2  # the core at least, in each step
    check_traces(tmp_path / "runs" / "tiny" / "traces", store)


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
