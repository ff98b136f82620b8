"""The S3 backend's decisions, against a bucket in a local folder that fails on demand."""

import errno
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs as pafs
import pytest
from botocore.exceptions import ConnectTimeoutError

from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.records import StepRecord
from gyre_core.store.s3 import S3Storage
from gyre_core.store.storage import ObjectMissingError, check_exclusive, list_keys, open_storage
from gyre_core.store.store import Store
from tests.support.rollouts import assert_same_trajectory, finished, two_turns


class FakeWriter:
    """The three s3fs calls that are used, on a local folder. `faults` are raised one a call."""

    def __init__(self, folder: Path, *, conflict: Callable[[str], OSError] = FileExistsError) -> None:
        self._folder = folder
        self._conflict = conflict
        self.faults: list[BaseException | None] = []
        self.lost_replies = 0  # puts that happen although the caller gets an error

    def pipe_file(self, path: str, value: bytes, mode: str, chunksize: int, timeout: float) -> None:
        assert mode == "create" and chunksize >= len(value) and 0 < timeout < 60
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise self._conflict(path)
        target.write_bytes(value)
        if self.lost_replies:
            self.lost_replies -= 1
            raise TimeoutError("no reply")

    def rm_file(self, path: str, timeout: float) -> None:
        (self._folder / path).unlink()


def seaweed_conflict(_path: str) -> OSError:
    return OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")


def storage_on(folder: Path, **options) -> tuple[S3Storage, FakeWriter, list[float]]:
    writer = FakeWriter(folder, **options)
    reader = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
    pauses: list[float] = []
    return S3Storage("bucket/prefix", writer=writer, reader=reader, sleep=pauses.append), writer, pauses


@pytest.mark.parametrize("conflict", [FileExistsError, seaweed_conflict])
def test_put_new_each_servers_412_is_a_conflict(tmp_path: Path, conflict: Callable[[str], OSError]) -> None:
    storage, _writer, pauses = storage_on(tmp_path, conflict=conflict)
    storage.put_new("data/a", b"1")
    with pytest.raises(StoreConflictError, match="data/a exists"):
        storage.put_new("data/a", b"1")
    assert storage.get("data/a") == b"1"
    assert list_keys(storage, "data") == ["data/a"]
    assert pauses == []


def test_put_new_a_lost_reply_is_a_success_when_the_object_is_ours(tmp_path: Path) -> None:
    storage, writer, pauses = storage_on(tmp_path)
    writer.lost_replies = 1
    storage.put_new("manifest/a", b"ours")
    assert pauses == [0.2]
    assert storage.get("manifest/a") == b"ours"


def test_put_new_a_retry_that_meets_anothers_object_is_a_conflict(tmp_path: Path) -> None:
    storage, writer, _pauses = storage_on(tmp_path)
    storage.put_new("manifest/a", b"theirs")
    writer.faults = [TimeoutError("frozen")]
    with pytest.raises(StoreConflictError):
        storage.put_new("manifest/a", b"ours")


def test_put_new_a_frozen_server_is_given_up_after_five_attempts(tmp_path: Path) -> None:
    storage, writer, pauses = storage_on(tmp_path)
    writer.faults = [
        TimeoutError("read"),
        ConnectTimeoutError(endpoint_url="http://s3"),
        OSError(errno.EIO, "500"),
        OSError(errno.EIO, "503 SlowDown"),
        TimeoutError("read"),
    ]
    with pytest.raises(StoreError, match=r"cannot write data/a \(1 bytes\) in s3://bucket/prefix after 5 attempts"):
        storage.put_new("data/a", b"1")
    assert pauses == [0.2, 0.4, 0.8, 1.6]
    assert storage.size("data/a") is None


def test_put_new_a_passing_fault_is_retried(tmp_path: Path) -> None:
    storage, writer, _pauses = storage_on(tmp_path)
    writer.faults = [OSError(errno.EIO, "500"), None]
    storage.put_new("data/a", b"1")
    assert storage.get("data/a") == b"1"


def test_put_new_refused_credentials_are_not_retried(tmp_path: Path) -> None:
    storage, writer, pauses = storage_on(tmp_path)
    writer.faults = [PermissionError("AccessDenied")]
    with pytest.raises(StoreError, match="check the AWS credentials"):
        storage.put_new("data/a", b"1")
    assert pauses == []


def test_get_missing_object_is_named(tmp_path: Path) -> None:
    storage, _writer, pauses = storage_on(tmp_path)
    with pytest.raises(ObjectMissingError, match="data/a is missing in s3://bucket/prefix"):
        storage.get("data/a")
    storage.delete("data/a")
    assert pauses == []


def test_store_on_the_s3_backend_commits_and_reads(tmp_path: Path) -> None:
    storage, writer, _pauses = storage_on(tmp_path, conflict=seaweed_conflict)
    check_exclusive(storage)
    store = Store(storage)
    writer.lost_replies = 1
    record = StepRecord(step=0, version_before=0, version_after=1)
    commit = store.commit_step(record, rollouts=[finished("r0"), finished("r1")], token="step-0")
    assert Store(storage).commits() == [commit]
    assert_same_trajectory(Store(storage).read_trajectory("r1"), two_turns("r1"))


def test_open_storage_s3_urls_with_credentials_or_unknown_options_are_refused_without_showing_them() -> None:
    with pytest.raises(StoreError, match="credentials come from the environment") as caught:
        open_storage("s3://key:secret@bucket/prefix")
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreError, match="endpoint"):
        open_storage("s3://bucket/prefix?acl=public")
