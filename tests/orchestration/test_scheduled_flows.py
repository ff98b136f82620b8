"""What a deployment's flow run does with a run that is new, goes on, is finished, is taken, or always crashes."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Crashed, Running, State

from flows import scheduled
from gyre_core.config import RunConfig, load_run_config
from gyre_core.errors import GyreError
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from tasks.scheduled_runs import newest_checkpoint_of, plan_training, refuse_endless_crashes


def write_config(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f"""
name = "nightly"
runs_dir = {json.dumps(str(folder / "runs"))}
model = {{ path = "policy" }}
data = {{ train = "problems" }}
rollout = {{ group_size = 3, groups_per_step = 2, slots = 2, harness = {{ command = ["x"] }} }}
train = {{ steps = 2 }}
scheduler = {{ cells = 1 }}
store = {{ min_free_bytes = 0 }}
"""
    )
    return path


def started_run(folder: Path, *overrides: str) -> tuple[RunConfig, RunFolder, Store]:
    config = load_run_config(write_config(folder), overrides)
    run = RunFolder.create(config, "nightly")
    return config, run, Store.open(run.store_url)


def commit_step(store: Store, version: int) -> None:
    store.commit("step", {}, {"version_after": version, "checkpoint": f"version-{version:05d}"}, f"step-{version}")


def test_plan_training_new_run_takes_every_override(tmp_path: Path) -> None:
    planned = plan_training(write_config(tmp_path), "nightly", ["train.learning_rate=0.5", "train.steps=4"])
    assert not planned.resume and planned.config.train.learning_rate == 0.5 and planned.config.train.steps == 4


def test_plan_training_run_that_goes_on_keeps_what_it_learns_from(tmp_path: Path) -> None:
    started_run(tmp_path, "train.learning_rate=0.5")
    overrides = ["train.learning_rate=0.25", "train.steps=4", f"runs_dir='{tmp_path / 'runs'}'"]
    planned = plan_training(tmp_path / "run.toml", "nightly", overrides)
    assert planned.resume
    assert planned.config.train.learning_rate == 0.5, "the run's own"
    assert planned.config.train.steps == 4, "how long it goes on may change"


def test_newest_checkpoint_is_the_one_that_the_newest_step_names(tmp_path: Path) -> None:
    config = load_run_config(write_config(tmp_path))
    assert newest_checkpoint_of(config, "nightly") is None, "no such run"
    _, run, store = started_run(tmp_path)
    assert newest_checkpoint_of(config, "nightly") is None, "no step yet"
    commit_step(store, 1)
    (run.checkpoints / "version-00002").mkdir()  # of a step that was never committed
    assert newest_checkpoint_of(config, "nightly") == run.checkpoints / "version-00001"


def run_training(folder: Path) -> State[Any]:
    return scheduled.train("nightly", str(folder / "run.toml"), return_state=True)


def test_scheduled_train_finished_run_is_complete_without_starting_anything(tmp_path: Path) -> None:
    _, run, store = started_run(tmp_path)
    for version in (1, 2):
        commit_step(store, version)
    store.commit("evaluation", {}, {"tag": "after"}, "evaluation-after")
    state = run_training(tmp_path)
    assert state.is_completed() and state.message == "run nightly is finished: all 2 steps are committed"
    assert not list(run.logs.iterdir())


def test_scheduled_train_run_of_another_process_is_cancelled_and_names_it(tmp_path: Path) -> None:
    _, run, store = started_run(tmp_path)
    commit_step(store, 1)
    with run.owned():
        state = run_training(tmp_path)
    assert state.is_cancelled()
    assert state.message is not None and "run nightly is being run by another process (pid" in state.message


@flow
def nothing() -> None:
    """Stands for a deployment's flow."""


def test_crashes_without_a_new_step_are_given_up_and_a_step_counts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, store = started_run(tmp_path)
    with get_client(sync_client=True) as client:
        deployment_id = client.create_deployment(client.create_flow(nothing), f"crashes-{tmp_path.name}")
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", str(deployment_id))
        for _ in range(2):
            refuse_endless_crashes(run, 2)
            crashed = client.create_flow_run_from_deployment(deployment_id)
            client.set_flow_run_state(crashed.id, Running(), force=True)
            client.set_flow_run_state(crashed.id, Crashed(), force=True)
        with pytest.raises(GyreError, match="run nightly crashed 2 times since its newest step was committed"):
            refuse_endless_crashes(run, 2)
        commit_step(store, 1)
        refuse_endless_crashes(run, 2)
