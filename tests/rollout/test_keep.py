"""Workspaces kept on the way through grading: as the agent left them, whatever the verifier does to them."""

from pathlib import Path

import pytest

from gyre_core.config import GradingConfig, HarnessConfig, RolloutConfig
from gyre_core.rollout.archive import restore_workspace
from gyre_core.rollout.keep import WorkspaceKeeper
from gyre_core.rollout.runner import ExecutedRollout, FinishedRollout, RolloutTimes, grade_rollout
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.store import Store
from gyre_core.types import Outcome
from tests.support.problems import make_problem
from tests.support.rollouts import finished
from tests.support.sandboxes import sandbox

__all__ = ["sandbox"]


async def grade(folder: Path, sandbox: Sandbox, store: Store, test_sh: str, **grading: object) -> FinishedRollout:
    rollout = finished("r1")
    executed = ExecutedRollout(
        spec=rollout.spec,
        harness=rollout.harness,
        trajectory=rollout.trajectory,
        workdir=folder / "r1",
        time_limit="20 s",
        failure="",
        overall_expired=False,
        times=RolloutTimes(),
    )
    executed.workspace.mkdir(parents=True)
    (executed.workspace / "result").write_text("by the agent")
    config = GradingConfig(attempts=1, **grading)  # type: ignore[arg-type]
    return await grade_rollout(
        executed,
        make_problem(folder / "p07", test_sh=test_sh),
        grading=config,
        rollout=RolloutConfig(harness=HarnessConfig(command=("true",))),
        sandbox=sandbox,
        keeper=WorkspaceKeeper(store, config),
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


async def test_grade_rollout_keeps_the_workspace_as_the_agent_left_it(
    tmp_path: Path, sandbox: Sandbox, store: Store
) -> None:
    verifier = "echo 1 > /logs/verifier/reward.txt; echo by the verifier > result; touch new\n"
    done = await grade(tmp_path, sandbox, store, verifier, keep_workspaces="graded")
    assert done.grade.reward == 1.0 and done.workspace_dropped == ""
    restore_workspace(store.get_blob(done.workspace_ref), tmp_path / "back")
    assert {path.name: path.read_text() for path in (tmp_path / "back").iterdir()} == {"result": "by the agent"}
    assert not (tmp_path / "r1").exists()


async def test_grade_rollout_workspace_of_an_excluded_rollout_is_kept_only_on_demand(
    tmp_path: Path, sandbox: Sandbox, store: Store
) -> None:
    for policy, kept in (("graded", False), ("all", True)):
        done = await grade(tmp_path / policy, sandbox, store, "exit 3\n", keep_workspaces=policy)
        assert done.grade.outcome is Outcome.VERIFIER_FAILED
        assert (done.workspace_ref != "", done.workspace_dropped) == (kept, "")


async def test_grade_rollout_workspace_beyond_its_limit_is_dropped_with_the_reason_and_graded_all_the_same(
    tmp_path: Path, sandbox: Sandbox, store: Store
) -> None:
    verifier = "echo 1 > /logs/verifier/reward.txt\n"
    done = await grade(tmp_path, sandbox, store, verifier, keep_workspaces="graded", keep_workspace_bytes=5)
    assert done.grade.reward == 1.0
    assert (done.workspace_ref, done.workspace_dropped) == ("", "not archived: its files hold more than 5 bytes")
