"""Tasks that turn recorded trees into training branches: selection per rollout, advantage and commit per group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gyre_core.rollout.runner import FinishedRollout
from gyre_core.selection.advantage import group_advantages
from gyre_core.selection.batch import training_branches
from gyre_core.selection.branches import SelectedBranch, select_branches
from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rollout.dispatch import stable_seed
from gyre_core.store import StoredRollout
from gyre_core.types import RolloutSpec, TrainingBranch
from tasks.context import Box, RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRollout:
    """A graded rollout with its selected branches.

    Example: ProcessedRollout(rollout=finished, selected=(branch,))
    """

    rollout: FinishedRollout | StoredRollout
    selected: tuple[SelectedBranch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """A group whose members are all graded, as training and reports need it.

    Example: CompleteGroup(group_id="s0000-t01", num_included=8, branches=(...), commit_seq=3, ...)
    """

    group_id: str
    branches: tuple[TrainingBranch, ...]  # of the included members; empty for a dropped group
    rewards: tuple[float, ...]  # of the included members
    num_included: int
    dropped_reason: str | None
    rollouts_dropped: dict[str, str] = field(default_factory=dict)  # excluded members and why
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens_sampled: int = 0
    staleness_max: int = 0
    commit_seq: int = -1


@task(name="process_rollout", task_run_name="{finished.label} / process", cache_policy=NO_CACHE, tags=["process"])
def process_rollout(run: RunContext, finished: Box[FinishedRollout]) -> Box[ProcessedRollout]:
    """Select at most J branches of the rollout's tree, each target once."""
    return Box(_processed(run, finished.value), label=finished.label)


@task(name="complete_group", task_run_name="{group_id} / complete", cache_policy=NO_CACHE)
def complete_group(run: RunContext, group_id: str, members: Box[list[Box[ProcessedRollout]]]) -> Box[CompleteGroup]:
    """Advantages over the included members; the group's rollouts and branches are committed to the store."""
    processed = sorted((box.value for box in members.value), key=lambda item: item.rollout.spec.member)
    return Box(_completed(run, group_id, processed), label=group_id)


def stored_groups(run: RunContext, step: int) -> dict[str, CompleteGroup]:
    """The groups of a step that an earlier process of this run committed, rebuilt as they were."""
    groups = {}
    for commit in run.store.commits("group"):
        if commit.record["step"] == step and commit.record["policy_version"] == run.policy_version:
            processed = [_processed(run, rollout) for rollout in run.store.read_rollouts(commit)]
            group_id = str(commit.record["group_id"])
            groups[group_id] = _completed(run, group_id, processed)
    return groups


def _processed(run: RunContext, rollout: FinishedRollout | StoredRollout) -> ProcessedRollout:
    spec, selection = rollout.spec, run.config.selection
    if not rollout.grade.included:
        return ProcessedRollout(rollout=rollout, selected=())
    selected = select_branches(
        rollout.trajectory.tree,
        max_branches=selection.max_branches,
        role_order=selection.role_order,
        rng=np.random.default_rng(stable_seed(run.config.seed, "select", spec.step, spec.rollout_id)),
    )
    return ProcessedRollout(rollout=rollout, selected=selected)


def _completed(run: RunContext, group_id: str, processed: Sequence[ProcessedRollout]) -> CompleteGroup:
    """Pure but for the commit, which repeats harmlessly: the token is the group's id."""
    selection = run.config.selection
    spec = processed[0].rollout.spec
    rewards = [item.rollout.grade.reward for item in processed]
    advantages = group_advantages(rewards, min_group=selection.min_group, eps=selection.advantage_eps)
    training = spec.step >= 0
    branches: list[TrainingBranch] = []
    if training and advantages.dropped_reason is None:
        for item, advantage in zip(processed, advantages.values, strict=True):
            if item.rollout.grade.included:
                branches += training_branches(
                    item.rollout.spec,
                    item.rollout.trajectory.tree,
                    item.selected,
                    advantage=float(advantage),
                    temperature=run.config.rollout.temperature,
                )
    outcomes = Counter(item.rollout.grade.outcome.value for item in processed)
    excluded = {
        item.rollout.spec.rollout_id: f"{item.rollout.grade.outcome.value}: {item.rollout.grade.reason}"
        for item in processed
        if not item.rollout.grade.included
    }
    included = tuple(reward for reward in rewards if reward is not None)
    tokens_sampled = sum(item.rollout.trajectory.tree.sampled_tokens for item in processed)
    commit = run.store.commit_rollouts(
        "group" if training else "heldout-group",
        [item.rollout for item in processed],
        branches,
        _group_record(run, group_id, spec, processed, advantages.dropped_reason if training else None),
        token=group_id,
    )
    return CompleteGroup(
        group_id=group_id,
        branches=tuple(branches),
        rewards=included,
        num_included=len(included),
        dropped_reason=advantages.dropped_reason if training else None,
        rollouts_dropped=excluded,
        outcomes=dict(outcomes),
        tokens_sampled=tokens_sampled,
        staleness_max=max((run.policy_version - item.rollout.spec.dispatch_version for item in processed), default=0),
        commit_seq=commit.seq,
    )


def _group_record(
    run: RunContext,
    group_id: str,
    spec: RolloutSpec,
    processed: Sequence[ProcessedRollout],
    dropped_reason: str | None,
) -> dict[str, Any]:
    temperature = run.config.rollout.temperature if spec.step >= 0 else run.config.evaluate.temperature
    return {
        "group_id": group_id,
        "problem_id": spec.problem_id,
        "step": spec.step,
        "policy_version": spec.dispatch_version,
        "temperature": temperature,
        "dropped_reason": dropped_reason,
        "rewards_by_rollout": {item.rollout.spec.rollout_id: item.rollout.grade.reward for item in processed},
    }
