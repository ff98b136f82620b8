"""Calls, version spans and lists of arrays as Arrow columns, shared by the proxy's hand-off and the store.

Enters: records and numpy arrays. Leaves: Arrow types, rows and arrays, and back, to the bit. A call's `rollout_id` is
not among its columns: a table of several rollouts has it in a column of its own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gyre_core.types import CallRecord, FinishReason, Role, Substitution, VersionSpan

SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
CALL_FIELDS = (
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
)


def span_row(span: VersionSpan) -> dict[str, int]:
    """A value of `SPAN`."""
    return {"version": span.version, "start": span.start, "end": span.end}


def call_row(call: CallRecord) -> dict[str, Any]:
    """A call's values of `CALL_FIELDS`."""
    values = {name: getattr(call, name) for name, _type in CALL_FIELDS}
    return {
        **values,
        "role": call.role.value,
        "substitution": call.substitution.value,
        "finish_reason": call.finish_reason.value,
        "hints": list(call.hints.items()),
    }


def call_from_row(row: dict[str, Any], rollout_id: str) -> CallRecord:
    """The inverse of `call_row`; ValueError for a role or reason that this Gyre does not know."""
    values = {name: row[name] for name, _type in CALL_FIELDS}
    return CallRecord(
        **{
            **values,
            "rollout_id": rollout_id,
            "role": Role(row["role"]),
            "substitution": Substitution(row["substitution"]),
            "finish_reason": FinishReason(row["finish_reason"]),
            "hints": dict(row["hints"]),
        }
    )


def ragged(parts: Sequence[np.ndarray], dtype: type, arrow_type: pa.DataType) -> pa.ListArray:
    """Arrays as one list column; ValueError when they hold more values than a list column can."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} tokens do not fit one table; put the rollouts as several")
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(flat, arrow_type))


def split_ragged(values: pa.ListArray, dtype: type) -> list[np.ndarray]:
    """The inverse of `ragged`: read-only views of one array."""
    flat = values.flatten().to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    ends = np.cumsum(values.value_lengths().to_numpy(zero_copy_only=False))
    parts = np.split(flat, ends[:-1]) if len(ends) else []
    for part in parts:
        part.flags.writeable = False
    return parts
