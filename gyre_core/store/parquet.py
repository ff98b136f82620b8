"""The Parquet form of stored tables.

Enters: tables of the registry (schema.py). Leaves: whole Parquet objects as bytes, and back. Parquet form (measured at
3.08 bytes a token): zstd level 1, no dictionaries, BYTE_STREAM_SPLIT on token, log-prob and weight leaves, page
checksums. One rollout is read without the others: its nodes are a row group of their own; rows of its calls and
selections, which are small, lie in a row group with those of few others. Every object's metadata names its table and
schema version.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gyre_core.errors import StoreError
from gyre_core.store.schema import SCHEMAS, VERSIONS, check_table, check_version, schema_of, upgrade

# Rows that a row group of whole rollouts may reach: a group costs 0.3 ms to write; a call has about 200 bytes a row.
_GROUP_ROWS = {"nodes": 1, "calls": 4096, "selections": 256}
_SHARD_BYTES = 16 * 2**20  # of a table in memory: what one object holds, so that large tables are written in parallel
_TABLE_KEY = b"gyre.table"
_VERSION_KEY = b"gyre.schema_version"
_SPLIT_LEAVES = ("tokens", "logprobs", "weights")


def parquet_options(name: str) -> dict[str, Any]:
    """Arguments of pyarrow's writer that make a table's Parquet form."""
    split = [leaf for leaf in _SPLIT_LEAVES if leaf in SCHEMAS[name].names]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "column_encoding": {f"{leaf}.list.element": "BYTE_STREAM_SPLIT" for leaf in split} or None,
    }


def to_parquet(name: str, table: pa.Table, *, version: int | None = None) -> memoryview:
    """A whole Parquet object; the same table always gives the same bytes.

    `version`: an older one's columns, as the Gyre of that time wrote them (for tests of its reader).
    """
    return join_parquet(name, [table], version=version)


def join_parquet(name: str, tables: Sequence[pa.Table], *, version: int | None = None) -> memoryview:
    """Tables of one schema as one Parquet object; no row group holds rows of two of them."""
    version = VERSIONS.get(name, 0) if version is None else version
    tables = [check_table(name, table, version) for table in tables]
    metadata = {_TABLE_KEY: name.encode(), _VERSION_KEY: str(version).encode()}
    schema = schema_of(name, version).with_metadata(metadata)
    sink = pa.BufferOutputStream()
    # Statistics of the one column that rows are looked up by: those of tokens and log-probs cost 5 % of the time.
    statistics: Any = ["rollout_id"] if "rollout_id" in schema.names else False
    with pq.ParquetWriter(
        sink, schema, **parquet_options(name), write_statistics=statistics, write_page_checksum=True
    ) as writer:
        for table in tables:
            for start, size in _row_groups(name, table):
                writer.write_table(table.slice(start, size).replace_schema_metadata(metadata), row_group_size=size)
    return memoryview(sink.getvalue()).cast("B")


def open_parquet(
    name: str, source: pa.NativeFile | pa.Buffer, *, key: str, verify_pages: bool = True
) -> tuple[pq.ParquetFile, int]:
    """A stored object and its schema version; StoreError naming `key` for a truncated, foreign or newer object.

    `verify_pages`: check each page's checksum when it is read; needless where the whole object's checksum is taken.
    """
    try:
        file = pq.ParquetFile(source, page_checksum_verification=verify_pages, pre_buffer=True)
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


def split_table(name: str, table: pa.Table) -> list[pa.Table]:
    """A large table as several of about 16 MiB, cut between rollouts; a table always in the same way."""
    num_shards = -(-table.nbytes // _SHARD_BYTES)
    if name not in _GROUP_ROWS or num_shards < 2:
        return [table]
    starts = _rollout_starts(table)
    wanted = np.arange(num_shards) * table.num_rows // num_shards
    nearest = np.unique(starts[np.searchsorted(starts[:-1], wanted).clip(max=len(starts) - 2)])
    cuts = [int(start) for start in nearest]
    return [table.slice(start, end - start) for start, end in zip(cuts, [*cuts[1:], table.num_rows], strict=True)]


def _row_groups(name: str, table: pa.Table) -> list[tuple[int, int]]:
    """(first row, number of rows) of each; a rollout's rows are never in two."""
    if name not in _GROUP_ROWS:
        return [(0, table.num_rows)] if table.num_rows else []
    groups: list[tuple[int, int]] = []
    first = 0
    for end in _rollout_starts(table)[1:].tolist():
        if end - first >= _GROUP_ROWS[name] or end == table.num_rows:
            groups.append((first, end - first))
            first = end
    return groups


def _rollout_starts(table: pa.Table) -> np.ndarray:
    """The rows at which another rollout begins, and the number of rows."""
    codes = table.column("rollout_id").combine_chunks().dictionary_encode().indices.to_numpy()
    return np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1, [len(codes)]]) if len(codes) else np.zeros(1, int)
