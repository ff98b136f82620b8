"""Blobs: bytes under their own checksum, written once, kept by the commits that name them."""

import hashlib
from pathlib import Path

import pytest

from gyre_core.errors import StoreError
from gyre_core.store.storage import ObjectMissingError
from gyre_core.store.store import Store
from tests.support.rollouts import finished

ARCHIVE = b"a workspace\x00archive"
REF = "sha256:" + hashlib.sha256(ARCHIVE).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def blob_files(store: Store) -> list[Path]:
    return sorted((Path(store.storage.url) / "blobs").rglob("*"))


def test_put_blob_comes_back_under_its_checksum(store: Store) -> None:
    assert store.put_blob(ARCHIVE, kind="workspace") == REF
    assert store.get_blob(REF) == ARCHIVE
    assert store.put_blob(b"", kind="workspace").endswith(hashlib.sha256(b"").hexdigest())


def test_put_blob_the_same_bytes_are_written_once(store: Store) -> None:
    store.put_blob(ARCHIVE, kind="workspace")
    (path,) = blob_files(store)
    written_ns = path.stat().st_mtime_ns
    store.put_blob(ARCHIVE, kind="workspace")
    Store.open(store.storage.url).put_blob(ARCHIVE, kind="workspace")
    assert blob_files(store) == [path] and path.stat().st_mtime_ns == written_ns


def test_commit_names_its_blobs(store: Store) -> None:
    ref = store.put_blob(ARCHIVE, kind="workspace")
    record = {"workspaces": {"r0": ref}}
    commit = store.commit_rollouts("group", [finished("r0")], [], record, "g0", blobs=[ref, ref])
    (blob,) = Store.open(store.storage.url, read_only=True).commits()[0].blobs
    assert commit.blobs == (blob,)
    assert (blob.ref, blob.size_bytes, blob.kind) == (REF, len(ARCHIVE), "workspace")


def test_commit_of_a_blob_that_another_process_put_finds_it(store: Store) -> None:
    ref = store.put_blob(ARCHIVE, kind="workspace")
    commit = Store.open(store.storage.url).commit("note", {}, {}, "t", blobs=[ref])
    assert commit.blobs[0].size_bytes == len(ARCHIVE)


def test_commit_of_a_blob_that_is_not_there_is_refused(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match="put the blob before it is used"):
        store.commit("note", {}, {}, "t", blobs=[REF])
    assert store.head == -1


def test_get_blob_damaged_is_named(store: Store) -> None:
    ref = store.put_blob(ARCHIVE, kind="workspace")
    (path,) = blob_files(store)
    path.write_bytes(ARCHIVE[:-1])
    with pytest.raises(StoreError, match=rf"blobs/{path.name} is damaged"):
        store.get_blob(ref)


def test_put_blob_a_damaged_one_under_its_name_is_an_error(store: Store) -> None:
    store.put_blob(ARCHIVE, kind="workspace")
    blob_files(store)[0].write_bytes(b"other")
    with pytest.raises(StoreError, match="its content does not match its name"):
        Store.open(store.storage.url).put_blob(ARCHIVE, kind="workspace")


@pytest.mark.parametrize("ref", ["", "sha256:ab", "md5:" + "0" * 64, REF + "/../x", REF.removeprefix("sha256:")])
def test_get_blob_of_a_reference_that_is_none_is_refused(store: Store, ref: str) -> None:
    with pytest.raises(ValueError, match="is no blob reference"):
        store.get_blob(ref)
