"""The Parquet form of stored tables.

Enters: tables of the registry (schema.py). Leaves: whole Parquet objects as bytes, and back. Parquet form (measured at
3.08 bytes a token): zstd level 1, no dictionaries, BYTE_STREAM_SPLIT on token, log-prob and weight leaves, page
checksums. Tables of `ROW_GROUP_A_ROLLOUT` keep each rollout's rows in a row group of their own, so that one rollout is
read without the others. Every object's metadata names its table and schema version.
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from gyre_core.errors import StoreError
from gyre_core.store.schema import VERSIONS, check_table, check_version, schema_of, upgrade

ROW_GROUP_A_ROLLOUT = frozenset({"nodes", "calls", "selections"})
_TABLE_KEY = b"gyre.table"
_VERSION_KEY = b"gyre.schema_version"
_SPLIT_LEAVES = ("tokens", "logprobs", "weights")


def to_parquet(name: str, table: pa.Table, *, version: int | None = None) -> bytes:
    """A whole Parquet object; the same table always gives the same bytes.

    `version`: an older one's columns, as the Gyre of that time wrote them (for tests of its reader).
    """
    return join_parquet(name, [table], version=version)


def join_parquet(name: str, tables: Sequence[pa.Table], *, version: int | None = None) -> bytes:
    """Tables of one schema as one Parquet object; no row group holds rows of two of them."""
    version = VERSIONS.get(name, 0) if version is None else version
    tables = [check_table(name, table, version) for table in tables]
    metadata = {_TABLE_KEY: name.encode(), _VERSION_KEY: str(version).encode()}
    schema = schema_of(name, version).with_metadata(metadata)
    split = {f"{leaf}.list.element": "BYTE_STREAM_SPLIT" for leaf in _SPLIT_LEAVES if leaf in schema.names}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding=split or None,
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            for start, size in _row_groups(name, table):
                writer.write_table(table.slice(start, size).replace_schema_metadata(metadata), row_group_size=size)
    return sink.getvalue().to_pybytes()


def open_parquet(name: str, source: pa.NativeFile | pa.Buffer, *, key: str) -> tuple[pq.ParquetFile, int]:
    """A stored object and its schema version; StoreError naming `key` for a truncated, foreign or newer object."""
    try:
        file = pq.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"{key} is truncated or no Parquet object: {error}") from error
    metadata = file.schema_arrow.metadata or {}
    found = metadata.get(_TABLE_KEY, b"").decode(errors="replace")
    if found != name:
        raise StoreError(f"{key} should hold the table {name!r}, it holds {found or 'a foreign Parquet object'!r}")
    text = metadata.get(_VERSION_KEY, b"").decode(errors="replace")
    version = int(text) if text.isdigit() else 0
    check_version(name, version, key=key)
    return file, version


def read_parquet(
    name: str, file: pq.ParquetFile, version: int, *, key: str, row_groups: list[int] | None = None
) -> pa.Table:
    """An opened object's rows (of some row groups), in the present schema; StoreError naming `key`."""
    try:
        table = file.read() if row_groups is None else file.read_row_groups(row_groups)
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"{key} is damaged: {error}") from error
    try:
        return upgrade(name, table.replace_schema_metadata(None), version)
    except ValueError as error:
        raise StoreError(f"{key}: {error}") from error


def row_groups_of(file: pq.ParquetFile, rollout_id: str) -> list[int]:
    """The row groups that hold a rollout's rows, by the statistics of the column `rollout_id`."""
    column = file.schema_arrow.names.index("rollout_id")
    groups = []
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max or statistics.min <= rollout_id <= statistics.max:
            groups.append(group)
    return groups


def _row_groups(name: str, table: pa.Table) -> list[tuple[int, int]]:
    if name not in ROW_GROUP_A_ROLLOUT:
        return [(0, table.num_rows)] if table.num_rows else []
    groups: list[tuple[int, int]] = []
    start = 0
    ids = table.column("rollout_id").to_pylist()
    for row in range(1, len(ids) + 1):
        if row == len(ids) or ids[row] != ids[start]:
            groups.append((start, row - start))
            start = row
    return groups
