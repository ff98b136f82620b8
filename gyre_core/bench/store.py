"""`gyre bench store`: what the store costs beside plain pyarrow on the same data, on a local disk or on S3.

Enters: a size and a place. Leaves: bytes for each unique token, write and read speed of the store and of pyarrow
writing and reading the same tables with the same Parquet options, taken in turns in one run, and the time to read one
rollout among all.

The data are synthetic rollouts: prompts and outputs in turn, token ids with the skew of natural text (Zipf, 10.9 bits a
token) of which a third repeats earlier spans, log-probs mostly near 0. Speeds are of the tables in memory (MB, 10^6).
What the store does more than pyarrow: it gives each rollout a row group, checks the tables against their schemas, takes
a checksum of every object, writes exclusively and synced to the disk, publishes a manifest; on reading it verifies the
checksums.
"""

import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from gyre_core.store import Store, StoredRollout
from gyre_core.store.parquet import parquet_options
from gyre_core.store.s3 import pyarrow_filesystem
from gyre_core.store.tables import rollout_tables
from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import (
    CallRecord,
    FinishReason,
    Grade,
    HarnessResult,
    Outcome,
    Role,
    RolloutSpec,
    Substitution,
    VersionSpan,
)

_VOCABULARY = 151_936  # of Qwen3
_MARKED_COLUMNS = {"rollouts": "log_tail", "nodes": "call_id", "calls": "model_name", "grades": "reason"}
_PROMPT_SHARE = 0.6  # of a call's new tokens


def bench_store(
    url: str | None, *, num_rollouts: int, num_calls: int, num_tokens: int, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """Measure on `url` (a folder or s3://...; a temporary folder when None); what was written there is deleted.

    `num_tokens` unique tokens and `num_calls` calls a rollout. Speeds are of the best of `repeats` rounds, ratios
    the median of the rounds' ratios.
    """
    rng = np.random.default_rng(seed)
    rollouts = synthetic_rollouts(rng, num_rollouts, num_calls, num_tokens)
    started = time.perf_counter()
    tables = rollout_tables(rollouts)
    convert_s = time.perf_counter() - started
    num_unique = sum(rollout.trajectory.tree.unique_tokens for rollout in rollouts)
    raw_bytes = sum(table.nbytes for table in tables.values())
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        place = f"{url or folder}".rstrip("/")
        measured = _measure(_under(place, f"bench-{uuid.uuid4().hex[:12]}"), tables, rollouts, repeats)
    size_bytes = measured.pop("size_bytes")
    result = {
        "place": "s3" if place.startswith("s3://") else "local",
        "rollouts": num_rollouts,
        "unique_tokens": num_unique,
        "raw_mb": raw_bytes / 1e6,
        "stored_mb": size_bytes / 1e6,
        "bytes_per_token": size_bytes / num_unique,
        "convert_mb_s": raw_bytes / convert_s / 1e6,
    }
    one_s = measured.pop("one_rollout_s")
    for name, times in measured.items():
        result[f"{name}_mb_s"] = raw_bytes / min(times) / 1e6  # other work on the machine only ever adds time
    result["one_rollout_ms"] = statistics.median(one_s) * 1e3
    for what in ("write", "read"):  # neighbours in time suffer from the same other work
        pairs = zip(measured[f"pyarrow_{what}"], measured[what], strict=True)
        result[f"{what}_ratio_vs_pyarrow"] = statistics.median(plain_s / own_s for plain_s, own_s in pairs)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


def _measure(url: str, tables: dict[str, pa.Table], rollouts: list[StoredRollout], repeats: int) -> dict[str, Any]:
    """Seconds of each round, by the name of the result; the store and pyarrow take turns at going first."""
    on_s3 = url.startswith("s3://")
    filesystem = pyarrow_filesystem(url) if on_s3 else pafs.LocalFileSystem()
    plain = url.removeprefix("s3://").partition("?")[0]
    store = Store.open(url)
    seconds: dict[str, list[float]] = {name: [] for name in ("write", "pyarrow_write", "read", "pyarrow_read")}
    one_s: list[float] = []
    names: list[str] = []
    try:
        for round_ in range(repeats):
            # Row order differs a little each round: the store writes the same bytes only once.
            marked = {name: _marked(name, table, round_) for name, table in tables.items()}
            folder = f"{plain}-plain/{round_}"
            filesystem.create_dir(folder, recursive=True)
            names.append(folder)

            def write_store(marked: dict[str, pa.Table] = marked, round_: int = round_) -> None:
                store.commit("group", marked, {}, f"bench-{round_}")

            def write_plain(marked: dict[str, pa.Table] = marked, folder: str = folder) -> None:
                for name, table in marked.items():
                    options = parquet_options(name)
                    pq.write_table(table, f"{folder}/{name}.parquet", filesystem=filesystem, **options)

            def read_store(round_: int = round_) -> None:
                commit = store.commits()[round_]
                for name in commit.tables:
                    store.read_table(commit, name)

            def read_plain(folder: str = folder, names: tuple[str, ...] = tuple(marked)) -> None:
                for name in names:
                    pq.read_table(f"{folder}/{name}.parquet", filesystem=filesystem)

            for own, other, what in ((write_store, write_plain, "write"), (read_store, read_plain, "read")):
                pair: list[tuple[str, Callable[[], None]]] = [(what, own), (f"pyarrow_{what}", other)]
                for name, action in pair if round_ % 2 == 0 else pair[::-1]:
                    started = time.perf_counter()
                    action()
                    seconds[name].append(time.perf_counter() - started)
        size_bytes = sum(ref.size_bytes for refs in store.commits()[0].tables.values() for ref in refs)
        for index in range(0, len(rollouts), max(1, len(rollouts) // 8)):
            started = time.perf_counter()
            store.read_rollout(rollouts[index].spec.rollout_id)
            one_s.append(time.perf_counter() - started)
    finally:
        for folder in ("data", "manifest"):
            for item in store.storage.list_objects(folder):
                store.storage.delete(item.key)
        store.storage.delete("gyre-store.json")
        filesystem.delete_dir(f"{plain}-plain")
    return {**seconds, "one_rollout_s": one_s, "size_bytes": size_bytes}


def _under(place: str, name: str) -> str:
    """`place`/`name`, keeping an S3 URL's options at its end."""
    path, mark, options = place.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def _marked(name: str, table: pa.Table, round_: int) -> pa.Table:
    """The table with a mark in its last row's text, so that its objects are new ones in each round."""
    index = table.column_names.index(_MARKED_COLUMNS[name])
    texts = table.column(index).to_pylist()
    texts[-1] = f"{texts[-1]}-{round_}"
    return table.set_column(index, table.schema.field(index), pa.array(texts, pa.string()))


def synthetic_rollouts(
    rng: np.random.Generator, num_rollouts: int, num_calls: int, num_tokens: int
) -> list[StoredRollout]:
    """Rollouts of one branch each: `num_calls` prompts and outputs in turn, `num_tokens` tokens together."""
    source = _TokenSource(rng)
    return [_rollout(rng, source, f"s0000-p{index:03d}-00", num_calls, num_tokens) for index in range(num_rollouts)]


class _TokenSource:
    """Token ids as coding agents see them: skewed, and a third of them copied from earlier ones (echoed files)."""

    def __init__(self, rng: np.random.Generator) -> None:
        weights = 1.0 / (np.arange(_VOCABULARY) + 2.7)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._ids = rng.permutation(_VOCABULARY).astype(np.int32)
        self._rng = rng
        self._earlier: list[np.ndarray] = []

    def take(self, count: int) -> np.ndarray:
        rng = self._rng
        ranks = np.searchsorted(self._cumulative, rng.random(count))
        ids = self._ids[np.minimum(ranks, _VOCABULARY - 1)]
        copied = 0
        while self._earlier and count > 200 and copied < 0.3 * count:
            earlier = self._earlier[int(rng.integers(len(self._earlier)))]
            size = int(min(rng.integers(50, 200), len(earlier), count))
            into, out = int(rng.integers(0, count - size + 1)), int(rng.integers(0, len(earlier) - size + 1))
            ids[into : into + size] = earlier[out : out + size]
            copied += size
        self._earlier = [*self._earlier[-19:], ids]
        return ids


def _rollout(
    rng: np.random.Generator, source: _TokenSource, rollout_id: str, num_calls: int, num_tokens: int
) -> StoredRollout:
    prompt = max(1, int(num_tokens / num_calls * _PROMPT_SHARE))
    output = max(1, num_tokens // num_calls - prompt)
    nodes: list[TreeNode] = []
    calls = []
    for index in range(num_calls):
        call_id = f"{rollout_id}-c{index}"
        parent = len(nodes) - 1 if nodes else NO_PARENT
        nodes.append(
            TreeNode(
                node_id=len(nodes),
                parent_id=parent,
                token_ids=source.take(prompt),
                sampled=np.zeros(prompt, np.bool_),
                logprobs=np.zeros(prompt, np.float32),
                spans=(),
                call_id="",
                role=Role.MAIN,
            )
        )
        near = rng.random(output) < 0.6
        logprobs = -np.where(near, rng.exponential(1e-3, output), rng.exponential(0.8, output))
        nodes.append(
            TreeNode(
                node_id=len(nodes),
                parent_id=len(nodes) - 1,
                token_ids=source.take(output),
                sampled=np.ones(output, np.bool_),
                logprobs=logprobs.astype(np.float32),
                spans=(VersionSpan(version=0, start=0, end=output),),
                call_id=call_id,
                role=Role.MAIN,
            )
        )
        calls.append(
            CallRecord(
                call_id=call_id,
                rollout_id=rollout_id,
                index=index,
                node_id=len(nodes) - 1,
                role=Role.MAIN,
                dialect="messages",
                model_name="bench",
                substitution=Substitution.CLEAN,
                finish_reason=FinishReason.STOP,
                prompt_tokens=(index + 1) * prompt + index * output,
                output_tokens=output,
                cached_tokens=0,
                started_s=float(index),
                finished_s=index + 0.5,
            )
        )
    tree = TrajectoryTree(rollout_id=rollout_id, nodes=tuple(nodes))
    return StoredRollout(
        spec=RolloutSpec(
            rollout_id=rollout_id,
            group_id=rollout_id[:-3],
            problem_id=rollout_id[6:10],
            step=0,
            member=0,
            dispatch_version=0,
            seed=0,
        ),
        trajectory=Trajectory(rollout_id=rollout_id, tree=tree, calls=tuple(calls)),
        grade=Grade(outcome=Outcome.FINISHED, reward=1.0, reason="bench", verifier_attempts=1),
        harness=HarnessResult(exit_code=0, timed_out=False, duration_s=1.0, log_tail="", started_s=0.0, finished_s=1.0),
    )
