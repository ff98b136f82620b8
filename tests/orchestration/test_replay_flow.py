"""The flow `replay` on stored runs: results, artifacts, and what it leaves behind (nothing)."""

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.replay import replay
from gyre_core.config import RunConfig
from gyre_core.errors import ConfigError, StoreError
from gyre_core.replay.errors import ReplayMismatchError
from gyre_core.rollout.archive import archive_workspace
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from tests.support.problems import write_problem
from tests.support.replays import store_run
from tests.support.runs import small_config


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, RunFolder, Store]:
    (tmp_path / "policy").mkdir()
    write_problem(tmp_path / "problems" / "p1", test_sh="echo 0.75 > /logs/verifier/reward.txt\n")
    config = small_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    return config, folder, Store.open(folder.store_url)


def artifact(key: str) -> str:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return str(max(found, key=lambda item: item.created).data)  # type: ignore[arg-type, return-value]


def call(config: RunConfig, step: int, mode: Any, **more: Any) -> dict[str, Any]:
    return replay("r1", step, mode, runs_dir=str(config.runs_dir), **more)


def test_replay_check_and_reselect_read_only_and_shown_as_artifacts(run: tuple[RunConfig, RunFolder, Store]) -> None:
    config, folder, store = run
    store_run(store, config)
    before = sorted(path.relative_to(folder.path) for path in folder.path.rglob("*"))
    result = call(config, 2, "check")
    assert result["ok"] and (result["branches"], result["differences"]) == (6, [])
    fewer = call(config, 1, "reselect", settings=["J=1"], role_order="sub-agent,main")
    assert (fewer["before"]["branches"], fewer["after"]["branches"]) == (6, 3)
    assert sorted(path.relative_to(folder.path) for path in folder.path.rglob("*")) == before
    assert "computed again" in artifact("r1-replay-check")
    assert "max_branches: 5 -> 1" in artifact("r1-replay-reselect")


def test_replay_regrade_runs_the_problems_present_verifiers(run: tuple[RunConfig, RunFolder, Store]) -> None:
    config, folder, store = run
    (folder.work / "left").mkdir()
    archive = archive_workspace(folder.work / "left", max_bytes=10).data
    store_run(store, config, steps=1, workspace_ref=store.put_blob(archive, kind="workspace"))
    result = call(config, 1, "regrade")
    assert [row["reward_after"] for row in result["rewards"].values()] == [0.75] * 3
    assert result["rewards_changed"] == 3 and result["branches_changed"] == 0
    assert not list(folder.path.glob("replay-*"))
    write_problem(folder.path.parent / "others" / "p2")
    with pytest.raises(ConfigError, match="lacks 1 problem"):
        call(config, 1, "regrade", problems=str(folder.path.parent / "others"))


def test_replay_step_that_does_not_follow_from_its_trees_fails_with_the_result(
    run: tuple[RunConfig, RunFolder, Store],
) -> None:
    config, _, store = run
    other = config.model_copy(update={"selection": config.selection.model_copy(update={"max_branches": 1})})
    store_run(store, other, steps=1, section=False)  # the run's configuration says 5
    with pytest.raises(ReplayMismatchError, match="step 1 of r1: check does not give what is stored") as caught:
        call(config, 1, "check")
    assert not caught.value.result["ok"]
    found = [text for text in caught.value.result["differences"] if "is not stored and would be selected" in text]
    assert len(found) == 3
    assert "NOT as stored" in artifact("r1-replay-check")


def test_replay_unknown_step_or_workspaces_not_kept_are_clear_errors(run: tuple[RunConfig, RunFolder, Store]) -> None:
    config, _, store = run
    store_run(store, config, steps=1, section=False)
    with pytest.raises(StoreError, match="there is no step 5"):
        call(config, 5, "check")
    with pytest.raises(StoreError, match=r"grading\.keep_workspaces"):
        call(config, 1, "regrade")
    with pytest.raises(StoreError, match="older Gyre"):
        call(config, 1, "retrain")
