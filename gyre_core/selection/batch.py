"""From graded rollouts of one group to the branches a trainer takes (trajectories.md sections 5 to 7).

Enters: members with their trajectories and grades. Leaves: training branches with weights and advantages, and a
reason for everything that is left out. Invariants: the weights of a rollout sum to 1 over its selected targets,
however many branches they are in; an excluded or stale member changes nothing for the others; the order of the
members is irrelevant.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gyre_core.config.models import SelectionConfig
from gyre_core.selection.advantage import group_advantages
from gyre_core.selection.branches import SelectedBranch, select_branches
from gyre_core.selection.staleness import stale_reason
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import Grade, RolloutSpec, TrainingBranch


class GradedRollout(Protocol):
    """A member of a group: a rollout just finished, or one read back from the store."""

    @property
    def spec(self) -> RolloutSpec: ...
    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def grade(self) -> Grade: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupBranches:
    """What one group gives to a step.

    Example: build_branches(members, selection=config.selection, run_seed=0, ...).branches
    """

    group_id: str
    branches: tuple[TrainingBranch, ...]  # by rollout id, then in the order of selection
    advantages: dict[str, float]  # included rollouts
    left_out: dict[str, str]  # excluded and stale rollouts, and why
    dropped_reason: str | None  # why the whole group is not trained
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def num_included(self) -> int:
        """Rollouts that count in the step's outer mean."""
        return len(self.advantages)


def build_branches(
    members: Sequence[GradedRollout],
    *,
    selection: SelectionConfig,
    run_seed: int,
    trainer_version: int,
    max_staleness: int,
    temperature: float,
) -> GroupBranches:
    """The branches of one group. Raises ValueError for members of several groups or a rollout that comes twice."""
    ordered = sorted(members, key=lambda member: member.spec.rollout_id)
    group_ids = {member.spec.group_id for member in ordered}
    if len(group_ids) != 1 or len({member.spec.rollout_id for member in ordered}) != len(ordered):
        raise ValueError(f"expected the members of one group, each once; got groups {sorted(group_ids)}")
    left_out = {}
    rewards: list[float | None] = []
    for member in ordered:
        stale = stale_reason(
            trainer_version=trainer_version,
            dispatch_version=member.spec.dispatch_version,
            max_staleness=max_staleness,
        )
        reward = None if stale else member.grade.reward
        rewards.append(reward)
        if reward is None:
            left_out[member.spec.rollout_id] = stale or f"{member.grade.outcome.value}: {member.grade.reason}"
    group = group_advantages(rewards, min_group=selection.min_group, eps=selection.advantage_eps)
    branches: list[TrainingBranch] = []
    advantages = {}
    for member, included, advantage in zip(ordered, group.included, group.values, strict=True):
        if not included:
            continue
        tree, spec = member.trajectory.tree, member.spec
        advantages[spec.rollout_id] = float(advantage)
        selected = select_branches(
            tree,
            max_branches=selection.max_branches,
            role_order=selection.role_order,
            rng=selection_rng(run_seed, spec.step, spec.rollout_id),
        )
        branches += training_branches(spec, tree, selected, advantage=float(advantage), temperature=temperature)
    return GroupBranches(
        group_id=ordered[0].spec.group_id,
        branches=tuple(branches),
        advantages=advantages,
        left_out=left_out,
        dropped_reason=group.dropped_reason,
        counters={
            "rollouts_included": len(advantages),
            "rollouts_left_out": len(left_out),
            "groups_dropped": int(group.dropped_reason is not None),
            "branches_selected": len(branches),
            "targets_selected": sum(int(branch.target.sum()) for branch in branches),
        },
    )


def training_branches(
    spec: RolloutSpec,
    tree: TrajectoryTree,
    selected: Sequence[SelectedBranch],
    *,
    advantage: float,
    temperature: float,
) -> list[TrainingBranch]:
    """A rollout's selected branches as the trainer takes them; empty when it has no targets.

    Every selected target of the rollout weighs 1 / (their number): the inner mean of the two-level mean.
    """
    num_targets = sum(int(branch.target.sum()) for branch in selected)
    made = []
    for order, branch in enumerate(selected):
        target = branch.target
        made.append(
            TrainingBranch(
                rollout_id=spec.rollout_id,
                group_id=spec.group_id,
                branch=order,
                role=branch.role,
                token_ids=tree.path_tokens(branch.leaf),
                target=target,
                sampler_logprobs=np.where(target, tree.path_logprobs(branch.leaf), 0).astype(np.float32),
                weights=np.where(target, 1.0 / num_targets, 0).astype(np.float32),
                advantage=advantage,
                temperature=temperature,
                min_version=_min_version(tree, branch),
            )
        )
    return made


def selection_rng(run_seed: int, step: int, rollout_id: str) -> np.random.Generator:
    """The generator of one rollout's selection: the same in every process, whatever was selected before."""
    text = "\x1f".join(str(part) for part in (run_seed, "select", step, rollout_id))
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)


def _min_version(tree: TrajectoryTree, branch: SelectedBranch) -> int:
    """The oldest policy version that sampled one of the branch's targets."""
    versions = []
    start = 0
    for node_id in branch.node_ids:
        node = tree.nodes[node_id]
        for span in node.spans:
            if branch.target[start + span.start : start + span.end].any():
                versions.append(span.version)
        start += len(node.token_ids)
    return min(versions)
