"""Reading stored objects: whole ones with their checksum, or one rollout's row groups, wherever compaction put them.

A reader may hold an older view than the store: when an object is missing it looks at the newest commits once and reads
the rows where they lie now.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from gyre_core.errors import StoreError
from gyre_core.store.ledger import Ledger, Place
from gyre_core.store.manifest import ObjectRef
from gyre_core.store.parquet import open_parquet, read_parquet, row_groups_of
from gyre_core.store.storage import ObjectMissingError, Storage

T = TypeVar("T")


class ObjectReader:
    """Tables of committed objects. StoreError names the object that is missing, damaged, foreign or newer.

    Example: reader.table("nodes", commit.tables["nodes"][0])
    """

    def __init__(self, storage: Storage, ledger: Ledger, refresh: Callable[[], None]) -> None:
        """`refresh` brings `ledger` up to the newest commit."""
        self._storage = storage
        self._ledger = ledger
        self._refresh = refresh

    def table(self, name: str, ref: ObjectRef) -> pa.Table:
        """All rows of an object. Its checksum is verified; of moved rows the checksums of their pages are."""

        def read(place: Place | None) -> pa.Table:
            if place is not None:
                return self._read_groups(name, place.ref.key, lambda _file: list(range(place.first, place.end)))
            return self._read_whole(name, ref)

        table = self._where_it_lies(ref, read)
        if table.num_rows != ref.num_rows:
            raise StoreError(f"{ref.key} has {table.num_rows} rows of {name}, its manifest says {ref.num_rows}")
        return table

    def row_groups(self, name: str, ref: ObjectRef) -> list[pa.Table]:
        """An object's rows as one table a row group, its checksum verified; not for objects that were moved."""
        file, version = open_parquet(name, pa.BufferReader(self.checked_bytes(ref)), key=ref.key)
        groups = range(file.metadata.num_row_groups)
        return [read_parquet(name, file, version, key=ref.key, row_groups=[group]) for group in groups]

    def rows(self, name: str, ref: ObjectRef, rollout_id: str) -> pa.Table:
        """One rollout's rows, reading only its row groups."""

        def read(place: Place | None) -> pa.Table:
            if place is None:
                return self._read_groups(name, ref.key, lambda file: row_groups_of(file, rollout_id))
            own = range(place.first, place.end)
            return self._read_groups(
                name, place.ref.key, lambda file: [group for group in row_groups_of(file, rollout_id) if group in own]
            )

        return self._where_it_lies(ref, read).filter(pc.field("rollout_id") == rollout_id)

    def checked_bytes(self, ref: ObjectRef) -> pa.Buffer:
        """An object's bytes; StoreError when they are not those that its manifest names."""
        data = self._storage.get(ref.key)
        _check_size(ref, data)
        _check_sha256(ref, hashlib.sha256(data))
        return pa.py_buffer(data)

    def _read_whole(self, name: str, ref: ObjectRef) -> pa.Table:
        """The checksum is taken while the rows are decoded; of the two, a wrong checksum is the one to tell."""
        data = self._storage.get(ref.key)
        _check_size(ref, data)
        with ThreadPoolExecutor(1) as other:
            hashed = other.submit(hashlib.sha256, data)
            try:
                file, version = open_parquet(name, pa.BufferReader(data), key=ref.key, verify_pages=False)
                return read_parquet(name, file, version, key=ref.key)
            finally:
                _check_sha256(ref, hashed.result())

    def _read_groups(self, name: str, key: str, choose: Callable[..., list[int]]) -> pa.Table:
        with self._storage.open_input(key) as source:
            file, version = open_parquet(name, source, key=key)
            return read_parquet(name, file, version, key=key, row_groups=choose(file))

    def _where_it_lies(self, ref: ObjectRef, read: Callable[[Place | None], T]) -> T:
        known = self._ledger.places.get(ref.key)
        try:
            return read(known)
        except ObjectMissingError:
            self._refresh()
            moved = self._ledger.places.get(ref.key)
            if moved == known:
                raise
            return read(moved)


def _check_size(ref: ObjectRef, data: bytes) -> None:
    if len(data) != ref.size_bytes:
        raise StoreError(f"{ref.key} is truncated or foreign: {len(data)} bytes, its manifest says {ref.size_bytes}")


def _check_sha256(ref: ObjectRef, digest: Any) -> None:
    if digest.hexdigest() != ref.sha256:
        raise StoreError(f"{ref.key} is damaged: its checksum differs from its manifest's")
