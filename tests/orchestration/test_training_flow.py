"""The training flow: what it trains, in which order, and that a death at any point loses and repeats nothing."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows.rollout import TASK_RUNNER, run_groups
from flows.train import train_step
from gyre_core.cli.inspect import inspect_run
from gyre_core.errors import TrainError
from gyre_core.rollout.dispatch import plan_groups
from gyre_core.run_folder import RunFolder
from gyre_core.train.accounting import PHASES, phase_shares
from gyre_core.types import Outcome, RolloutSpec
from tasks.context import RunContext
from tasks.summary import run_summary
from tests.support.rollouts import Finished
from tests.support.runs import (
    FakeFleet,
    SimulatedDeath,
    finished_rollout,
    make_context,
    reward_by_member,
    small_config,
)


class Rollouts:
    """Stands for harness and verifier; counts executions and how many overlap."""

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()
        self.most_at_once = 0
        self.rewards: dict[str, float | None] = {}
        self._running = 0
        self._lock = threading.Lock()

    async def execute(self, spec: RolloutSpec, problem: Any, **_: Any) -> Any:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.executed[spec.rollout_id] += 1
        try:
            return Executed(spec)
        finally:
            with self._lock:
                self._running -= 1

    async def grade(self, executed: "Executed", problem: Any, **_: Any) -> Finished:
        spec = executed.spec
        reward = self.rewards.get(spec.rollout_id, reward_by_member(spec))
        outcome = Outcome.FINISHED if reward is not None else Outcome.VERIFIER_FAILED
        return finished_rollout(spec, reward, outcome)


class Executed:
    def __init__(self, spec: RolloutSpec) -> None:
        self.spec = spec


class NoAdmin:
    """The proxy's admin API, which the fakes of harness and verifier never use."""

    def __init__(self, *_: Any) -> None: ...

    async def __aenter__(self) -> "NoAdmin":
        return self

    async def __aexit__(self, *_: Any) -> None: ...


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    made = Rollouts()
    monkeypatch.setattr("tasks.rollouts.execute", made.execute)
    monkeypatch.setattr("tasks.grading.grade", made.grade)
    monkeypatch.setattr("tasks.rollouts.ProxyPool", NoAdmin)
    return made


@flow(task_runner=TASK_RUNNER, validate_parameters=False)
def steps_flow(run: RunContext, until: int) -> None:
    for step in range(run.policy_version, until):
        train_step(run, step)


def test_steps_train_every_group_once_and_in_order(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    run = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(run, 3)
    records = run.store.read_steps()
    assert [(record.step, record.version_before, record.version_after) for record in records] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 3),
    ]
    trained = Counter(group for record in records for group in record.groups_trained)
    assert len(trained) == 6 and set(trained.values()) == {1}
    assert set(rollouts.executed.values()) == {1} and len(rollouts.executed) == 18
    assert rollouts.most_at_once <= config.rollout.slots
    assert run.services.fleet.moved == [("cell-0", "train"), ("cell-0", "rollout")] * 3  # type: ignore[attr-defined]
    assert [move for move, _ in run.reporter.moves] == ["train", "rollout"] * 3  # type: ignore[attr-defined]
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["version-00002", "version-00003"]
    assert records[0].denominators == {"rollouts": 6}
    assert records[0].stats["reward_mean"] == 0.5


@pytest.mark.parametrize(
    "die_at",
    [
        ("train_open", 2),
        ("train_group", 3),
        ("train_seal", 3),
        ("move", 3),  # step 2 begins to train
        ("train_finish", 2),
        ("save_checkpoint", 2),
        ("refresh", 2),
        ("move", 4),  # step 2's weights are on their way back to rollout
        ("finish_checkpoint", 2),
    ],
)
def test_steps_killed_anywhere_resume_without_loss_or_repeat(
    tmp_path: Path, rollouts: Rollouts, die_at: tuple[str, int]
) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    with pytest.raises(SimulatedDeath):
        steps_flow(make_context(config, folder, FakeFleet(policy_version=0, die_at=die_at)), 3)
    committed = set(stored_group_ids(folder))
    resumed = make_context(config, folder, FakeFleet(policy_version=len(make_context_steps(folder))))
    steps_flow(resumed, 3)
    records = resumed.store.read_steps()
    assert [record.step for record in records] == [0, 1, 2]
    trained = Counter(group for record in records for group in record.groups_trained)
    assert len(trained) == 6 and set(trained.values()) == {1}
    again = {rollout_id for rollout_id, count in rollouts.executed.items() if count > 1}
    assert not {rollout_id[:-3] for rollout_id in again} & committed, "committed groups are read back, not run again"
    for record in records:
        assert (folder.checkpoints / record.checkpoint).is_dir() or record.step == 0
    assert run_summary(resumed)["groups_trained"] == 6


def test_step_whose_checkpoint_fails_to_reach_the_disk_is_not_committed(tmp_path: Path, rollouts: Rollouts) -> None:
    class FullDisk(FakeFleet):
        def finish_checkpoint(self) -> dict[str, Any]:
            raise TrainError("checkpoint version-00001 could not be written: no space left on device")

    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    with pytest.raises(TrainError, match="no space left"):
        steps_flow(make_context(config, folder, FullDisk(policy_version=0)), 1)
    assert make_context_steps(folder) == []
    resumed = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(resumed, 1)
    assert set(rollouts.executed.values()) == {1}, "the rollouts of the refused step are not lost"
    assert (folder.checkpoints / "version-00001" / "durable").exists()


def test_steps_keep_every_second_checkpoint_and_export_every_second_step(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(
        tmp_path, train__steps=5, train__keep_checkpoints=1, train__keep_every=2, train__export_every=2
    )
    folder = RunFolder.create(config, "r1")
    run = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(run, 5)
    assert sorted(path.name[-1] for path in folder.checkpoints.iterdir()) == ["2", "4", "5"]
    assert sorted(path.name[-1] for path in folder.exports.iterdir()) == ["2", "4"]
    records = run.store.read_steps()
    assert [record.extra["export"] for record in records] == [
        "",
        "exports/version-00002",
        "",
        "exports/version-00004",
        "",
    ]
    frontier = json.loads((folder.checkpoints / "version-00004" / "extra.json").read_text())
    assert frontier["groups_trained"] == list(records[3].groups_trained)
    assert (frontier["run"], frontier["step"], frontier["version_before"]) == ("r1", 3, 3)


def test_step_record_says_where_the_time_went(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    run = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(run, 1)
    stats = run.store.read_steps()[0].stats
    assert sum(stats[f"{phase}_s"] for phase in PHASES) == pytest.approx(stats["step_s"])
    shares = phase_shares(stats)
    assert shares is not None and sum(shares.values()) == pytest.approx(1)


def stored_group_ids(folder: RunFolder) -> list[str]:
    from gyre_core.store import Store

    return [commit.token for commit in Store.open(folder.store_url, read_only=True).commits("group")]


def make_context_steps(folder: RunFolder) -> list[Any]:
    from gyre_core.store import Store

    return Store.open(folder.store_url, read_only=True).commits("step")


def test_steps_killed_during_rollouts_run_only_the_missing_groups(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    first = make_context(config, folder, FakeFleet(policy_version=0))
    groups = plan_step(first)

    @flow(task_runner=TASK_RUNNER, validate_parameters=False)
    def one_group() -> None:
        list(run_groups(first, groups[:1]))  # the process "dies" after its first group

    one_group()
    resumed = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(resumed, 1)
    assert set(rollouts.executed.values()) == {1}
    assert set(resumed.store.read_steps()[0].groups_trained) == {group[0].group_id for group in groups}


def plan_step(run: RunContext) -> list[tuple[RolloutSpec, ...]]:
    from tasks.rollouts import dispatch_rollouts

    return dispatch_rollouts.fn(run, 0, 1).value


def test_steps_excluded_members_and_flat_groups_have_reasons_and_counters(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(tmp_path, train__steps=1)
    folder = RunFolder.create(config, "r1")
    run = make_context(config, folder, FakeFleet(policy_version=0), problem_ids=("a", "b"))
    by_problem = {group[0].problem_id: group for group in plan_step(run)}
    for spec in by_problem["a"][:2]:
        rollouts.rewards[spec.rollout_id] = None  # one member left of three: below min_group
    for spec in by_problem["b"]:
        rollouts.rewards[spec.rollout_id] = 0.1  # all alike: nothing to learn, still in the mean
    steps_flow(run, 1)
    (record,) = run.store.read_steps()
    group_a, group_b = by_problem["a"][0].group_id, by_problem["b"][0].group_id
    assert record.groups_trained == (group_b,)
    assert set(record.groups_dropped) == {group_a}
    assert set(record.rollouts_dropped) == {spec.rollout_id for spec in by_problem["a"][:2]}
    assert record.stats["groups_without_signal"] == 1
    assert record.denominators == {"rollouts": 3}
    assert run.services.fleet.trained == []  # type: ignore[attr-defined]
    assert record.version_after == 1, "a step without gradient still advances the version"


def test_run_groups_error_of_the_run_itself_is_raised(
    tmp_path: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gyre_core.errors import StoreError
    from gyre_core.store import Store

    def full(*_: Any, **__: Any) -> None:
        raise StoreError("the disk is full")

    config = small_config(tmp_path)
    run = make_context(config, RunFolder.create(config, "r1"), FakeFleet(policy_version=0))
    monkeypatch.setattr(Store, "commit_rollouts", full)

    @flow(task_runner=TASK_RUNNER, validate_parameters=False)
    def group_flow() -> None:
        specs = plan_groups(["a"], prefix="x", step=0, group_size=2, seed=0, policy_version=0)
        list(run_groups(run, specs))

    with pytest.raises(StoreError, match="the disk is full"):
        group_flow()


def test_inspect_shows_where_each_steps_time_went(tmp_path: Path, rollouts: Rollouts) -> None:
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    run = make_context(config, folder, FakeFleet(policy_version=0))
    steps_flow(run, 1)
    result, text = inspect_run(config.runs_dir, "r1")
    time = result["steps"][0]["time"]
    assert set(time["shares"]) == set(PHASES)
    assert time["shares"]["waiting"] > 0.5, "the fakes compute nothing"
    assert "fwd+bwd" in text and "GFLOP/s" in text
