"""Commits, conflicts, idempotency, reading back, damage."""

import threading
from pathlib import Path

import numpy as np
import pytest

from gyre_core.clock import ManualClock
from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.manifest import Commit, manifest_key
from gyre_core.store.records import StepRecord
from gyre_core.store.store import Store
from gyre_core.store.verify import verify
from tests.support.rollouts import assert_same_branch, assert_same_trajectory, branch_of, finished, two_turns


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), clock=ManualClock(1000.0))


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        version_before=step,
        version_after=step + 1,
        groups_trained=("s0000-p07",),
        groups_dropped={"s0000-p08": "1 included member of 4, selection.min_group is 2"},
        rollouts_dropped={"r9": "verifier failed: no reward file"},
        outcomes={"finished": 2, "verifier_failed": 1},
        seeds={"run": 0, "selection": 17},
        micro_steps=((("r0", 0), ("r1", 0)), (("r1", 1),)),
        denominators={"rollouts": 2.0},
        stats={"loss": -0.125, "grad_norm": 0.5},
        checkpoint="checkpoints/step-00001",
        extra={"note": ["anything", 1, None]},
    )


def commit_step(store: Store, step: int, *rollout_ids: str, **options) -> Commit:
    rollouts = [finished(rollout_id, step=step) for rollout_id in rollout_ids]
    branches = [branch_of(two_turns(rollout_id), 3) for rollout_id in rollout_ids]
    return store.commit_step(
        step_record(step), rollouts=rollouts, branches=branches, token=f"run-step-{step}", **options
    )


def objects(store: Store, folder: str) -> list[Path]:
    return sorted((Path(store.storage.url) / folder).rglob("*.parquet" if folder.startswith("data") else "*.json"))


def test_commit_step_everything_comes_back(store: Store) -> None:
    commit = commit_step(store, 0, "r0", "r1")
    assert (commit.seq, commit.kind, commit.created_s, commit.repeated) == (0, "step", 1000.0, False)
    assert commit.record["version_after"] == 1 and commit.record["num_groups_dropped"] == 1
    reader = Store.open(store.storage.url, read_only=True)
    assert reader.commits() == [commit]
    assert reader.read_steps() == [step_record(0)]
    assert_same_trajectory(reader.read_trajectory("r1"), two_turns("r1"))
    stored = reader.read_rollout("r0")
    given = finished("r0")
    assert (stored.spec, stored.grade, stored.harness) == (given.spec, given.grade, given.harness)
    assert [trajectory.rollout_id for trajectory in reader.read_trajectories(commit)] == ["r0", "r1"]
    for branch, rollout_id in zip(reader.read_branches(commit), ("r0", "r1"), strict=True):
        assert_same_branch(branch, branch_of(two_turns(rollout_id), 3))


def test_commit_rollouts_a_group_first_and_its_step_later(store: Store) -> None:
    branches = [branch_of(two_turns("r0"), 3)]
    group = store.commit_rollouts("group", [finished("r0"), finished("r1", reward=None)], branches, {"g": 1}, "g1")
    step = store.commit_step(step_record(0), token="run-step-0")
    assert sorted(step.tables) == ["steps"]
    assert group.rollout_ids == ("r0", "r1")
    assert store.find("r1") == group
    assert store.read_rollout("r1").grade.reward is None
    assert_same_branch(store.read_branches(group)[0], branches[0])
    assert store.read_step(step) == step_record(0)
    assert verify(store).num_rollouts == 2


def test_commit_rollouts_a_branch_of_another_rollout_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="branch 0 of r9: that rollout is not in this commit"):
        store.commit_rollouts("group", [finished("r0")], [branch_of(two_turns("r9"), 3)], {}, "g1")
    assert store.head == -1


def test_commit_numbers_follow_and_kinds_are_told_apart(store: Store) -> None:
    commit_step(store, 0, "r0")
    evaluation = store.commit("evaluation", {}, {"reward_mean": 0.5}, "run-eval-0")
    commit_step(store, 1, "r1")
    assert [commit.seq for commit in store.commits()] == [0, 1, 2]
    assert store.commits("evaluation") == [evaluation]
    assert store.latest("step") == store.commits()[2]
    assert store.latest("other") is None
    assert store.head == 2


def test_commit_the_same_token_again_returns_the_first_and_writes_nothing(store: Store) -> None:
    first = commit_step(store, 0, "r0")
    before = objects(store, "data") + objects(store, "manifest")
    again = commit_step(Store.open(store.storage.url), 0, "r0", "other-outcome-of-a-second-try")
    assert again.repeated and again.seq == 0 and again.sha256 == first.sha256
    assert again.rollout_ids == ("r0",)
    assert objects(store, "data") + objects(store, "manifest") == before


def test_commit_a_token_of_another_kind_is_refused(store: Store) -> None:
    store.commit("evaluation", {}, {}, "token")
    with pytest.raises(StoreError, match="cannot make a step"):
        store.commit("step", {}, {}, "token")


def test_commit_two_stale_writers_one_winner_with_an_expected_head(store: Store) -> None:
    other = Store.open(store.storage.url)
    assert store.head == other.head == -1
    commit_step(store, 0, "r0", expected_head=-1)
    with pytest.raises(StoreConflictError, match="another writer is active"):
        other.commit("step", {}, {"step": 0}, "someone-elses-step-0", expected_head=-1)
    assert [commit.token for commit in other.commits()] == ["run-step-0"]


def test_commit_writers_that_race_are_ordered_without_gaps_or_losses(store: Store) -> None:
    num_writers, num_commits = 4, 6
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            own = Store.open(store.storage.url)
            for number in range(num_commits):
                own.commit("note", {}, {"writer": writer}, f"{writer}-{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    commits = store.commits()
    assert [commit.seq for commit in commits] == list(range(num_writers * num_commits))
    assert len({commit.token for commit in commits}) == num_writers * num_commits


def test_commit_a_race_of_one_token_makes_one_commit(store: Store) -> None:
    """Both have looked before either wrote: the loser meets the winner's manifest and finds its own token in it."""
    loser = Store.open(store.storage.url)
    real_put = loser.storage.put_new

    def put_after_the_winner(key: str, data: bytes) -> None:
        if key == manifest_key(0):
            store.commit("note", {}, {"by": "winner"}, "token")
        real_put(key, data)

    loser.storage.put_new = put_after_the_winner  # type: ignore[method-assign]
    commit = loser.commit("note", {}, {"by": "loser"}, "token")
    assert commit.repeated and commit.record == {"by": "winner"}
    assert len(store.commits()) == 1


def test_put_table_ahead_of_the_commit_is_invisible_until_then(store: Store) -> None:
    from gyre_core.store.tables import rollout_tables

    refs = [
        {name: store.put_table(name, table) for name, table in rollout_tables([finished(rollout_id)]).items()}
        for rollout_id in ("r0", "r1")
    ]
    with pytest.raises(StoreError, match="no rollout 'r0'"):
        store.find("r0")
    assert len(verify(store).unreferenced) == 8
    commit = store.commit("group", {name: [ref[name] for ref in refs] for name in refs[0]}, {}, "g0")
    assert commit.rollout_ids == ("r0", "r1")
    assert_same_trajectory(store.read_trajectory("r1"), two_turns("r1"))
    assert len(store.read_trajectories(commit)) == 2
    assert verify(store).unreferenced == ()


def test_commit_numpy_values_and_non_finite_numbers_become_plain_json(store: Store) -> None:
    record = {"mean": np.float32(0.5), "n": np.int64(3), "bad": float("nan"), "list": np.arange(2), "pair": ("a", 1)}
    commit = store.commit("note", {}, record, "token")
    assert Store.open(store.storage.url).commits()[0].record == commit.record
    assert commit.record == {"mean": 0.5, "n": 3, "bad": None, "list": [0, 1], "pair": ["a", 1]}


@pytest.mark.parametrize(
    ("kind", "record", "token", "message"),
    [
        ("Step", {}, "t", "commit kind"),
        ("step", {}, "", "commit token"),
        ("step", {}, "a b", "commit token"),
        ("step", {"a": {"b": [object()]}}, "t", r"record\.a\.b\[0\] is a object"),
        ("step", {"a": {1: 2}}, "t", r"record\.a has the key 1"),
    ],
)
def test_commit_unusable_arguments_are_refused(store: Store, kind: str, record: dict, token: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store.commit(kind, {}, record, token)
    assert store.head == -1


def test_read_truncated_object_is_named(store: Store) -> None:
    commit = commit_step(store, 0, "r0")
    path = next(path for path in objects(store, "data") if "nodes" in str(path))
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match=rf"data/nodes/{path.name} is truncated"):
        store.read_table(commit, "nodes")
    with pytest.raises(StoreError, match=rf"data/nodes/{path.name}"):
        store.read_trajectory("r0")


def test_read_a_flipped_bit_is_found(store: Store) -> None:
    commit = commit_step(store, 0, "r0")
    path = next(path for path in objects(store, "data") if "nodes" in str(path))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="checksum differs"):
        store.read_table(commit, "nodes")


def test_put_table_a_damaged_object_under_its_name_is_an_error_not_a_success(store: Store) -> None:
    commit_step(store, 0, "r0")
    path = next(path for path in objects(store, "data") if "grades" in str(path))
    path.write_bytes(b"other")
    with pytest.raises(StoreError, match=rf"data/grades/{path.name} .* is damaged"):
        store.commit_step(step_record(1), rollouts=[finished("r0")], token="run-step-1")
    assert store.head == 0


def test_open_a_changed_or_truncated_manifest_is_named(store: Store) -> None:
    commit_step(store, 0, "r0")
    path = objects(store, "manifest")[0]
    text = path.read_text()
    path.write_text(text.replace('"version_after": 1', '"version_after": 2'))
    with pytest.raises(StoreError, match=r"manifest/0+\.json was changed"):
        Store.open(store.storage.url, read_only=True)
    path.write_text(text[:-30])
    with pytest.raises(StoreError, match=r"manifest/0+\.json is truncated"):
        Store.open(store.storage.url, read_only=True)
    path.write_text("[1]")
    with pytest.raises(StoreError, match="no manifest of a Gyre store"):
        Store.open(store.storage.url, read_only=True)


def test_open_a_manifest_of_another_store_breaks_the_chain(store: Store, tmp_path: Path) -> None:
    commit_step(store, 0, "r0")
    commit_step(store, 1, "r1")
    other = Store.open(str(tmp_path / "other"))
    other.commit("note", {}, {}, "x")
    other.commit("note", {}, {}, "y")
    objects(store, "manifest")[1].write_bytes(objects(other, "manifest")[1].read_bytes())
    with pytest.raises(StoreError, match="does not follow"):
        Store.open(store.storage.url, read_only=True)


def test_open_a_lost_manifest_in_between_is_not_taken_for_the_end(store: Store) -> None:
    for step in range(3):
        commit_step(store, step, f"r{step}")
    objects(store, "manifest")[1].unlink()
    with pytest.raises(StoreError, match=r"lacks manifest/0+1\.json but has number 2"):
        Store.open(store.storage.url)


def test_open_read_only_where_no_store_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no Gyre store"):
        Store.open(str(tmp_path), read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_open_a_store_of_another_version_is_refused(store: Store) -> None:
    marker = Path(store.storage.url) / "gyre-store.json"
    marker.write_text('{"format": "gyre-store", "version": 2}\n')
    with pytest.raises(StoreError, match="another format or version"):
        Store.open(store.storage.url)


def test_open_unknown_scheme_is_refused() -> None:
    with pytest.raises(StoreError, match=r"change store\.url"):
        Store.open("ftp://host/store")


def test_verify_reports_each_broken_object_and_goes_on(store: Store) -> None:
    commit_step(store, 0, "r0")
    commit_step(store, 1, "r1")
    report = verify(store)
    assert report.ok and (report.num_commits, report.num_rollouts, report.num_objects) == (2, 2, 12)
    nodes, grades = (next(path for path in objects(store, "data") if name in str(path)) for name in ("nodes", "grades"))
    nodes.unlink()
    grades.write_bytes(b"")
    report = verify(store)
    assert len(report.problems) == 2
    assert any(nodes.name in problem and "missing" in problem for problem in report.problems)
    assert any(grades.name in problem and "truncated" in problem for problem in report.problems)


def test_verify_foreign_files_among_the_manifests_are_named_and_ignored(store: Store) -> None:
    commit_step(store, 0, "r0")
    for name in ("notes.json", "00000000000000000001.json.part"):
        (Path(store.storage.url) / "manifest" / name).write_text("{")
    report = verify(Store.open(store.storage.url))
    assert report.ok and report.num_commits == 1
    assert report.foreign == ("manifest/00000000000000000001.json.part", "manifest/notes.json")
