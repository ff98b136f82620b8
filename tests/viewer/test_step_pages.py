"""Pages that a run writes for a few rollouts of each step."""

import os
from pathlib import Path

import pytest

from gyre_core.run_folder import RunFolder
from gyre_core.store import StepRecord, Store
from gyre_core.types import RolloutSpec
from tasks import pages
from tasks.context import RunContext
from tasks.pages import Candidate, choose, show_rollouts
from tests.support.rollouts import branch_of
from tests.support.runs import FakeFleet, finished_rollout, make_context, small_config
from tests.support.tokenizer import save_model_folder


class Shown:
    """A reporter that keeps the rows it should show."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def rollout_pages(self, rows: list[dict[str, str]], *, folder: Path) -> None:
        self.rows = rows


def candidate(rollout_id: str, reward: float | None, branches: int = 1, tokens: int = 10) -> Candidate:
    return Candidate(rollout_id=rollout_id, reward=reward, branches=branches, tokens=tokens)


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    save_model_folder(tmp_path / "policy")
    config = small_config(tmp_path)
    context = make_context(config, RunFolder.create(config, "r1"), FakeFleet(policy_version=0))
    context.reporter = Shown()  # type: ignore[assignment]
    commit_group(context.store, "s0000-a", [0.0, 1.0, None])
    return context


def commit_group(store: Store, group_id: str, rewards: list[float | None], step: int = 0) -> None:
    members = []
    for member, reward in enumerate(rewards):
        spec = RolloutSpec(
            rollout_id=f"{group_id}-{member:02d}",
            group_id=group_id,
            problem_id="a",
            step=step,
            member=member,
            dispatch_version=0,
            seed=1,
        )
        members.append(finished_rollout(spec, reward))
    record = {
        "group_id": group_id,
        "step": step,
        "rewards_by_rollout": {one.spec.rollout_id: one.grade.reward for one in members},
    }
    branches = [branch_of(members[1].trajectory, 1)]
    store.commit_rollouts("group", members, branches, record, token=group_id)


STEP = StepRecord(step=0, version_before=0, version_after=1)


def test_choose_takes_best_worst_and_most_branches_once_each() -> None:
    found = [candidate("a", 0.5, 1), candidate("b", 1.0, 2), candidate("c", 0.0, 5), candidate("d", None, 1)]
    assert choose(found) == {"b": ["best"], "c": ["worst", "most branches"]}
    assert choose([candidate("a", None, 1, 5), candidate("b", None, 1, 9)]) == {"b": ["most branches"]}
    assert choose([candidate("b", 0.5), candidate("a", 0.5)]) == {"a": ["best", "worst", "most branches"]}
    assert choose([]) == {}


def test_step_pages_are_written_and_named_in_one_artifact(run: RunContext) -> None:
    show_rollouts(run, STEP)
    rows = run.reporter.rows  # type: ignore[attr-defined]
    assert [(row["which"], row["rollout"], row["reward"]) for row in rows] == [
        ("best, most branches", "s0000-a-01", "1"),
        ("worst", "s0000-a-00", "0"),
    ]
    folder = run.folder.path / "rollouts"
    assert sorted(path.name for path in folder.iterdir()) == ["s0000-a-00.html", "s0000-a-01.html"]
    assert Path(rows[0]["page"]) == (folder / "s0000-a-01.html").resolve()
    assert b"<title>s0000-a-01" in (folder / "s0000-a-01.html").read_bytes()


def test_step_pages_keep_the_newest_only(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 2)
    folder = run.folder.path / "rollouts"
    folder.mkdir()
    for age, name in enumerate(["old.html", "older.html"]):
        (folder / name).write_text("page")
        os.utime(folder / name, (1000 - age, 1000 - age))
    show_rollouts(run, STEP)
    assert sorted(path.name for path in folder.iterdir()) == ["s0000-a-00.html", "s0000-a-01.html"]


def test_step_pages_leave_out_rollouts_that_are_too_large(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_TOKENS", 4)
    show_rollouts(run, STEP)
    assert run.reporter.rows == []  # type: ignore[attr-defined]
    assert not (run.folder.path / "rollouts").exists()


def test_step_pages_that_cannot_be_made_do_not_end_the_run(
    run: RunContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy" / "tokenizer.json").write_text("no tokenizer")
    pages.load_vocabulary.cache_clear()
    show_rollouts(run, STEP)
    assert run.reporter.rows == []  # type: ignore[attr-defined]
    assert "no pages of rollouts for step 1: cannot read" in caplog.text
