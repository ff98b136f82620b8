"""Where a store's objects lie: a flat space of immutable keys that are created once and never changed.

Enters: whole objects as bytes. Leaves: whole objects, or an error that names the key. A backend must make an object
visible whole or not at all, refuse to create a key twice, and see its own writes at once; `check_exclusive` proves the
second at start. Two real backends: a local folder (local.py) and S3 (s3.py).
"""

import re
import uuid
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from gyre_core.errors import StoreConflictError, StoreError

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*(/[A-Za-z0-9][A-Za-z0-9._=+-]*)*")


Data = bytes | memoryview  # an object to be written


class ObjectMissingError(StoreError):
    """No object has this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object as a listing shows it.

    Example: StoredObject(key="data/nodes/3f..e1.parquet", size_bytes=5120, modified_s=1764480000.0)
    """

    key: str
    size_bytes: int
    modified_s: float  # by the backend's clock


class Storage(Protocol):
    """Immutable objects under keys such as `manifest/00000000000000000003.json`."""

    @property
    def url(self) -> str:
        """Where it is, for messages; holds no credentials."""
        ...

    def put_new(self, key: str, data: Data) -> None:
        """Create an object whole; StoreConflictError when the key exists, StoreError when it cannot be written."""
        ...

    def get(self, key: str) -> bytes:
        """An object's bytes; ObjectMissingError or StoreError, naming the key."""
        ...

    def open_input(self, key: str) -> pa.NativeFile:
        """An object for reading at random; ObjectMissingError or StoreError, naming the key."""
        ...

    def size(self, key: str) -> int | None:
        """An object's size in bytes, None when there is none."""
        ...

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """Objects below the folder `prefix`, sorted by key; empty when there are none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none. Only for probes and unreferenced objects."""
        ...


def open_storage(url: str, *, min_free_bytes: int = 0) -> Storage:
    """The backend for a folder (`/path`, `file:///path`) or `s3://bucket/prefix[?endpoint=http://host:port&region=r]`.

    `min_free_bytes` guards local folders: a write that would leave less free is refused before it starts.
    """
    if url.startswith("s3://"):
        from gyre_core.store.s3 import S3Storage

        return S3Storage.from_url(url)
    if "://" in url and not url.startswith("file://"):
        raise StoreError(f"store url {url!r} is neither a folder nor s3://bucket/prefix; change store.url")
    from gyre_core.store.local import LocalStorage

    return LocalStorage(url.removeprefix("file://"), min_free_bytes=min_free_bytes)


def list_keys(storage: Storage, prefix: str) -> list[str]:
    """Keys below the folder `prefix`, sorted."""
    return [item.key for item in storage.list_objects(prefix)]


def check_key(key: str) -> str:
    """The key itself; ValueError when it could name something outside the store."""
    if not _KEY.fullmatch(key) or ".." in key:
        raise ValueError(f"{key!r} is not a store key (relative, letters, digits and ._=+- only, no '..')")
    return key


def check_exclusive(storage: Storage) -> None:
    """Prove that a key cannot be created twice; StoreError for a backend that ignores the condition."""
    key = f"probe/{uuid.uuid4().hex}"
    storage.put_new(key, b"first")
    try:
        storage.put_new(key, b"second")
    except StoreConflictError:
        return
    finally:
        storage.delete(key)
    raise StoreError(
        f"{storage.url} ignores the condition 'create only if absent' (If-None-Match), so two writers could overwrite "
        "each other; use a store that honours it (AWS S3, SeaweedFS 4, MinIO, a local folder)"
    )
