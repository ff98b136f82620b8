"""Trajectories as Arrow IPC bytes: the hand-off from the proxy to the flow.

Enters: a `Trajectory`. Leaves: one IPC stream with one record batch of one row (and back). The round trip is exact:
ids, masks, log-prob bits, spans, calls, counters. Log-probs travel for sampled tokens only. The schema's metadata names
the format and its version; a reader takes its own version and refuses others with a ValueError.
"""

import numpy as np
import pyarrow as pa

from gyre_core.trajectory.columns import (
    CALL_FIELDS,
    SPAN,
    call_from_row,
    call_row,
    ragged,
    span_row,
    split_ragged,
)
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import Role, VersionSpan

FORMAT_KEY = b"gyre.trajectory"
FORMAT_VERSION = b"1"

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("node_parent", pa.list_(pa.int32())),
        ("node_role", pa.list_(pa.string())),
        ("node_call", pa.list_(pa.string())),
        ("node_spans", pa.list_(pa.list_(SPAN))),
        ("node_tokens", pa.list_(pa.list_(pa.int32()))),
        ("node_sampled", pa.list_(pa.list_(pa.bool_()))),
        ("node_logprobs", pa.list_(pa.list_(pa.float32()))),  # of the sampled tokens only
        ("calls", pa.list_(pa.struct(CALL_FIELDS))),
        ("counters", pa.map_(pa.string(), pa.int64())),
    ],
    metadata={FORMAT_KEY: FORMAT_VERSION},
)


def trajectory_to_ipc(trajectory: Trajectory) -> bytes:
    """Serialise; the same trajectory always gives the same bytes."""
    nodes = trajectory.tree.nodes
    columns = [
        pa.array([trajectory.rollout_id], pa.string()),
        _one_row(pa.array([node.parent_id for node in nodes], pa.int32())),
        _one_row(pa.array([node.role.value for node in nodes], pa.string())),
        _one_row(pa.array([node.call_id for node in nodes], pa.string())),
        _one_row(pa.array([[span_row(span) for span in node.spans] for node in nodes], pa.list_(SPAN))),
        _one_row(ragged([node.token_ids for node in nodes], np.int32, pa.int32())),
        _one_row(ragged([node.sampled for node in nodes], np.bool_, pa.bool_())),
        _one_row(ragged([node.logprobs[node.sampled] for node in nodes], np.float32, pa.float32())),
        _one_row(pa.array([call_row(call) for call in trajectory.calls], pa.struct(CALL_FIELDS))),
        pa.array([list(trajectory.counters.items())], pa.map_(pa.string(), pa.int64())),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    return sink.getvalue().to_pybytes()


def trajectory_from_ipc(data: bytes) -> Trajectory:
    """Read what `trajectory_to_ipc` wrote; raises ValueError for truncated, foreign or newer bytes."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            version = (reader.schema.metadata or {}).get(FORMAT_KEY)
            if version != FORMAT_VERSION:
                raise ValueError(f"not a trajectory of format {FORMAT_VERSION.decode()} (found {version!r})")
            table = reader.read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"not a whole Arrow IPC stream: {error}") from error
    if table.num_rows != 1 or table.schema != SCHEMA:
        raise ValueError(f"not a trajectory: {table.num_rows} rows of schema {table.schema.names}")
    row = table.combine_chunks().to_batches()[0]
    rollout_id = row.column("rollout_id")[0].as_py()
    tree = TrajectoryTree(rollout_id=rollout_id, nodes=tuple(_nodes(row)))
    tree.validate()
    calls = tuple(call_from_row(fields, rollout_id) for fields in row.column("calls")[0].as_py())
    return Trajectory(rollout_id=rollout_id, tree=tree, calls=calls, counters=dict(row.column("counters")[0].as_py()))


def _nodes(row: pa.RecordBatch) -> list[TreeNode]:
    parents = row.column("node_parent")[0].as_py()
    roles = row.column("node_role")[0].as_py()
    call_ids = row.column("node_call")[0].as_py()
    spans = row.column("node_spans")[0].as_py()
    tokens = split_ragged(row.column("node_tokens")[0].values, np.int32)
    masks = split_ragged(row.column("node_sampled")[0].values, np.bool_)
    sampled_logprobs = split_ragged(row.column("node_logprobs")[0].values, np.float32)
    nodes = []
    for index, (parent, role, call_id, ids, mask, values) in enumerate(
        zip(parents, roles, call_ids, tokens, masks, sampled_logprobs, strict=True)
    ):
        logprobs = np.zeros(len(ids), np.float32)
        if int(mask.sum()) != len(values):
            raise ValueError(f"node {index} of the trajectory: {int(mask.sum())} sampled, {len(values)} log-probs")
        logprobs[mask] = values
        logprobs.flags.writeable = False
        nodes.append(
            TreeNode(
                node_id=index,
                parent_id=parent,
                token_ids=ids,
                sampled=mask,
                logprobs=logprobs,
                spans=tuple(VersionSpan(**span) for span in spans[index]),
                call_id=call_id,
                role=Role(role),
            )
        )
    return nodes


def _one_row(values: pa.Array) -> pa.Array:
    """A column whose only row is the list of all `values`."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
