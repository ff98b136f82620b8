"""Garbage collection and compaction: what may go, what may not, and writers and readers that are busy meanwhile."""

import os
from pathlib import Path

import pytest

from gyre_core.clock import ManualClock
from gyre_core.errors import StoreConflictError
from gyre_core.store.maintenance import collect, compact
from gyre_core.store.records import StepRecord
from gyre_core.store.storage import list_keys
from gyre_core.store.store import Store
from gyre_core.store.tables import rollout_tables
from gyre_core.store.verify import verify
from tests.support.rollouts import assert_same_branch, assert_same_trajectory, branch_of, finished, two_turns

NOW_S = 2_000_000_000.0
DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), clock=ManualClock(NOW_S))


def opened(store: Store) -> Store:
    return Store.open(store.storage.url, clock=ManualClock(NOW_S))


def commit_group(store: Store, number: int) -> None:
    rollout_ids = [f"r{number}-{member}" for member in range(2)]
    branches = [branch_of(two_turns(rollout_id), 3) for rollout_id in rollout_ids]
    store.commit_rollouts("group", [finished(rollout_id) for rollout_id in rollout_ids], branches, {}, f"g{number}")


def age(store: Store, *keys: str, age_s: float = 2 * DAY_S) -> None:
    for key in keys or [key for folder in ("data", "blobs") for key in list_keys(store.storage, folder)]:
        os.utime(Path(store.storage.url) / key, (NOW_S - age_s, NOW_S - age_s))


def orphan(store: Store, rollout_id: str = "r9") -> str:
    """An object as a killed writer leaves it: put, never committed, two days old."""
    key = store.put_table("grades", rollout_tables([finished(rollout_id)])["grades"]).key
    age(store, key)
    return key


def test_collect_dry_run_names_old_unneeded_objects_and_keeps_everything(store: Store) -> None:
    commit_group(store, 0)
    key = orphan(store)
    young = store.put_table("grades", rollout_tables([finished("r8")])["grades"]).key
    age(store, young, age_s=DAY_S / 2)
    before = list_keys(store.storage, "data")
    report = collect(store)
    assert (report.keys, report.num_young, report.applied) == ((key,), 1, False)
    assert report.size_bytes == store.storage.size(key)
    assert list_keys(store.storage, "data") == before and store.head == 0


def test_collect_applied_deletes_them_and_nothing_that_a_commit_needs(store: Store) -> None:
    ref = store.put_blob(b"kept", kind="workspace")
    store.commit_rollouts("group", [finished("r0", workspace_ref=ref)], [], {}, "g0")
    loose = store.put_blob(b"loose", kind="workspace")
    key = orphan(store)
    age(store)
    report = collect(store, apply=True)
    assert set(report.keys) == {key, f"blobs/{loose.removeprefix('sha256:')}"} and report.applied
    assert store.get_blob(ref) == b"kept"
    result = verify(opened(store))
    assert result.ok and result.unreferenced == () and result.num_rollouts == 1
    assert collect(store, apply=True).keys == ()
    assert [commit.kind for commit in store.commits()] == ["group", "gc"]


def test_collect_before_a_commit_makes_the_writer_write_its_bytes_anew(store: Store) -> None:
    """The race that matters: a writer finds its object there, and a collection deletes it before the commit."""
    key = orphan(store, "r0")
    removed: list[str] = []
    other = opened(store)
    real_put = store.storage.put_new

    def put_after_a_collection(name: str, data: bytes) -> None:
        if name.endswith("manifest/00000000000000000000.json"):
            store.storage.put_new = real_put  # type: ignore[method-assign]
            age(store, key)
            removed.extend(collect(other, grace_s=DAY_S, apply=True).keys)
        real_put(name, data)

    store.storage.put_new = put_after_a_collection  # type: ignore[method-assign]
    commit = store.commit("group", rollout_tables([finished("r0")]), {}, "g0")
    assert sorted(name.split("/")[1] for name in removed) == ["calls", "grades", "nodes", "rollouts"]
    assert commit.seq == 1 and commit.tables["grades"][0].key == key.replace(".parquet", "-2.parquet")
    assert verify(opened(store)).ok


def test_collect_after_a_commit_that_it_did_not_see_looks_again(store: Store) -> None:
    key = orphan(store, "r0")
    size_bytes = store.storage.size(key)
    writer = opened(store)
    real_put = store.storage.put_new

    def put_after_a_commit(name: str, data: bytes) -> None:
        store.storage.put_new = real_put  # type: ignore[method-assign]
        writer.commit("group", rollout_tables([finished("r0")]), {}, "g0")
        real_put(name, data)

    store.storage.put_new = put_after_a_commit  # type: ignore[method-assign]
    assert collect(store, apply=True).keys == ()
    assert [commit.kind for commit in store.commits()] == ["group"]
    assert store.storage.size(key) == size_bytes and verify(opened(store)).ok


def test_collect_objects_put_ahead_and_given_up_are_refused_at_their_commit(store: Store) -> None:
    ref = store.put_table("grades", rollout_tables([finished("r0")])["grades"])
    blob = store.put_blob(b"archive", kind="workspace")
    age(store)
    collect(opened(store), apply=True)
    with pytest.raises(StoreConflictError, match=rf"{ref.key} was put so long before .* put it again"):
        store.commit("group", {"grades": [ref]}, {}, "g0")
    with pytest.raises(StoreConflictError, match="put it again"):
        store.commit("note", {}, {}, "n0", blobs=[blob])
    assert store.put_blob(b"archive", kind="workspace") == blob
    store.commit("note", {}, {}, "n0", blobs=[blob])
    assert opened(store).get_blob(blob) == b"archive" and verify(store).ok


def test_collect_killed_before_it_deleted_is_finished_by_the_next(store: Store) -> None:
    key = orphan(store)
    real_delete = store.storage.delete

    def die(_key: str) -> None:
        raise KeyboardInterrupt

    store.storage.delete = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        collect(store, apply=True)
    store.storage.delete = real_delete  # type: ignore[method-assign]
    assert collect(opened(store), grace_s=30 * DAY_S, apply=True).keys == (key,)
    assert store.storage.size(key) is None
    assert [commit.kind for commit in store.commits()] == ["gc"]


def test_compact_joins_small_objects_and_everything_reads_as_before(store: Store) -> None:
    for number in range(3):
        commit_group(store, number)
    record = StepRecord(step=0, version_before=0, version_after=1)
    step = store.commit_step(record, token="step-0")
    assert compact(store).num_before == 15 and store.head == 3  # 3 groups of 5 tables; the one of steps is alone
    report = compact(store, apply=True)
    assert (report.num_before, report.num_after, report.applied) == (15, 5, True)
    for reader in (store, opened(store)):
        assert_same_trajectory(reader.read_trajectory("r1-1"), two_turns("r1-1"))
        for number, commit in enumerate(reader.commits("group")):
            assert [item.spec.rollout_id for item in reader.read_rollouts(commit)] == [f"r{number}-0", f"r{number}-1"]
            assert_same_branch(reader.read_branches(commit)[1], branch_of(two_turns(f"r{number}-1"), 3))
        assert reader.read_step(step) == record
    result = verify(opened(store))
    assert result.ok and (result.num_objects, len(result.unreferenced)) == (6, 15)


def test_compact_the_old_objects_go_after_the_grace_period_and_stale_readers_find_the_new_ones(store: Store) -> None:
    commit_group(store, 0)
    commit_group(store, 1)
    stale = Store.open(store.storage.url, read_only=True)
    group = stale.commits()[0]
    compact(store, apply=True)
    age(store)
    assert collect(store, apply=True).keys == ()  # moved just now: readers may be reading them
    later = Store.open(store.storage.url, clock=ManualClock(NOW_S + 2 * DAY_S))
    assert len(collect(later, apply=True).keys) == 10
    assert_same_trajectory(stale.read_trajectory("r0-1"), two_turns("r0-1"))
    assert len(stale.read_rollouts(group)) == 2
    assert verify(opened(store)).ok and verify(opened(store)).num_objects == 5


def test_compact_again_moves_what_was_moved_before(store: Store) -> None:
    for number in range(2):
        commit_group(store, number)
    compact(store, apply=True)
    commit_group(store, 2)
    assert compact(store, apply=True).num_before == 10
    assert compact(store, apply=True).num_before == 0
    reader = opened(store)
    for number in range(3):
        assert_same_trajectory(reader.read_trajectory(f"r{number}-1"), two_turns(f"r{number}-1"))
    assert verify(reader).ok and verify(reader).num_objects == 5


def test_compact_while_a_writer_commits_publishes_after_it(store: Store) -> None:
    commit_group(store, 0)
    commit_group(store, 1)
    writer = opened(store)
    real_put = store.storage.put_new

    def put_after_a_commit(name: str, data: bytes) -> None:
        if name.startswith("manifest/"):
            store.storage.put_new = real_put  # type: ignore[method-assign]
            commit_group(writer, 2)
        real_put(name, data)

    store.storage.put_new = put_after_a_commit  # type: ignore[method-assign]
    compact(store, apply=True)
    assert [commit.kind for commit in store.commits()] == ["group", "group", "group", "compaction"]
    assert verify(opened(store)).ok and verify(store).num_rollouts == 6


def test_compact_large_objects_are_left_alone(store: Store) -> None:
    commit_group(store, 0)
    commit_group(store, 1)
    sizes = [ref.size_bytes for _, ref in store.ledger.live_objects().values()]
    assert compact(store, target_bytes=min(sizes), apply=True).num_before == 0


def test_verify_a_damaged_compacted_object_is_named(store: Store) -> None:
    commit_group(store, 0)
    commit_group(store, 1)
    compact(store, apply=True)
    _, ref = next(iter(store.ledger.live_objects().values()))
    path = Path(store.storage.url) / ref.key
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))
    assert any(problem.startswith("compacted object") and ref.key in problem for problem in verify(store).problems)


def test_commit_of_a_maintenance_kind_is_refused(store: Store) -> None:
    for kind in ("gc", "compaction"):
        with pytest.raises(ValueError, match="commit kind"):
            store.commit(kind, {}, {}, "t")
