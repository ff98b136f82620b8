"""Rollouts, trajectories, grades and selected branches as rows of the stored tables, and back.

The round trip is exact: ids, masks, log-prob bits, spans, calls, counters, grades, weights. Rows of one rollout lie
together, in the order the rollouts were given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from gyre_core.errors import StoreError
from gyre_core.store.schema import SCHEMAS
from gyre_core.trajectory.columns import call_from_row, call_row, ragged, span_row, split_ragged
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import (
    BoolMask,
    CallRecord,
    Grade,
    HarnessResult,
    Outcome,
    Role,
    RolloutSpec,
    TrainingBranch,
    VersionSpan,
)

_SPEC_FIELDS = ("rollout_id", "group_id", "problem_id", "step", "member", "dispatch_version", "seed")
_HARNESS_FIELDS = ("exit_code", "timed_out", "duration_s", "log_tail", "started_s", "finished_s", "error")


class FinishedRollout(Protocol):
    """What the store keeps of a rollout: anything that has these five."""

    @property
    def spec(self) -> RolloutSpec: ...
    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def grade(self) -> Grade: ...
    @property
    def harness(self) -> HarnessResult: ...
    @property
    def workspace_ref(self) -> str: ...  # of the kept workspace's archive (Store.put_blob), "" when none was kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout as the store gives it back.

    Example: store.read_rollout("s0003-p07-02").grade.reward
    """

    spec: RolloutSpec
    trajectory: Trajectory
    grade: Grade
    harness: HarnessResult
    workspace_ref: str = ""  # for Store.get_blob; "" when no workspace was kept


def rollout_tables(rollouts: Iterable[FinishedRollout]) -> dict[str, pa.Table]:
    """The tables rollouts, nodes, calls and grades; ValueError when a rollout comes twice or its parts disagree."""
    rows: dict[str, list[dict[str, Any]]] = {"rollouts": [], "calls": [], "grades": []}
    nodes: list[tuple[str, TreeNode]] = []
    seen: set[str] = set()
    for rollout in rollouts:
        rollout_id = rollout.spec.rollout_id
        trajectory = rollout.trajectory
        if rollout_id in seen:
            raise ValueError(f"rollout {rollout_id} is given twice")
        if not rollout_id == trajectory.rollout_id == trajectory.tree.rollout_id:
            raise ValueError(f"rollout {rollout_id} has the trajectory of {trajectory.rollout_id}")
        seen.add(rollout_id)
        rows["rollouts"].append(_rollout_row(rollout))
        rows["calls"].extend({"rollout_id": rollout_id, **call_row(call)} for call in trajectory.calls)
        rows["grades"].append(_grade_row(rollout_id, rollout.grade))
        nodes.extend((rollout_id, node) for node in trajectory.tree.nodes)
    tables = {name: pa.Table.from_pylist(values, schema=SCHEMAS[name]) for name, values in rows.items()}
    return {**tables, "nodes": _nodes_table(nodes)}


def selections_table(branches: Iterable[TrainingBranch], trajectories: Iterable[Trajectory]) -> pa.Table:
    """The table selections: each branch as a path of its rollout's tree; ValueError when it is none."""
    trees = {trajectory.rollout_id: trajectory.tree for trajectory in trajectories}
    rows = []
    for branch in branches:
        if branch.rollout_id not in trees:
            raise ValueError(f"branch {branch.branch} of {branch.rollout_id}: that rollout is not in this commit")
        rows.append(
            {
                "rollout_id": branch.rollout_id,
                "group_id": branch.group_id,
                "branch": branch.branch,
                "role": branch.role.value,
                "node_id": locate_branch(trees[branch.rollout_id], branch),
                "num_tokens": len(branch.token_ids),
                "target_runs": mask_to_runs(branch.target),
                "weights": branch.weights[branch.target],
                "advantage": branch.advantage,
                "temperature": branch.temperature,
                "min_version": branch.min_version,
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMAS["selections"])


def locate_branch(tree: TrajectoryTree, branch: TrainingBranch) -> int:
    """The first node whose path holds the branch: its ids and its targets' log-probs. ValueError when none does."""
    children = tree.children()
    roots = [node.node_id for node in tree.nodes if node.parent_id < 0]
    stack = [(node_id, 0) for node_id in reversed(roots)]
    total = len(branch.token_ids)
    while stack:
        node_id, start = stack.pop()
        node = tree.nodes[node_id]
        end = min(start + len(node.token_ids), total)
        held = slice(0, end - start)
        target = branch.target[start:end]
        if not np.array_equal(node.token_ids[held], branch.token_ids[start:end]):
            continue
        if not np.array_equal(node.logprobs[held][target], branch.sampler_logprobs[start:end][target]):
            continue
        if not node.sampled[held][target].all():
            continue
        if end == total:
            return node_id
        stack.extend((child, end) for child in reversed(children[node_id]))
    raise ValueError(f"branch {branch.branch} of {branch.rollout_id} is no path of its rollout's tree")


def read_trajectories(rollouts: pa.Table, nodes: pa.Table, calls: pa.Table) -> list[Trajectory]:
    """Trajectories of the rows of `rollouts`, in order; StoreError when their parts do not fit together."""
    trees = _trees(nodes)
    by_rollout: dict[str, list[CallRecord]] = {}
    for row in calls.to_pylist():
        by_rollout.setdefault(row["rollout_id"], []).append(call_from_row(row, row["rollout_id"]))
    trajectories = []
    for row in rollouts.select(["rollout_id", "num_nodes", "num_calls", "counters"]).to_pylist():
        rollout_id = row["rollout_id"]
        tree = TrajectoryTree(rollout_id=rollout_id, nodes=tuple(trees.get(rollout_id, ())))
        found = tuple(by_rollout.get(rollout_id, ()))
        if (len(tree.nodes), len(found)) != (row["num_nodes"], row["num_calls"]):
            raise StoreError(
                f"rollout {rollout_id} has {len(tree.nodes)} nodes and {len(found)} calls in the store, its record "
                f"says {row['num_nodes']} and {row['num_calls']}"
            )
        try:
            tree.validate()
        except ValueError as error:
            raise StoreError(f"rollout {rollout_id} has a broken tree: {error}") from error
        counters = dict(row["counters"])
        trajectories.append(Trajectory(rollout_id=rollout_id, tree=tree, calls=found, counters=counters))
    return trajectories


def read_rollouts(rollouts: pa.Table, nodes: pa.Table, calls: pa.Table, grades: pa.Table) -> list[StoredRollout]:
    """Whole rollouts, in order; StoreError when one has no grade or its parts do not fit."""
    grade_of = {row["rollout_id"]: _grade(row) for row in grades.to_pylist()}
    stored = []
    for row, trajectory in zip(rollouts.to_pylist(), read_trajectories(rollouts, nodes, calls), strict=True):
        if row["rollout_id"] not in grade_of:
            raise StoreError(f"rollout {row['rollout_id']} has no grade in the store")
        stored.append(
            StoredRollout(
                spec=RolloutSpec(**{name: row[name] for name in _SPEC_FIELDS}),
                trajectory=trajectory,
                grade=grade_of[row["rollout_id"]],
                harness=HarnessResult(**{name: row[name] for name in _HARNESS_FIELDS}),
                workspace_ref=row["workspace_ref"],
            )
        )
    return stored


def read_branches(selections: pa.Table, trajectories: Iterable[Trajectory]) -> list[TrainingBranch]:
    """Selected branches with their ids and log-probs, in stored order; StoreError when a rollout is missing."""
    trees = {trajectory.rollout_id: trajectory.tree for trajectory in trajectories}
    branches = []
    for row in selections.to_pylist():
        tree = trees.get(row["rollout_id"])
        if tree is None or not 0 <= row["node_id"] < len(tree.nodes):
            raise StoreError(f"branch {row['branch']} of {row['rollout_id']} names a node that the store does not have")
        num_tokens = row["num_tokens"]
        target = runs_to_mask(row["target_runs"])
        ids = tree.path_tokens(row["node_id"])[:num_tokens]
        if len(ids) != num_tokens or len(target) != num_tokens:
            raise StoreError(f"branch {row['branch']} of {row['rollout_id']} is longer than its path")
        weights = np.zeros(num_tokens, np.float32)
        weights[target] = row["weights"]
        logprobs = np.where(target, tree.path_logprobs(row["node_id"])[:num_tokens], np.float32(0))
        branches.append(
            TrainingBranch(
                rollout_id=row["rollout_id"],
                group_id=row["group_id"],
                branch=row["branch"],
                role=Role(row["role"]),
                token_ids=ids,
                target=target,
                sampler_logprobs=logprobs,
                weights=weights,
                advantage=row["advantage"],
                temperature=row["temperature"],
                min_version=row["min_version"],
            )
        )
    return branches


def mask_to_runs(mask: BoolMask) -> list[int]:
    """Lengths of alternating runs, False first. Example: [F F T] -> [2, 1]; [T] -> [0, 1]; [] -> []."""
    if not len(mask):
        return []
    edges = np.flatnonzero(np.diff(mask)) + 1
    runs = np.diff(np.concatenate([[0], edges, [len(mask)]])).tolist()
    return [0, *runs] if mask[0] else runs


def runs_to_mask(runs: Sequence[int]) -> BoolMask:
    """The inverse of `mask_to_runs`."""
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).astype(np.bool_)


def _rollout_row(rollout: FinishedRollout) -> dict[str, Any]:
    tree = rollout.trajectory.tree
    return {
        **{name: getattr(rollout.spec, name) for name in _SPEC_FIELDS},
        **{name: getattr(rollout.harness, name) for name in _HARNESS_FIELDS},
        "num_calls": len(rollout.trajectory.calls),
        "num_nodes": len(tree.nodes),
        "unique_tokens": tree.unique_tokens,
        "sampled_tokens": tree.sampled_tokens,
        "counters": list(rollout.trajectory.counters.items()),
        "workspace_ref": rollout.workspace_ref,
    }


def _grade_row(rollout_id: str, grade: Grade) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "outcome": grade.outcome.value,
        "reward": grade.reward,
        "reason": grade.reason,
        "verifier_attempts": grade.verifier_attempts,
        "verifier_s": grade.verifier_s,
        "metrics": list(grade.metrics.items()),
    }


def _grade(row: dict[str, Any]) -> Grade:
    return Grade(
        outcome=Outcome(row["outcome"]),
        reward=row["reward"],
        reason=row["reason"],
        verifier_attempts=row["verifier_attempts"],
        verifier_s=row["verifier_s"],
        metrics=dict(row["metrics"]),
    )


def _nodes_table(nodes: list[tuple[str, TreeNode]]) -> pa.Table:
    schema = SCHEMAS["nodes"]
    spans = [[span_row(span) for span in node.spans] for _id, node in nodes]
    columns = [
        pa.array([rollout_id for rollout_id, _node in nodes], pa.string()),
        pa.array([node.node_id for _id, node in nodes], pa.int32()),
        pa.array([node.parent_id for _id, node in nodes], pa.int32()),
        pa.array([node.call_id for _id, node in nodes], pa.string()),
        pa.array([node.role.value for _id, node in nodes], pa.string()),
        ragged([node.token_ids for _id, node in nodes], np.int32, pa.int32()),
        pa.array([mask_to_runs(node.sampled) for _id, node in nodes], pa.list_(pa.int32())),
        ragged([node.logprobs[node.sampled] for _id, node in nodes], np.float32, pa.float32()),
        pa.array(spans, schema.field("spans").type),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _trees(nodes: pa.Table) -> dict[str, list[TreeNode]]:
    tokens = split_ragged(_one_chunk(nodes, "tokens"), np.int32)
    values = split_ragged(_one_chunk(nodes, "logprobs"), np.float32)
    plain = nodes.select(["rollout_id", "node_id", "parent_id", "call_id", "role", "mask_runs", "spans"]).to_pylist()
    trees: dict[str, list[TreeNode]] = {}
    for row, token_ids, sampled_logprobs in zip(plain, tokens, values, strict=True):
        sampled = runs_to_mask(row["mask_runs"])
        where = f"node {row['node_id']} of {row['rollout_id']}"
        if len(sampled) != len(token_ids) or int(sampled.sum()) != len(sampled_logprobs):
            raise StoreError(
                f"{where}: {len(token_ids)} ids, a mask of {len(sampled)} and {len(sampled_logprobs)} log-probs"
            )
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[sampled] = sampled_logprobs
        for array in (sampled, logprobs):
            array.flags.writeable = False
        trees.setdefault(row["rollout_id"], []).append(
            TreeNode(
                node_id=row["node_id"],
                parent_id=row["parent_id"],
                token_ids=token_ids,
                sampled=sampled,
                logprobs=logprobs,
                spans=tuple(VersionSpan(**span) for span in row["spans"]),
                call_id=row["call_id"],
                role=Role(row["role"]),
            )
        )
    return trees


def _one_chunk(table: pa.Table, name: str) -> pa.ListArray:
    column = table.column(name).combine_chunks()
    return column if isinstance(column, pa.ListArray) else pa.concat_arrays(column.chunks)
