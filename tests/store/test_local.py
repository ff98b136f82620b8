"""Objects in a local folder: whole, exclusive, refused in time when the disk fills."""

import errno
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.local import LocalStorage
from gyre_core.store.storage import ObjectMissingError, check_exclusive, list_keys
from gyre_core.store.store import Store

Usage = namedtuple("Usage", "total used free")


def test_put_new_creates_once_and_reads_back(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "s")
    storage.put_new("data/a.parquet", b"payload")
    with pytest.raises(StoreConflictError, match=r"data/a\.parquet exists"):
        storage.put_new("data/a.parquet", b"other")
    assert storage.get("data/a.parquet") == b"payload"
    assert storage.size("data/a.parquet") == 7
    with storage.open_input("data/a.parquet") as source:
        assert source.read(3) == b"pay"
    assert list_keys(storage, "data") == ["data/a.parquet"]
    assert list((tmp_path / "s" / ".tmp").iterdir()) == []


def test_missing_objects_have_a_named_error_and_no_size(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert storage.size("data/none") is None
    assert list_keys(storage, "data") == []
    for read in (storage.get, storage.open_input):
        with pytest.raises(ObjectMissingError, match="data/none is missing"):
            read("data/none")
    storage.delete("data/none")


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../b", "a//b", "", ".tmp/x", "a/.hidden", "a\nb", "a/b/"])
def test_keys_that_leave_the_folder_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a store key"):
        LocalStorage(tmp_path).put_new(key, b"x")


def test_put_new_below_min_free_bytes_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path / "s", min_free_bytes=100 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(2**40, 2**40, 100 * 2**20 + 9))
    storage.put_new("data/a", b"123456789")
    with pytest.raises(StoreError, match=r"disk nearly full: .* 100\.0 MiB free.*store\.min_free_bytes"):
        storage.put_new("data/b", b"1234567890")
    assert list_keys(storage, "data") == ["data/a"]


def test_open_on_a_full_disk_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(2**40, 2**40, 5))
    with pytest.raises(StoreError, match="disk nearly full"):
        Store.open(str(tmp_path / "s"), min_free_bytes=10)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "disk or quota is full"),
        (errno.EDQUOT, "disk or quota is full"),
        (errno.EIO, "nothing was published"),
    ],
)
def test_put_new_a_write_that_fails_half_way_publishes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put_new("data/first", b"1")

    def fail(_descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=message):
        storage.put_new("data/second", b"2")
    monkeypatch.undo()
    assert list_keys(storage, "data") == ["data/first"]
    assert list((tmp_path / ".tmp").iterdir()) == []
    storage.put_new("data/second", b"2")


def test_put_new_without_hard_links_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreError, match=r"no hard links.*point store\.url"):
        Store.open(str(tmp_path / "s"))


def test_put_new_where_a_file_is_in_the_way_is_no_conflict(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StoreError, match="cannot create data/a") as caught:
        LocalStorage(tmp_path).put_new("data/a", b"x")
    assert not isinstance(caught.value, StoreConflictError)


def test_check_exclusive_a_backend_that_ignores_the_condition_is_refused(tmp_path: Path) -> None:
    class Overwriting(LocalStorage):
        def put_new(self, key: str, data: bytes) -> None:
            path = Path(self.url) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    storage = Overwriting(tmp_path)
    with pytest.raises(StoreError, match="If-None-Match"):
        check_exclusive(storage)
    assert list_keys(storage, "probe") == []
    check_exclusive(LocalStorage(tmp_path))
    assert list_keys(storage, "probe") == []


def test_remove_leftovers_takes_old_drafts_only(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    drafts = tmp_path / ".tmp"
    drafts.mkdir()
    for name, age_s in (("old", 25 * 3600), ("young", 3600)):
        (drafts / name).write_text("x")
        os.utime(drafts / name, (time.time() - age_s,) * 2)
    assert storage.remove_leftovers() == 1
    assert [path.name for path in drafts.iterdir()] == ["young"]


def test_open_in_a_read_only_place_says_so_and_reading_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "store")
    Store.open(url).commit("note", {}, {}, "n0")

    def read_only(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("gyre_core.store.local._write_synced", read_only)
    with pytest.raises(StoreError, match=r"cannot write probe/.*Read-only file system; nothing was published"):
        Store.open(url)
    assert [commit.token for commit in Store.open(url, read_only=True).commits()] == ["n0"]
