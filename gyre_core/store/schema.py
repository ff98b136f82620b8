"""The registry of the stored tables: each one's columns, their version, and how every older version is read.

Enters: tables of any version ever written. Leaves: tables of the present version, or an error that names what does not
fit. A change of a table's columns raises its number in `VERSIONS` and leaves the old columns in `OLDER`, with the
function that makes a table of that version one of the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from gyre_core.errors import StoreError
from gyre_core.trajectory.columns import CALL_FIELDS, SPAN

VERSIONS = {"rollouts": 2, "nodes": 1, "calls": 1, "grades": 1, "selections": 1, "steps": 1}

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
            ("workspace_ref", pa.string()),  # blob of the kept workspace's archive; "": none was kept
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
            ("spans", pa.list_(SPAN)),
        ]
    ),
    # One row a model call, in order of arrival.
    "calls": pa.schema([("rollout_id", pa.string()), *CALL_FIELDS]),
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


class SchemaVersionError(StoreError):
    """An object was written by a Gyre newer than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderVersion:
    """Columns that were written once and are still read.

    Example: OLDER["rollouts", 1].upgrade(table_of_version_1)  # one of version 2
    """

    schema: pa.Schema
    upgrade: Callable[[pa.Table], pa.Table]  # to the next version


def _rollouts_1_to_2(table: pa.Table) -> pa.Table:
    """Version 1 knew no kept workspaces."""
    return table.append_column("workspace_ref", pa.array([""] * table.num_rows, pa.string()))


OLDER: dict[tuple[str, int], OlderVersion] = {
    ("rollouts", 1): OlderVersion(
        schema=pa.schema([field for field in SCHEMAS["rollouts"] if field.name != "workspace_ref"]),
        upgrade=_rollouts_1_to_2,
    ),
}


def schema_of(name: str, version: int) -> pa.Schema:
    """A table's columns in one version; ValueError for an unknown table or version."""
    if name not in SCHEMAS:
        raise ValueError(f"the store has no table {name!r}; it has {', '.join(SCHEMAS)}")
    if version == VERSIONS[name]:
        return SCHEMAS[name]
    if (name, version) not in OLDER:
        raise ValueError(f"table {name} has no version {version}; this Gyre reads 1 to {VERSIONS[name]}")
    return OLDER[name, version].schema


def check_version(name: str, version: int, *, key: str) -> None:
    """SchemaVersionError naming `key` for a version that this Gyre has no reader for."""
    if version != VERSIONS[name] and (name, version) not in OLDER:
        raise SchemaVersionError(
            f"{key} has schema version {version} of {name}; this Gyre reads up to {VERSIONS[name]}: use a newer one"
        )


def check_table(name: str, table: pa.Table, version: int | None = None) -> pa.Table:
    """The table in its schema's column order and types; ValueError for an unknown name or columns that do not fit."""
    schema = schema_of(name, VERSIONS.get(name, 0) if version is None else version)
    if sorted(table.column_names) != sorted(schema.names):
        raise ValueError(f"table {name}: columns {table.column_names}, its schema has {schema.names}")
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowInvalid as error:
        raise ValueError(f"table {name} does not fit its schema: {error}") from error


def upgrade(name: str, table: pa.Table, version: int) -> pa.Table:
    """A table of any version as one of the present version; ValueError when it does not have its version's columns."""
    table = check_table(name, table, version)
    while version < VERSIONS[name]:
        table = OLDER[name, version].upgrade(table)
        version += 1
    return check_table(name, table)
