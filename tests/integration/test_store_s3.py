"""The store on a real S3 server: round trips, killed and racing writers, a server that fails, lies or freezes.

After each, `verify` finds every acknowledged commit, none twice, none in part.
"""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.maintenance import collect, compact
from gyre_core.store.s3 import S3Storage
from gyre_core.store.storage import check_exclusive, list_keys
from gyre_core.store.store import Store
from gyre_core.store.verify import verify
from tests.support.faulting_proxy import Fault, FaultingProxy
from tests.support.rollouts import assert_same_branch, assert_same_trajectory, branch_of, finished, two_turns
from tests.support.seaweedfs import SeaweedFS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from gyre_core.store.store import Store
from tests.support.rollouts import branch_of, finished, two_turns

url, token = sys.argv[1:]
store = Store.open(url)
commit = store.commit_rollouts("group", [finished(token)], [branch_of(two_turns(token), 3)], {}, token)
print(commit.seq)
"""


@pytest.fixture
def bucket(seaweedfs: SeaweedFS) -> str:
    return seaweedfs.make_bucket()


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[FaultingProxy]:
    with FaultingProxy(seaweedfs.port).running() as proxy:
        yield proxy


def commit_group(store: Store, token: str) -> int:
    branches = [branch_of(two_turns(token), 3)]
    return store.commit_rollouts("group", [finished(token)], branches, {}, token).seq


def check(url: str, acknowledged: list[str], *, others: tuple[str, ...] = ()) -> Store:
    """Every acknowledged commit is there once and whole; `others` may be there too (done, but nobody was told)."""
    reader = Store.open(url, read_only=True)
    report = verify(reader)
    assert report.problems == ()
    tokens = Counter(commit.token for commit in reader.commits())
    assert set(acknowledged) <= tokens.keys() <= {*acknowledged, *others}
    assert set(tokens.values()) <= {1}
    for token in acknowledged:
        assert_same_trajectory(reader.read_trajectory(token), two_turns(token))
    return reader


def test_store_on_s3_commits_come_back(seaweedfs: SeaweedFS, bucket: str) -> None:
    url = seaweedfs.store_url(bucket)
    store = Store.open(url)
    ref = store.put_blob(b"archive" * 1000, kind="workspace")
    empty = store.put_blob(b"", kind="workspace")
    rollouts = [finished("r0", workspace_ref=ref), finished("r1", reward=None)]
    commit = store.commit_rollouts("group", rollouts, [branch_of(two_turns("r0"), 3)], {}, "g0", blobs=[empty])
    again = Store.open(url).commit_rollouts("group", rollouts, [], {}, "g0")
    assert again.repeated and again.seq == commit.seq == 0
    reader = Store.open(url, read_only=True)
    assert reader.commits() == [commit]
    assert_same_trajectory(reader.read_trajectory("r1"), two_turns("r1"))
    assert_same_branch(reader.read_branches(commit)[0], branch_of(two_turns("r0"), 3))
    assert reader.get_blob(ref) == b"archive" * 1000 and reader.get_blob(empty) == b""
    report = verify(reader)
    assert report.ok and (report.num_rollouts, report.num_blobs, report.unreferenced) == (2, 2, ())


def test_store_on_s3_is_compacted_and_collected(seaweedfs: SeaweedFS, bucket: str) -> None:
    url = seaweedfs.store_url(bucket)
    store = Store.open(url)
    tokens = [f"g{number}" for number in range(3)]
    for token in tokens:
        commit_group(store, token)
    stale = Store.open(url, read_only=True)
    assert stale.head == 2
    compact(store, apply=True)
    assert len(collect(store, grace_s=0, apply=True).keys) == 15
    assert_same_trajectory(stale.read_trajectory("g1"), two_turns("g1"))
    reader = Store.open(url, read_only=True)
    assert verify(reader).ok and verify(reader).num_objects == 5 and verify(reader).num_rollouts == 3
    assert len(list_keys(reader.storage, "data")) == 5


@pytest.mark.parametrize(
    ("point", "fault", "committed", "orphans"),
    [
        ("/data/", Fault.FROZEN, False, False),  # before the first object
        ("/data/", Fault.FROZEN_REPLY, False, True),  # some objects are there
        ("/manifest/", Fault.FROZEN, False, True),  # all data, no manifest
        ("/manifest/", Fault.FROZEN_REPLY, True, False),  # the manifest is there, the writer was not told
    ],
)
def test_writer_killed_at_a_write_point_leaves_whole_commits_and_is_repeated_once(
    seaweedfs: SeaweedFS,
    bucket: str,
    proxy: FaultingProxy,
    point: str,
    fault: Fault,
    committed: bool,
    orphans: bool,
) -> None:
    url = seaweedfs.store_url(bucket)
    commit_group(Store.open(url), "before")
    proxy.plan = lambda method, path: fault if method == "PUT" and point in path else None
    through_proxy = seaweedfs.store_url(bucket, port=proxy.port)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, through_proxy, "killed"], cwd=ROOT)
    try:
        assert proxy.met.wait(60), "the writer did not get to its write point"
        writer.kill()
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == -signal.SIGKILL
    reader = check(url, ["before", "killed"] if committed else ["before"])
    assert bool(verify(reader).unreferenced) == orphans
    assert commit_group(Store.open(url), "killed") == 1
    assert verify(check(url, ["before", "killed"])).unreferenced == ()


def test_two_writers_on_one_number_one_wins(seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy) -> None:
    """Both have seen the same head; the second one's manifest meets the first one's on the server."""
    url = seaweedfs.store_url(bucket)
    first, second = Store.open(url), Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    assert first.head == second.head == -1

    def first_comes_first(method: str, path: str) -> None:
        if method == "PUT" and "/manifest/" in path:
            proxy.plan = lambda _method, _path: None
            commit_group(first, "first")

    proxy.plan = first_comes_first
    with pytest.raises(StoreConflictError, match="another writer is active"):
        second.commit("note", {}, {}, "second", expected_head=-1)
    check(url, ["first"])

    proxy.plan = lambda method, path: commit_once(first, "third", proxy) if "/manifest/" in path else None
    assert commit_group(second, "fourth") == 2  # without an expectation the loser takes the next number
    assert [commit.token for commit in check(url, ["first", "third", "fourth"]).commits()] == [
        "first",
        "third",
        "fourth",
    ]


def commit_once(store: Store, token: str, proxy: FaultingProxy) -> None:
    proxy.plan = lambda _method, _path: None
    commit_group(store, token)


def test_writers_that_race_lose_nothing(seaweedfs: SeaweedFS, bucket: str) -> None:
    url = seaweedfs.store_url(bucket)
    Store.open(url)
    acknowledged: list[str] = []

    def write(writer: int) -> None:
        store = Store.open(url)
        for number in range(4):
            commit_group(store, f"w{writer}-{number}")
            acknowledged.append(f"w{writer}-{number}")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = check(url, acknowledged)
    assert len(acknowledged) == 12
    assert [commit.seq for commit in reader.commits()] == list(range(12))


def test_server_that_answers_each_request_with_500_at_first_costs_nothing(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy
) -> None:
    seen: set[tuple[str, str]] = set()

    def first_of_each(method: str, path: str) -> Fault | None:
        fault = Fault.SERVER_ERROR if (method, path) not in seen else None
        seen.add((method, path))
        return fault

    Store.open(seaweedfs.store_url(bucket))
    store = Store(quick(seaweedfs, bucket, proxy.port))
    proxy.plan = first_of_each
    check_exclusive(store.storage)
    for token in ("g0", "g1"):
        commit_group(store, token)
    assert_same_trajectory(store.read_trajectory("g1"), two_turns("g1"))
    assert len(seen) > 20
    check(seaweedfs.store_url(bucket), ["g0", "g1"])


def test_server_that_only_answers_500_is_given_up_and_nothing_is_half_published(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy
) -> None:
    url = seaweedfs.store_url(bucket)
    store = Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    commit_group(store, "before")
    proxy.plan = lambda method, path: Fault.SERVER_ERROR if method == "PUT" and "/manifest/" in path else None
    with pytest.raises(StoreError, match=r"cannot write manifest/0+1\.json .* after 5 attempts"):
        commit_group(store, "refused")
    check(url, ["before"])
    proxy.plan = lambda _method, _path: None
    assert commit_group(store, "refused") == 1
    check(url, ["before", "refused"])


@pytest.mark.parametrize("where", ["/data/", "/manifest/"])
def test_lost_acknowledgement_of_a_put_is_found_to_be_ours(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy, where: str
) -> None:
    store = Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    lost: set[str] = set()

    def first_reply_of_each(method: str, path: str) -> Fault | None:
        if method != "PUT" or where not in path or path in lost:
            return None
        lost.add(path)
        return Fault.LOST_REPLY

    proxy.plan = first_reply_of_each
    assert commit_group(store, "g0") == 0
    assert len(lost) == (5 if where == "/data/" else 1)
    check(seaweedfs.store_url(bucket), ["g0"])


def test_all_acknowledgements_lost_the_commit_is_found_by_its_token(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy
) -> None:
    url = seaweedfs.store_url(bucket)
    store = Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    proxy.plan = lambda method, path: Fault.LOST_REPLY if method == "PUT" and "/manifest/" in path else None
    with pytest.raises(StoreError, match="after 5 attempts"):
        commit_group(store, "g0")
    check(url, [], others=("g0",))
    proxy.plan = lambda _method, _path: None
    found = store.commit("group", {}, {}, "g0")
    assert (found.repeated, found.seq) == (True, 0)
    check(url, ["g0"])


def test_replies_that_end_early_are_read_again_and_given_up_in_the_end(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy
) -> None:
    store = Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    store.storage.put_new("data/x", b"0123456789")
    proxy.requests.clear()
    short = iter([Fault.SHORT_REPLY])
    proxy.plan = lambda method, _path: next(short, None) if method == "GET" else None
    assert store.storage.get("data/x") == b"0123456789"
    assert [method for method, _path in proxy.requests] == ["HEAD", "GET"] * 2, "its size, then one request for all"
    proxy.plan = lambda method, _path: Fault.SHORT_REPLY if method == "GET" else None
    with pytest.raises(StoreError, match=r"cannot read data/x .* after 5 attempts"):
        store.storage.get("data/x")


def test_frozen_server_is_given_up_in_bounded_time_and_found_again(seaweedfs: SeaweedFS, bucket: str) -> None:
    url = seaweedfs.store_url(bucket)
    Store.open(url)
    store = Store(quick(seaweedfs, bucket))
    commit_group(store, "before")
    seaweedfs.freeze()
    try:
        started = time.monotonic()
        with pytest.raises(StoreError, match="after 5 attempts"):
            store.storage.get("manifest/00000000000000000000.json")
        with pytest.raises(StoreError, match="after 5 attempts"):
            store.storage.put_new("data/grades/x", b"1")
        assert time.monotonic() - started < 30
    finally:
        seaweedfs.thaw()
    commit_group(store, "after")
    check(url, ["before", "after"])


def test_endpoint_that_ignores_the_condition_is_refused_at_start(
    seaweedfs: SeaweedFS, bucket: str, proxy: FaultingProxy
) -> None:
    proxy.plan = lambda _method, _path: Fault.PRETEND_CREATED
    with pytest.raises(StoreError, match="ignores the condition 'create only if absent'"):
        Store.open(seaweedfs.store_url(bucket, port=proxy.port))
    proxy.plan = lambda _method, _path: None
    assert list_keys(quick(seaweedfs, bucket), "manifest") == []


def test_missing_bucket_and_wrong_credentials_are_named(
    seaweedfs: SeaweedFS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/run/store: no such bucket"):
        Store.open(seaweedfs.store_url("no-such-bucket"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match="access denied; check the AWS credentials"):
        Store.open(seaweedfs.store_url(bucket))


def quick(seaweedfs: SeaweedFS, bucket: str, port: int | None = None) -> S3Storage:
    """The bucket's storage with short time-outs and pauses."""
    return S3Storage.from_url(
        seaweedfs.store_url(bucket, port=port), read_timeout_s=1.0, sleep=lambda seconds: time.sleep(seconds / 10)
    )
