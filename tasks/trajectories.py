"""Tasks that turn recorded trees into training branches: a check of each tree, then advantage, selection and commit of
each group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rollout.runner import FinishedRollout
from gyre_core.selection.batch import build_branches
from gyre_core.selection.staleness import staleness
from gyre_core.store import StoredRollout
from gyre_core.types import Grade, Outcome, TrainingBranch
from tasks.context import Box, RunContext

GradedRollout = FinishedRollout | StoredRollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessedRollout:
    """A graded rollout whose tree was checked, and what sharing prefixes saves in it.

    Example: ProcessedRollout(rollout=finished, unique_tokens=600, branch_tokens=900, sampled_tokens=120)
    """

    rollout: GradedRollout
    unique_tokens: int  # in the tree
    branch_tokens: int  # summed over its branches
    sampled_tokens: int


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
    unique_tokens: int = 0  # in the members' trees
    branch_tokens: int = 0  # what flat storage of their branches would hold
    staleness_max: int = 0
    commit_seq: int = -1
    workspaces_kept: int = 0  # archived in the store
    workspaces_dropped: dict[str, str] = field(default_factory=dict)  # those that should be, and why they are not


@task(name="process_rollout", task_run_name="{finished.label} / process", cache_policy=NO_CACHE, tags=["process"])
def process_rollout(run: RunContext, finished: Box[FinishedRollout]) -> Box[ProcessedRollout]:
    """Check the rollout's tree and measure it; a tree that breaks its invariants is excluded, never trained on."""
    return Box(_processed(finished.value), label=finished.label)


@task(name="complete_group", task_run_name="{group_id} / complete", cache_policy=NO_CACHE)
def complete_group(run: RunContext, group_id: str, members: Box[list[Box[ProcessedRollout]]]) -> Box[CompleteGroup]:
    """Advantages, selected branches and their weights; the group is committed to the store."""
    processed = sorted((box.value for box in members.value), key=lambda item: item.rollout.spec.member)
    return Box(_completed(run, group_id, processed), label=group_id)


def stored_groups(run: RunContext, step: int) -> dict[str, CompleteGroup]:
    """The groups of a step that an earlier process of this run committed, rebuilt as they were."""
    groups = {}
    oldest = step - run.config.scheduler.staleness
    for commit in run.store.commits("group"):
        if commit.record["step"] == step and commit.record["policy_version"] >= oldest:
            group_id = str(commit.record["group_id"])
            rollouts = run.store.read_rollouts(commit)
            groups[group_id] = _completed(run, group_id, [_processed(rollout) for rollout in rollouts])
    return groups


def _processed(rollout: GradedRollout) -> ProcessedRollout:
    tree = rollout.trajectory.tree
    try:
        tree.validate()
    except ValueError as error:
        grade = Grade(outcome=Outcome.NO_ARTIFACT, reward=None, reason=f"the recorded tree is inconsistent: {error}")
        rollout = replace(rollout, grade=grade)
    return ProcessedRollout(
        rollout=rollout,
        unique_tokens=tree.unique_tokens,
        branch_tokens=sum(len(tree.path_tokens(leaf)) for leaf in tree.leaves()),
        sampled_tokens=tree.sampled_tokens,
    )


def _completed(run: RunContext, group_id: str, processed: Sequence[ProcessedRollout]) -> CompleteGroup:
    """Pure but for the commit, which repeats harmlessly: its token is the group's id."""
    rollouts = [item.rollout for item in processed]
    training = rollouts[0].spec.step >= 0
    temperature = run.config.rollout.temperature if training else run.config.evaluate.temperature
    version = (
        rollouts[0].spec.step if training else run.policy_version
    )  # step s is trained from the weights of version s
    built = build_branches(
        rollouts,
        selection=run.config.selection,
        run_seed=run.config.seed,
        trainer_version=version,
        max_staleness=run.config.scheduler.staleness,
        temperature=temperature,
    )
    branches = built.branches if training else ()
    rewards = [rollout.grade.reward for rollout in rollouts]
    # A rollout that is read back was committed with its reason; the repeated commit below changes nothing.
    reasons = {rollout.spec.rollout_id: getattr(rollout, "workspace_dropped", "") for rollout in rollouts}
    workspaces_dropped = {rollout_id: reason for rollout_id, reason in reasons.items() if reason}
    record = {
        "group_id": group_id,
        "problem_id": rollouts[0].spec.problem_id,
        "step": rollouts[0].spec.step,
        "policy_version": rollouts[0].spec.dispatch_version,
        "temperature": temperature,
        "dropped_reason": built.dropped_reason if training else None,
        "rewards_by_rollout": {rollout.spec.rollout_id: rollout.grade.reward for rollout in rollouts},
        "unique_tokens": sum(item.unique_tokens for item in processed),
        "branch_tokens": sum(item.branch_tokens for item in processed),
        "workspaces_dropped": workspaces_dropped,
    }
    kind = "group" if training else "heldout-group"
    commit = run.store.commit_rollouts(kind, rollouts, branches, record, token=group_id)
    return CompleteGroup(
        group_id=group_id,
        branches=branches,
        rewards=tuple(reward for reward in rewards if reward is not None),
        num_included=built.num_included,
        dropped_reason=built.dropped_reason if training else None,
        rollouts_dropped=built.left_out,
        outcomes=dict(Counter(rollout.grade.outcome.value for rollout in rollouts)),
        tokens_sampled=sum(item.sampled_tokens for item in processed),
        unique_tokens=sum(item.unique_tokens for item in processed),
        branch_tokens=sum(item.branch_tokens for item in processed),
        staleness_max=max(
            staleness(trainer_version=version, dispatch_version=rollout.spec.dispatch_version) for rollout in rollouts
        ),
        commit_seq=commit.seq,
        workspaces_kept=sum(rollout.workspace_ref != "" for rollout in rollouts),
        workspaces_dropped=dict(commit.record.get("workspaces_dropped", {})),
    )
