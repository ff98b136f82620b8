"""Training branches as Arrow IPC: the hand-off from selection to a train cell.

A branch's log-probs and weights travel only for its targets; the receiver gets back arrays equal to the sender's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gyre_core.types import Role, TrainingBranch

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("branch", pa.int32()),
        ("role", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("target_positions", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("weights", pa.list_(pa.float32())),
        ("advantage", pa.float64()),
        ("temperature", pa.float64()),
        ("min_version", pa.int32()),
    ],
    metadata={"gyre.kind": "training-branches", "gyre.version": "1"},
)


def branches_to_ipc(branches: Sequence[TrainingBranch]) -> bytes:
    """Serialise branches, order kept, as one Arrow IPC stream."""
    rows: list[dict[str, Any]] = []
    for branch in branches:
        (positions,) = np.nonzero(branch.target)
        rows.append(
            {
                "rollout_id": branch.rollout_id,
                "group_id": branch.group_id,
                "branch": branch.branch,
                "role": branch.role.value,
                "token_ids": branch.token_ids,
                "target_positions": positions.astype(np.int32),
                "sampler_logprobs": branch.sampler_logprobs[positions],
                "weights": branch.weights[positions],
                "advantage": branch.advantage,
                "temperature": branch.temperature,
                "min_version": branch.min_version,
            }
        )
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def branches_from_ipc(data: bytes) -> list[TrainingBranch]:
    """The inverse of `branches_to_ipc`; raises ValueError for bytes that are not such a stream."""
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
    except pa.ArrowInvalid as error:
        raise ValueError(f"not an Arrow stream of training branches: {error}") from error
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"an Arrow stream with another schema than training branches: {table.schema.names}")
    branches = []
    for row in range(table.num_rows):
        ids = _values(table, "token_ids", row)
        positions = _values(table, "target_positions", row)
        target = np.zeros(len(ids), np.bool_)
        target[positions] = True
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[positions] = _values(table, "sampler_logprobs", row)
        weights = np.zeros(len(ids), np.float32)
        weights[positions] = _values(table, "weights", row)
        branches.append(
            TrainingBranch(
                rollout_id=table["rollout_id"][row].as_py(),
                group_id=table["group_id"][row].as_py(),
                branch=table["branch"][row].as_py(),
                role=Role(table["role"][row].as_py()),
                token_ids=ids,
                target=target,
                sampler_logprobs=logprobs,
                weights=weights,
                advantage=table["advantage"][row].as_py(),
                temperature=table["temperature"][row].as_py(),
                min_version=table["min_version"][row].as_py(),
            )
        )
    return branches


def _values(table: pa.Table, column: str, row: int) -> np.ndarray[Any, np.dtype[Any]]:
    return table[column][row].values.to_numpy(zero_copy_only=False)
