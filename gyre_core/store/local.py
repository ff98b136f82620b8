"""A store in a local folder.

An object is written to `.tmp/`, synced, and linked to its final name: `link` fails when the name exists, so creation is
exclusive and the object is visible whole or not at all, also after a power cut or `kill -9`. Before each write the free
space is checked, so that a filling disk stops a run with a clear message instead of a half-written file.
"""

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from pathlib import Path

import pyarrow as pa

from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.storage import Data, ObjectMissingError, StoredObject, check_key

_LEFTOVER_AGE_S = 24 * 3600.0  # a draft this old belongs to no living writer
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStorage:
    """Objects as files below one folder.

    Example: LocalStorage("/data/run/store", min_free_bytes=256 * 2**20).put_new("data/ab.parquet", payload)
    """

    def __init__(self, folder: str | Path, *, min_free_bytes: int = 0) -> None:
        self._root = Path(folder).expanduser().absolute()
        self._drafts = self._root / ".tmp"
        self._min_free_bytes = min_free_bytes

    @property
    def url(self) -> str:
        return str(self._root)

    def check_space(self, size_bytes: int = 0) -> None:
        """StoreError when writing `size_bytes` would leave less than `min_free_bytes` free."""
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
        if free_bytes - size_bytes < self._min_free_bytes:
            raise StoreError(
                f"disk nearly full: {self._root} has {_mib(free_bytes)} free, this write needs {_mib(size_bytes)} and "
                f"store.min_free_bytes keeps {_mib(self._min_free_bytes)}. Nothing was written; free some space and "
                "resume the run, or lower store.min_free_bytes"
            )

    def put_new(self, key: str, data: Data) -> None:
        final = self._root / check_key(key)
        self.check_space(len(data))
        draft = self._drafts / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            self._make_folder(self._drafts)
            self._make_folder(final.parent)
            try:
                _write_synced(draft, data)
                os.link(draft, final)
                _sync_folder(final.parent)
            finally:
                draft.unlink(missing_ok=True)
        except FileExistsError as error:
            if final.is_file():
                raise StoreConflictError(f"{key} exists already in {self._root}") from error
            raise StoreError(f"cannot create {key} in {self._root}: {error}") from error
        except OSError as error:
            raise StoreError(self._explain(key, len(data), error)) from error

    def get(self, key: str) -> bytes:
        try:
            return (self._root / check_key(key)).read_bytes()
        except OSError as error:
            raise self._read_error(key, error) from error

    def open_input(self, key: str) -> pa.NativeFile:
        try:
            return pa.memory_map(str(self._root / check_key(key)))
        except OSError as error:
            raise self._read_error(key, error) from error

    def size(self, key: str) -> int | None:
        try:
            return (self._root / check_key(key)).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._read_error(key, error) from error

    def list_objects(self, prefix: str) -> list[StoredObject]:
        folder = self._root / check_key(prefix)
        found = []
        try:
            for path in folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        key = path.relative_to(self._root).as_posix()
                        found.append(StoredObject(key=key, size_bytes=status.st_size, modified_s=status.st_mtime))
        except OSError as error:
            raise self._read_error(prefix, error) from error
        return sorted(found, key=lambda item: item.key)

    def delete(self, key: str) -> None:
        try:
            (self._root / check_key(key)).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete {key} in {self._root}: {error.strerror}") from error

    def remove_leftovers(self) -> int:
        """Delete drafts that a killed writer left a day or more ago; returns how many."""
        removed = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self._drafts.iterdir():
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                        path.unlink()
                        removed += 1
        return removed

    def _make_folder(self, folder: Path) -> None:
        """Create a folder so that it survives a power cut: its parents' entries are synced too."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _sync_folder(path.parent)

    def _read_error(self, key: str, error: OSError) -> StoreError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return ObjectMissingError(f"{key} is missing in {self._root}")
        return StoreError(f"cannot read {key} in {self._root}: {error.strerror or error}")

    def _explain(self, key: str, size_bytes: int, error: OSError) -> str:
        where = f"cannot write {key} ({_mib(size_bytes)}) in {self._root}"
        if error.errno in _FULL:
            return (
                f"{where}: the disk or quota is full ({error.strerror}). Nothing was published; free some space and "
                "resume the run"
            )
        if error.errno in _NO_LINKS:
            return (
                f"{where}: this file system has no hard links ({error.strerror}), which whole, exclusive writes need; "
                "point store.url at a local disk or at S3"
            )
        return f"{where}: {error.strerror or error}; nothing was published"


def _write_synced(path: Path, data: Data) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
