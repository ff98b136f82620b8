"""Which branches of a rollout's tree are trained, and which tokens each of them trains (trajectories.md section 6).

Enters: a tree, the cap J, the order of roles, a random generator. Leaves: branches with disjoint targets.

A target is a sampled token, not first in its path, of a node whose role is in `role_order`; all other tokens are
context. A branch is the path to a node that has targets and below which no other node has any, so it never ends in
context that nobody trains; its role is that node's. Invariants: each target belongs to at most one selected branch;
without a cap every target belongs to exactly one; the same generator gives the same branches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_core.trajectory.tree import NO_PARENT, TrajectoryTree
from gyre_core.types import BoolMask, Role


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelectedBranch:
    """One selected path.

    Example: SelectedBranch(leaf=3, role=Role.MAIN, node_ids=(0, 1, 3), target=np.array([False, True, True]))
    """

    leaf: int  # the path's last node
    role: Role  # of the leaf
    node_ids: tuple[int, ...]  # from the root to the leaf
    target: BoolMask  # [T] over the path's tokens: trained by this branch and by no other


def select_branches(
    tree: TrajectoryTree, *, max_branches: int, role_order: Sequence[Role], rng: np.random.Generator
) -> tuple[SelectedBranch, ...]:
    """At most `max_branches` branches (0: no cap), in the order of their selection.

    Each time, of the first role in `role_order` that has a branch with targets left, one branch is drawn with
    probability proportional to its targets left; every target on its path is then taken. O(nodes) array operations.
    Raises ValueError for a negative cap or a role order with duplicates or Role.AUX.
    """
    if max_branches < 0:
        raise ValueError(f"max_branches must not be negative, it is {max_branches}")
    if Role.AUX in role_order or len(set(role_order)) != len(role_order):
        raise ValueError(f"role_order must name trained roles once each: {[role.value for role in role_order]}")
    targets = _targets_by_node(tree, frozenset(role_order))
    leaves, spans = _target_leaves(tree, targets)
    ranks = np.array([role_order.index(tree.nodes[leaf].role) for leaf in leaves], np.int64)
    left = _targets_on_paths(tree, targets, leaves)
    taken = [False] * len(tree.nodes)
    selected: list[SelectedBranch] = []
    while left.any() and (max_branches == 0 or len(selected) < max_branches):
        candidates = np.flatnonzero((left > 0) & (ranks == ranks[left > 0].min()))
        cumulative = np.cumsum(left[candidates])
        drawn = candidates[np.searchsorted(cumulative, rng.integers(cumulative[-1]), side="right")]
        path = tree.path(leaves[drawn])
        fresh = [node for node in path if not taken[node]]
        for node in fresh:
            taken[node] = True
            first, last = spans[node]
            left[first:last] -= len(targets[node])
        selected.append(
            SelectedBranch(
                leaf=path[-1],
                role=tree.nodes[path[-1]].role,
                node_ids=tuple(path),
                target=_mask(tree, path, frozenset(fresh), targets),
            )
        )
    return tuple(selected)


def count_targets(tree: TrajectoryTree, role_order: Sequence[Role]) -> int:
    """All targets of a tree, each counted once."""
    return sum(len(offsets) for offsets in _targets_by_node(tree, frozenset(role_order)))


def _targets_by_node(tree: TrajectoryTree, roles: frozenset[Role]) -> list[NDArray[np.int64]]:
    """For every node the offsets of its targets."""
    nothing = np.zeros(0, np.int64)
    found = []
    for node in tree.nodes:
        offsets = node.sampled.nonzero()[0] if node.call_id and node.role in roles else nothing
        if node.parent_id == NO_PARENT:
            offsets = offsets[offsets > 0]  # the first token of a path has nothing to be predicted from
        found.append(offsets)
    return found


def _target_leaves(
    tree: TrajectoryTree, targets: Sequence[NDArray[np.int64]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes with targets and none below them, in depth-first order, and for every node which of them lie at or below
    it, as a range of that order.
    """
    num = len(tree.nodes)
    parents = [node.parent_id for node in tree.nodes]  # NO_PARENT is -1, the place behind the last node
    counts = [0] * (num + 1)  # leaves at or below each node
    own = [False] * num
    for node_id in range(num - 1, -1, -1):  # children come after their parents
        if not counts[node_id] and len(targets[node_id]):
            own[node_id], counts[node_id] = True, 1
        counts[parents[node_id]] += counts[node_id]
    firsts = [0] * (num + 1)  # where the next child's leaves begin
    leaves = [0] * counts[NO_PARENT]
    spans = []
    for node_id, parent in enumerate(parents):
        first = firsts[node_id] = firsts[parent]
        firsts[parent] += counts[node_id]
        spans.append((first, firsts[parent]))
        if own[node_id]:
            leaves[first] = node_id
    return leaves, spans


def _targets_on_paths(
    tree: TrajectoryTree, targets: Sequence[NDArray[np.int64]], leaves: Sequence[int]
) -> NDArray[np.int64]:
    totals: list[int] = []
    for node, offsets in zip(tree.nodes, targets, strict=True):
        totals.append(len(offsets) + (totals[node.parent_id] if node.parent_id != NO_PARENT else 0))
    return np.array([totals[leaf] for leaf in leaves], np.int64)


def _mask(
    tree: TrajectoryTree, path: Sequence[int], fresh: frozenset[int], targets: Sequence[NDArray[np.int64]]
) -> BoolMask:
    lengths = [len(tree.nodes[node].token_ids) for node in path]
    mask = np.zeros(sum(lengths), np.bool_)
    start = 0
    for node, length in zip(path, lengths, strict=True):
        if node in fresh:
            mask[start + targets[node]] = True
        start += length
    return mask
