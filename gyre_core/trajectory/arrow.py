"""Trajectories as Arrow IPC bytes: the hand-off from the proxy to the flow.

Enters: a `Trajectory`. Leaves: one IPC stream with one record batch of one row (and back). The round trip is exact:
ids, masks, log-prob bits, spans, calls, counters. Log-probs travel for sampled tokens only. The schema's metadata names
the format and its version; a reader takes its own version and refuses others with a ValueError.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from gyre_core.trajectory.tree import Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import CallRecord, FinishReason, Role, Substitution, VersionSpan

FORMAT_KEY = b"gyre.trajectory"
FORMAT_VERSION = b"1"

_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_CALL = pa.struct(
    [
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
        ("hints", pa.map_(pa.string(), pa.string())),
    ]
)
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("node_parent", pa.list_(pa.int32())),
        ("node_role", pa.list_(pa.string())),
        ("node_call", pa.list_(pa.string())),
        ("node_spans", pa.list_(pa.list_(_SPAN))),
        ("node_tokens", pa.list_(pa.list_(pa.int32()))),
        ("node_sampled", pa.list_(pa.list_(pa.bool_()))),
        ("node_logprobs", pa.list_(pa.list_(pa.float32()))),  # of the sampled tokens only
        ("calls", pa.list_(_CALL)),
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
        _one_row(pa.array([[_span_row(span) for span in node.spans] for node in nodes], pa.list_(_SPAN))),
        _one_row(_ragged([node.token_ids for node in nodes], np.int32, pa.int32())),
        _one_row(_ragged([node.sampled for node in nodes], np.bool_, pa.bool_())),
        _one_row(_ragged([node.logprobs[node.sampled] for node in nodes], np.float32, pa.float32())),
        _one_row(pa.array([_call_row(call) for call in trajectory.calls], _CALL)),
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
    calls = tuple(_call(fields, rollout_id) for fields in row.column("calls")[0].as_py())
    return Trajectory(rollout_id=rollout_id, tree=tree, calls=calls, counters=dict(row.column("counters")[0].as_py()))


def _nodes(row: pa.RecordBatch) -> list[TreeNode]:
    parents = row.column("node_parent")[0].as_py()
    roles = row.column("node_role")[0].as_py()
    call_ids = row.column("node_call")[0].as_py()
    spans = row.column("node_spans")[0].as_py()
    tokens = _split_ragged(row, "node_tokens", np.int32)
    masks = _split_ragged(row, "node_sampled", np.bool_)
    sampled_logprobs = _split_ragged(row, "node_logprobs", np.float32)
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


def _ragged(parts: list[np.ndarray], dtype: type, arrow_type: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int32)
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, arrow_type))


def _split_ragged(row: pa.RecordBatch, name: str, dtype: type) -> list[np.ndarray]:
    values = row.column(name)[0].values
    flat = values.flatten().to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    lengths = values.value_lengths().to_numpy(zero_copy_only=False)
    parts = np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
    for part in parts:
        part.flags.writeable = False
    return parts


def _span_row(span: VersionSpan) -> dict[str, int]:
    return {"version": span.version, "start": span.start, "end": span.end}


def _call_row(call: CallRecord) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "index": call.index,
        "node_id": call.node_id,
        "role": call.role.value,
        "dialect": call.dialect,
        "model_name": call.model_name,
        "substitution": call.substitution.value,
        "finish_reason": call.finish_reason.value,
        "prompt_tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "cached_tokens": call.cached_tokens,
        "started_s": call.started_s,
        "finished_s": call.finished_s,
        "hints": list(call.hints.items()),
    }


def _call(fields: dict[str, Any], rollout_id: str) -> CallRecord:
    return CallRecord(
        **{
            **fields,
            "rollout_id": rollout_id,
            "role": Role(fields["role"]),
            "substitution": Substitution(fields["substitution"]),
            "finish_reason": FinishReason(fields["finish_reason"]),
            "hints": dict(fields["hints"]),
        }
    )
