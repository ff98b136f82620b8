"""`gyre bench tree`: what recording a very long rollout costs.

Enters: the size of a synthetic rollout (tree_rollout.py). Leaves: the time to build its tree through the recorder, call
by call as a session does it; the memory that the recorder keeps for each unique token; what flat storage of the same
calls would take; restoring it from its journal and sealing it to Arrow IPC.
"""

import gc
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_core.bench.tree_rollout import ROLLOUT_ID, SyntheticCall, synthetic_calls
from gyre_core.proxy.journal import JournalFolder, call_record, read_call
from gyre_core.trajectory.arrow import trajectory_from_ipc, trajectory_to_ipc
from gyre_core.trajectory.recorder import FinishedCall, Recorder
from gyre_core.types import FinishReason, VersionSpan

_TIMED_RUNS = 3  # the quickest counts: other programs of the machine only ever add time
_ID_BYTES = _LOGPROB_BYTES = 4  # int32, float32
_SESSION = "bench-session"


def bench_tree(*, num_tokens: int, num_calls: int, seed: int) -> dict[str, Any]:
    """Build, measure, restore and seal one rollout; raises ValueError for too few tokens or calls."""
    calls = list(synthetic_calls(num_calls=num_calls, num_tokens=num_tokens, seed=seed))
    build_s = min(_timed_build(calls) for _ in range(_TIMED_RUNS))
    recorder, kept_bytes = _measured_build(calls)
    finished = _finished(calls)
    flat_tokens = sum(call.prompt_tokens + len(call.output_ids) for call in finished)
    flat_bytes = _ID_BYTES * flat_tokens + _LOGPROB_BYTES * sum(len(call.output_ids) for call in finished)

    started = time.perf_counter()
    data = trajectory_to_ipc(recorder.snapshot())
    seal_s = time.perf_counter() - started
    started = time.perf_counter()
    trajectory = trajectory_from_ipc(data)
    read_s = time.perf_counter() - started
    tree = trajectory.tree
    tree.validate()
    with tempfile.TemporaryDirectory() as folder:
        restore = _restore(Path(folder), calls, finished)
    return {
        "build_s": round(build_s, 4),
        "unique_tokens": tree.unique_tokens,
        "bytes_per_unique_token": round(kept_bytes / tree.unique_tokens, 2),
        "flat_bytes": flat_bytes,
        "ratio": round(flat_bytes / kept_bytes, 1),
        "kept_bytes": kept_bytes,
        "calls": len(trajectory.calls),
        "nodes": len(tree.nodes),
        "branches": len(tree.leaves()),
        "sampled_tokens": tree.sampled_tokens,
        "flat_tokens": flat_tokens,
        "substitutions": {name: count for name, count in recorder.counters.items() if name.startswith("substitution_")},
        **restore,
        "seal_s": round(seal_s, 4),
        "ipc_bytes": len(data),
        "ipc_read_s": round(read_s, 4),
    }


def tree_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result for people: what, how much."""
    unique, kept = result["unique_tokens"], result["kept_bytes"]
    return [
        ("rollout", f"{result['calls']} calls, {result['nodes']} nodes, {result['branches']} branches"),
        ("unique tokens", f"{unique:,} ({result['sampled_tokens']:,} sampled)"),
        ("build", f"{result['build_s']:.3f} s ({1e3 * result['build_s'] / result['calls']:.2f} ms a call)"),
        ("memory", f"{kept / 1e6:.1f} MB, {result['bytes_per_unique_token']:.1f} bytes a unique token"),
        ("flat storage", f"{result['flat_bytes'] / 1e6:.1f} MB for {result['flat_tokens']:,} tokens"),
        ("flat / tree", f"{result['ratio']:.1f}"),
        ("journal", f"{result['journal_bytes'] / 1e6:.1f} MB, restored in {result['restore_s']:.3f} s"),
        ("seal to Arrow IPC", f"{result['ipc_bytes'] / 1e6:.1f} MB in {result['seal_s']:.3f} s"),
        ("read Arrow IPC", f"{result['ipc_read_s']:.3f} s"),
    ]


def record_call(recorder: Recorder, index: int, call: SyntheticCall) -> FinishedCall:
    """What a session does for one call besides rendering, sampling and the journal."""
    plan = recorder.plan(call.context, call.keys)
    anchor = plan.anchor if plan.bridgeable else None
    prompt_ids = recorder.prompt_ids(anchor, call.added) if anchor is not None else call.added
    finished = FinishedCall(
        call_id=call.reply.call_id,
        index=index,
        role=call.role,
        dialect="messages",
        model_name="bench",
        substitution=plan.substitution,
        finish_reason=FinishReason.STOP,
        anchor_call=anchor.call_id if anchor is not None else "",
        prompt_ids=call.added,
        output_ids=call.output_ids,
        logprobs=call.logprobs,
        spans=(VersionSpan(version=0, start=0, end=len(call.output_ids)),),
        prompt_tokens=len(prompt_ids),
        cached_tokens=0,
        prompt_state=plan.prompt_state,
        seen=plan.seen,
        reply=call.reply.message().key(),
        started_s=float(index),
        finished_s=float(index) + 1,
        hints={},
    )
    recorder.record(finished)
    return finished


def _finished(calls: list[SyntheticCall]) -> list[FinishedCall]:
    recorder = Recorder(ROLLOUT_ID)
    return [record_call(recorder, index, call) for index, call in enumerate(calls)]


def _timed_build(calls: list[SyntheticCall]) -> float:
    gc.collect()
    started = time.perf_counter()
    recorder = Recorder(ROLLOUT_ID)
    for index, call in enumerate(calls):
        record_call(recorder, index, call)
    return time.perf_counter() - started


def _measured_build(calls: list[SyntheticCall]) -> tuple[Recorder, int]:
    """A recorder, and the bytes that live because of it: tracemalloc, which counts arrays and objects."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        recorder = Recorder(ROLLOUT_ID)
        for index, call in enumerate(calls):
            record_call(recorder, index, call)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return recorder, after - before


def _restore(folder: Path, calls: list[SyntheticCall], finished: list[FinishedCall]) -> dict[str, Any]:
    """Write the journal of a session that made these calls, then read it as a restarted proxy does."""
    writing = JournalFolder(folder, sync="session")
    journal = writing.create(_SESSION, {"settings": {}})
    for call, record in zip(calls, finished, strict=True):
        reply = replace(call.reply, prompt_tokens=record.prompt_tokens)
        journal.append(*call_record(record, reply, record.prompt_state))
    journal.close()
    writing.close()
    gc.collect()
    started = time.perf_counter()
    reading = JournalFolder(folder, sync="session")
    recorder = Recorder(ROLLOUT_ID)
    for _, journal, records in reading.restore():
        for header, arrays in records[1:]:
            recorder.record(read_call(header, arrays)[0])
        journal.close()
    restore_s = time.perf_counter() - started
    reading.close()
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.journal"))
    return {"restore_s": round(restore_s, 4), "journal_bytes": size_bytes}
