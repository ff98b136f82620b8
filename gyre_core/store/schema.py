"""The Arrow schemas of stored tables, version 1, and their Parquet form.

Enters: tables in a schema below. Leaves: whole Parquet objects as bytes, and back. Parquet form (measured at 3.08 bytes
a token): zstd level 1, no dictionaries, BYTE_STREAM_SPLIT on token, log-prob and weight leaves, page checksums. Tables
of `ROW_GROUP_A_ROLLOUT` keep each rollout's rows in a row group of their own, so that one rollout is read without the
others. Every object's metadata names its table and schema version; there is a reader for every version ever written.
"""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from gyre_core.errors import StoreError

SCHEMA_VERSION = 1
_TABLE_KEY = b"gyre.table"
_VERSION_KEY = b"gyre.schema_version"

_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_TEXT_MAP = pa.map_(pa.string(), pa.string())

SCHEMAS: dict[str, pa.Schema] = {
    # One row a rollout: what was asked for and how its harness ended.
    "rollouts": pa.schema(
        [
            ("rollout_id", pa.string()),
            ("group_id", pa.string()),
            ("problem_id", pa.string()),
            ("step", pa.int32()),  # -1: evaluation
            ("member", pa.int32()),
            ("dispatch_version", pa.int64()),
            ("seed", pa.int64()),
            ("exit_code", pa.int32()),  # null: never started, or killed
            ("timed_out", pa.bool_()),
            ("duration_s", pa.float64()),
            ("log_tail", pa.string()),
            ("started_s", pa.float64()),
            ("finished_s", pa.float64()),
            ("error", pa.string()),
            ("num_calls", pa.int32()),
            ("num_nodes", pa.int32()),
            ("unique_tokens", pa.int64()),
            ("sampled_tokens", pa.int64()),
            ("counters", pa.map_(pa.string(), pa.int64())),
        ]
    ),
    # One row a tree node, parents first: only the tokens it adds.
    "nodes": pa.schema(
        [
            ("rollout_id", pa.string()),
            ("node_id", pa.int32()),
            ("parent_id", pa.int32()),  # -1: a root
            ("call_id", pa.string()),
            ("role", pa.string()),
            ("tokens", pa.list_(pa.int32())),
            ("mask_runs", pa.list_(pa.int32())),  # lengths of not-sampled, sampled, not-sampled, ... runs
            ("logprobs", pa.list_(pa.float32())),  # of the sampled tokens only
            ("spans", pa.list_(_SPAN)),
        ]
    ),
    # One row a model call, in order of arrival.
    "calls": pa.schema(
        [
            ("rollout_id", pa.string()),
            ("call_id", pa.string()),
            ("index", pa.int32()),
            ("node_id", pa.int32()),
            ("role", pa.string()),
            ("dialect", pa.string()),
            ("model_name", pa.string()),
            ("substitution", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("output_tokens", pa.int32()),
            ("cached_tokens", pa.int32()),
            ("started_s", pa.float64()),
            ("finished_s", pa.float64()),
            ("hints", _TEXT_MAP),
        ]
    ),
    # One row a rollout.
    "grades": pa.schema(
        [
            ("rollout_id", pa.string()),
            ("outcome", pa.string()),
            ("reward", pa.float64()),  # null: excluded
            ("reason", pa.string()),
            ("verifier_attempts", pa.int32()),
            ("verifier_s", pa.float64()),
            ("metrics", pa.map_(pa.string(), pa.float64())),
        ]
    ),
    # One row a selected branch; its ids and log-probs are those of the path to `node_id`, `num_tokens` long.
    "selections": pa.schema(
        [
            ("rollout_id", pa.string()),
            ("group_id", pa.string()),
            ("branch", pa.int32()),
            ("role", pa.string()),
            ("node_id", pa.int32()),
            ("num_tokens", pa.int32()),
            ("target_runs", pa.list_(pa.int32())),  # lengths of not-trained, trained, not-trained, ... runs
            ("weights", pa.list_(pa.float32())),  # of the trained tokens only
            ("advantage", pa.float64()),
            ("temperature", pa.float64()),
            ("min_version", pa.int64()),
        ]
    ),
    # One row an optimizer step; nested facts as JSON text (records.StepRecord).
    "steps": pa.schema(
        [
            ("step", pa.int32()),
            ("version_before", pa.int64()),
            ("version_after", pa.int64()),
            ("checkpoint", pa.string()),
            ("groups_trained", pa.list_(pa.string())),
            ("record", pa.string()),
        ]
    ),
}
ROW_GROUP_A_ROLLOUT = frozenset({"nodes", "calls", "selections"})
_SPLIT_LEAVES = ("tokens", "logprobs", "weights")

# How a table of an older version becomes one of SCHEMA_VERSION: (table name, its version) -> function.
_UPGRADES: dict[tuple[str, int], Callable[[pa.Table], pa.Table]] = {}


def check_table(name: str, table: pa.Table) -> pa.Table:
    """The table in its schema's column order and types; ValueError for an unknown name or columns that do not fit."""
    schema = SCHEMAS.get(name)
    if schema is None:
        raise ValueError(f"the store has no table {name!r}; it has {', '.join(SCHEMAS)}")
    if sorted(table.column_names) != sorted(schema.names):
        raise ValueError(f"table {name}: columns {table.column_names}, its schema has {schema.names}")
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowInvalid as error:
        raise ValueError(f"table {name} does not fit its schema: {error}") from error


def to_parquet(name: str, table: pa.Table) -> bytes:
    """A whole Parquet object; the same table always gives the same bytes."""
    table = check_table(name, table)
    metadata = {_TABLE_KEY: name.encode(), _VERSION_KEY: str(SCHEMA_VERSION).encode()}
    schema = SCHEMAS[name].with_metadata(metadata)
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
    if version != SCHEMA_VERSION and (name, version) not in _UPGRADES:
        raise StoreError(
            f"{key} has schema version {text!r} of {name}; this Gyre reads up to {SCHEMA_VERSION}: use a newer one"
        )
    return file, version


def read_parquet(
    name: str, file: pq.ParquetFile, version: int, *, key: str, row_groups: list[int] | None = None
) -> pa.Table:
    """An opened object's rows (of some row groups), in the present schema; StoreError naming `key`."""
    try:
        table = file.read() if row_groups is None else file.read_row_groups(row_groups)
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"{key} is damaged: {error}") from error
    while version < SCHEMA_VERSION:
        table = _UPGRADES[(name, version)](table)
        version += 1
    try:
        return check_table(name, table.replace_schema_metadata(None))
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
