"""What the page of one rollout shows, as plain JSON and packed arrays.

Enters: a stored rollout, its selected branches, a vocabulary. Leaves: `RolloutModel`. Pure. Each node's tokens are held
once; texts are not held at all but put together by the page from the pieces of the ids that occur.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_core.store.tables import StoredRollout, locate_branch
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import CallRecord, Json, Role, TrainingBranch
from gyre_core.viewer.outline import Outline, outline
from gyre_core.viewer.vocabulary import Vocabulary

ROLES = tuple(Role)  # the order of the legend
LOGPROB_UNIT = 0.001  # nats; log-probs are shown with three decimals
_LOGPROB_MAX = 65535  # units: -65.535 nats and less are shown as that


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutModel:
    """A page's data: `head` is JSON, `sections` are arrays as bytes (least significant byte first, byte planes).

    Example: rollout_model(stored, branches, vocabulary).head["nodes"]["size"]
    """

    head: Json
    sections: dict[str, bytes]


def rollout_model(
    rollout: StoredRollout,
    branches: Sequence[TrainingBranch],
    vocabulary: Vocabulary,
    *,
    run_id: str = "",
    group_rewards: Mapping[str, float | None] | None = None,
    dropped_reason: str | None = None,
) -> RolloutModel:
    """Raises ValueError when a branch is no path of the rollout's tree."""
    trajectory = rollout.trajectory
    tree = trajectory.tree
    trained = trained_runs(tree, branches)
    zero_s = min([call.started_s for call in trajectory.calls], default=rollout.harness.started_s)
    token_index, piece_ids = _dense_ids(tree)
    pieces = vocabulary.pieces(piece_ids.tolist())
    logprobs = _joined([node.logprobs for node in tree.nodes if node.call_id], np.float32)
    layout = outline(tree)
    head = {
        "run": run_id,
        "spec": {
            "rollout": rollout.spec.rollout_id,
            "label": rollout.spec.label,
            "group": rollout.spec.group_id,
            "problem": rollout.spec.problem_id,
            "step": rollout.spec.step,
            "member": rollout.spec.member,
            "version": rollout.spec.dispatch_version,
            "seed": str(rollout.spec.seed),  # more than a JavaScript number holds
        },
        "grade": {
            "outcome": rollout.grade.outcome.value,
            "reward": rollout.grade.reward,
            "reason": rollout.grade.reason,
            "attempts": rollout.grade.verifier_attempts,
            "seconds": rollout.grade.verifier_s,
            "metrics": dict(rollout.grade.metrics),
        },
        "harness": {
            "exit_code": rollout.harness.exit_code,
            "timed_out": rollout.harness.timed_out,
            "seconds": rollout.harness.duration_s,
            "started_s": rollout.harness.started_s - zero_s,
            "error": rollout.harness.error,
            "log_tail": rollout.harness.log_tail,
        },
        "workspace": rollout.workspace_ref,
        "group_rewards": dict(group_rewards or {}),
        "dropped_reason": dropped_reason,
        "zero_s": zero_s,  # seconds since the epoch that the calls' times count from
        "roles": [role.value for role in ROLES],
        "totals": _totals(trajectory, branches, trained),
        "counters": dict(trajectory.counters),
        "calls": [_call(call, zero_s) for call in trajectory.calls],
        "nodes": _nodes(trajectory, trained),
        "branches": [_branch(tree, branch) for branch in branches],
        "outline": _outline(layout),
        "num_pieces": len(pieces),
        "special": [index for index, token_id in enumerate(piece_ids.tolist()) if token_id in vocabulary.special],
        "logprob_unit": LOGPROB_UNIT,
    }
    units = np.clip(np.rint(-logprobs.astype(np.float64) / LOGPROB_UNIT), 0, _LOGPROB_MAX).astype(np.uint32)
    sections = {
        "tokens": byte_planes(token_index, 3),
        "logprobs": byte_planes(units, 2),
        "piece_ids": byte_planes(piece_ids.astype(np.uint32), 4),
        "piece_sizes": byte_planes(np.array([len(piece) for piece in pieces], np.uint32), 2),
        "pieces": b"".join(pieces),
    }
    return RolloutModel(head=head, sections=sections)


def trained_runs(tree: TrajectoryTree, branches: Sequence[TrainingBranch]) -> list[list[tuple[int, int, int]]]:
    """For each node its runs of targets as (start, end, branch), in order of their starts."""
    runs: list[list[tuple[int, int, int]]] = [[] for _ in tree.nodes]
    for branch in branches:
        start = 0
        for node_id in tree.path(locate_branch(tree, branch)):
            size = len(tree.nodes[node_id].token_ids)
            mask = branch.target[start : start + size]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
            runs[node_id] += [(low, high, branch.branch) for low, high in zip(edges[::2], edges[1::2], strict=True)]
            start += size
    return [sorted(found) for found in runs]


def byte_planes(values: np.ndarray, width: int) -> bytes:
    """Non-negative integers as `width` planes of bytes, the lowest first: compresses far better than whole numbers."""
    numbers = values.astype("<u4")
    return b"".join(((numbers >> (8 * plane)) & 255).astype(np.uint8).tobytes() for plane in range(width))


def _totals(
    trajectory: Trajectory, branches: Sequence[TrainingBranch], trained: Sequence[Sequence[tuple[int, int, int]]]
) -> Json:
    tree = trajectory.tree
    versions = Counter[int]()
    ends: list[int] = []  # tokens of the path to each node's end
    for node in tree.nodes:
        ends.append(len(node.token_ids) + (ends[node.parent_id] if node.parent_id >= 0 else 0))
        for span in node.spans:
            versions[span.version] += span.end - span.start
    return {
        "unique_tokens": tree.unique_tokens,
        "sampled_tokens": tree.sampled_tokens,
        "trained_tokens": sum(end - start for runs in trained for start, end, _ in runs),
        "branch_tokens": sum(ends[leaf] for leaf in tree.leaves()),  # what storing each branch flat would hold
        "branches": len(tree.leaves()),
        "calls": len(trajectory.calls),
        "roles": dict(Counter(call.role.value for call in trajectory.calls)),
        "substitutions": dict(Counter(call.substitution.value for call in trajectory.calls)),
        "finish_reasons": dict(Counter(call.finish_reason.value for call in trajectory.calls)),
        "versions": {str(version): count for version, count in sorted(versions.items())},
        "weight": float(sum(float(branch.weights.sum(dtype=np.float64)) for branch in branches)),
    }


def _call(call: CallRecord, zero_s: float) -> Json:
    return {
        "id": call.call_id,
        "node": call.node_id,
        "role": ROLES.index(call.role),
        "dialect": call.dialect,
        "model": call.model_name,
        "substitution": call.substitution.value,
        "finish": call.finish_reason.value,
        "prompt": call.prompt_tokens,
        "output": call.output_tokens,
        "cached": call.cached_tokens,
        "start": round(call.started_s - zero_s, 4),
        "seconds": round(call.finished_s - call.started_s, 4),
        "hints": dict(call.hints),
    }


def _nodes(trajectory: Trajectory, trained: Sequence[Sequence[tuple[int, int, int]]]) -> Json:
    """Columns, one entry a node. `call` is an index into the calls: the one that sampled it, else -1."""
    nodes = trajectory.tree.nodes
    index = {call.call_id: position for position, call in enumerate(trajectory.calls)}
    return {
        "parent": [node.parent_id for node in nodes],
        "size": [len(node.token_ids) for node in nodes],
        "sampled": [int(bool(node.call_id)) for node in nodes],
        "role": [ROLES.index(node.role) for node in nodes],
        "call": [index.get(node.call_id, -1) if node.call_id else -1 for node in nodes],
        "spans": [[[span.version, span.start, span.end] for span in node.spans] for node in nodes],
        "trained": [[list(run) for run in runs] for runs in trained],
    }


def _branch(tree: TrajectoryTree, branch: TrainingBranch) -> Json:
    return {
        "branch": branch.branch,
        "leaf": locate_branch(tree, branch),
        "role": ROLES.index(branch.role),
        "tokens": len(branch.token_ids),
        "targets": int(branch.target.sum()),
        "weight": float(branch.weights.sum(dtype=np.float64)),
        "advantage": branch.advantage,
        "temperature": branch.temperature,
        "min_version": branch.min_version,
    }


def _outline(layout: Outline) -> Json:
    return {
        "rows": list(layout.rows),
        "thread_of": list(layout.thread_of),
        "threads": [
            {
                "parent": thread.parent,
                "level": thread.level,
                "start": thread.start,
                "end": thread.end,
                "below": thread.below,
                "conversation": thread.conversation,
            }
            for thread in layout.threads
        ],
    }


def _dense_ids(tree: TrajectoryTree) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in node order as indices into the ids that occur, the most frequent id first; and those ids."""
    tokens = _joined([node.token_ids for node in tree.nodes], np.int32)
    ids, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(ids), np.uint32)
    rank[order] = np.arange(len(ids), dtype=np.uint32)
    return rank[inverse.reshape(-1)], ids[order]


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
