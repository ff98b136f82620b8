"""Kept workspaces graded again: rewards may change, nothing else does."""

import os
from pathlib import Path

import pytest

from gyre_core.config import RunConfig
from gyre_core.errors import StoreError
from gyre_core.grading.problems import Problem
from gyre_core.replay.regrade import Regrade, check_workspaces, regrade_report, regrade_rollout, stands_because
from gyre_core.replay.report import sheet_of
from gyre_core.replay.stored import StoredStep
from gyre_core.rollout.archive import archive_workspace
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.store import Store
from gyre_core.types import Grade, Outcome
from tests.support.problems import make_problem
from tests.support.replays import open_store, read_back, store_run
from tests.support.runs import small_config
from tests.support.sandboxes import sandbox

__all__ = ["sandbox"]

FOUND = 'if grep -q done result; then R={yes}; else R=0; fi; echo "$R" > /logs/verifier/reward.txt; echo x >> result\n'


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_config(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    workspace = tmp_path / "left"
    workspace.mkdir()
    (workspace / "result").write_text("done\n")
    os.symlink("/etc/hostname", workspace / "link")
    return archive_workspace(workspace, max_bytes=1000).data


@pytest.fixture
def step(store: Store, config: RunConfig, archive: bytes) -> StoredStep:
    store_run(store, config, steps=1, workspace_ref=store.put_blob(archive, kind="workspace"))
    return read_back(store, config)


async def regrade_all(
    step: StoredStep, store: Store, problem: Problem, sandbox: Sandbox, config: RunConfig, folder: Path
) -> list[Regrade]:
    return [
        await regrade_rollout(
            rollout,
            store.get_blob(rollout.workspace_ref),
            problem,
            grading=config.grading,
            config=config.rollout,
            sandbox=sandbox,
            workdir=folder / rollout.spec.rollout_id,
        )
        for _, rollout in step.rollouts()
    ]


async def test_regrade_changed_verifier_changes_rewards_and_nothing_else(
    tmp_path: Path, step: StoredStep, store: Store, config: RunConfig, sandbox: Sandbox
) -> None:
    head = store.head
    folder = tmp_path / "scratch"
    folder.mkdir()
    problem = make_problem(tmp_path / "p1", test_sh=FOUND.replace("{yes}", "0.25"))
    regrades = await regrade_all(step, store, problem, sandbox, config, folder)
    assert [item.before.reward for item in regrades] == [0.0, 0.5, 1.0]
    assert [item.after.reward for item in regrades] == [0.25, 0.25, 0.25]
    assert {item.after.outcome for item in regrades} == {Outcome.FINISHED}
    assert list(folder.iterdir()) == [], "no workspace is left behind"
    assert store.head == head
    report = regrade_report(step, regrades)
    assert (report.rewards_changed, report.outcomes_changed, report.branches_changed) == (3, 0, 0)
    assert report.advantages_changed == 2, "the middle member's advantage was 0 and is 0"
    assert (report.targets_before, report.targets_after) == (27, 27)
    assert report.tokens_before == report.tokens_after
    result = {"run": "r1", "step": 1, "mode": "regrade", "ok": True, **report.as_json()}
    text = sheet_of(result).markdown()
    assert "| s0000-p1-00 | 0 finished | 0.25 finished |" in text
    assert "3 of 3 rollouts graded again, 3 rewards changed: mean 0.5 -> 0.25" in text


async def test_regrade_sees_the_workspace_as_the_agent_left_it_each_time(
    tmp_path: Path, step: StoredStep, store: Store, config: RunConfig, sandbox: Sandbox
) -> None:
    lines = 'test "$(wc -l < result)" = 1 && test -L link && echo 1 > /logs/verifier/reward.txt; echo x >> result\n'
    problem = make_problem(tmp_path / "p1", test_sh=lines)
    for attempt in ("one", "two"):
        folder = tmp_path / attempt
        folder.mkdir()
        regrades = await regrade_all(step, store, problem, sandbox, config, folder)
        assert [item.after.reward for item in regrades] == [1.0, 1.0, 1.0]


def test_regrade_report_rollout_that_becomes_excluded_changes_its_group(step: StoredStep) -> None:
    failed = Grade(outcome=Outcome.VERIFIER_FAILED, reward=None, reason="no reward file")
    regrades = [
        Regrade(rollout_id=rollout.spec.rollout_id, before=rollout.grade, after=rollout.grade, stands="")
        for _, rollout in step.rollouts()
    ]
    first = regrades[0]
    regrades[0] = Regrade(rollout_id=first.rollout_id, before=first.before, after=failed, stands="")
    report = regrade_report(step, regrades)
    assert (report.rewards_changed, report.outcomes_changed) == (1, 1)
    assert report.branches_changed == 2 and report.targets_after == 18
    assert report.advantages_changed == 3


async def test_regrade_damaged_archive_names_the_rollout_and_leaves_no_folder(
    tmp_path: Path, step: StoredStep, config: RunConfig
) -> None:
    (_, rollout), *_ = step.rollouts()
    problem = make_problem(tmp_path / "p1")
    with pytest.raises(StoreError, match="rollout s0000-p1-00: the archive"):
        await regrade_rollout(
            rollout,
            b"junk",
            problem,
            grading=config.grading,
            config=config.rollout,
            sandbox=None,  # type: ignore[arg-type] - nothing runs
            workdir=tmp_path / "work",
        )
    assert not (tmp_path / "work").exists()


def test_regrade_without_kept_workspaces_names_the_setting(store: Store, config: RunConfig) -> None:
    store_run(store, config, steps=1)
    step = read_back(store, config)
    with pytest.raises(StoreError, match=r"grading\.keep_workspaces"):
        check_workspaces(step)
    assert {stands_because(rollout) for _, rollout in step.rollouts()} == {"its workspace was not kept"}
