"""A step's rollouts graded again, with the verifier that the problems have now.

Enters: stored rollouts and their archived workspaces. Leaves: grades before and after, and what they would change.
Invariant: only grades can change; trees, tokens and harness results are the stored ones, and nothing is written to
the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_core.config.models import GradingConfig, RolloutConfig
from gyre_core.errors import StoreError
from gyre_core.grading.problems import Problem
from gyre_core.grading.verifier import SandboxRunner
from gyre_core.replay.check import differing_fields
from gyre_core.replay.stored import StoredStep
from gyre_core.rollout.archive import ArchiveError, restore_workspace
from gyre_core.rollout.runner import ExecutedRollout, RolloutTimes, grade_rollout, harness_limit, workspace_of
from gyre_core.rollout.workspace import remove_tree
from gyre_core.store import StoredRollout
from gyre_core.types import GRADED_OUTCOMES, Grade, Json, Outcome

_GRADED_AGAIN = GRADED_OUTCOMES | {Outcome.VERIFIER_FAILED}  # the other outcomes never saw a verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrade:
    """One rollout's grades.

    Example: Regrade(rollout_id="s0000-p1-00", before=old, after=new, stands="")
    """

    rollout_id: str
    before: Grade
    after: Grade
    stands: str  # why it was not graded again, "" when it was


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradeReport:
    """What other grades would change.

    Example: regrade_report(step, regrades).rewards_changed
    """

    regrades: tuple[Regrade, ...]
    rewards_changed: int
    outcomes_changed: int
    advantages_changed: int  # of rollouts; the members of a group move each other
    reward_mean_before: float | None
    reward_mean_after: float | None
    tokens_before: int  # sampled, in the trees
    tokens_after: int
    targets_before: int
    targets_after: int
    branches_changed: int  # other tokens, targets or weights; 0 unless a rollout joins or leaves

    def as_json(self) -> Json:
        rollouts = {
            item.rollout_id: {
                "reward_before": item.before.reward,
                "reward_after": item.after.reward,
                "outcome_before": item.before.outcome.value,
                "outcome_after": item.after.outcome.value,
                "reason": item.stands or item.after.reason,
                "graded_again": not item.stands,
            }
            for item in self.regrades
        }
        names = [name for name in self.__slots__ if name != "regrades"]
        return {
            "graded_again": sum(not item.stands for item in self.regrades),
            **{name: getattr(self, name) for name in names},
            "rewards": rollouts,
        }


def check_workspaces(step: StoredStep) -> None:
    """Raise StoreError when no rollout of the step has a kept workspace."""
    if not any(rollout.workspace_ref for _, rollout in step.rollouts()):
        raise StoreError(
            f"step {step.label} cannot be graded again: none of its workspaces was kept. Train with "
            'grading.keep_workspaces = "graded" (or "all") to keep them in the store, within grading.keep_quota_bytes'
        )


def stands_because(rollout: StoredRollout) -> str:
    """Why a rollout's grade stands whatever the verifier says now, "" when it can be graded again."""
    if rollout.grade.outcome not in _GRADED_AGAIN:
        return f"it was never graded ({rollout.grade.outcome.value})"
    return "" if rollout.workspace_ref else "its workspace was not kept"


async def regrade_rollout(
    rollout: StoredRollout,
    archive: bytes,
    problem: Problem,
    *,
    grading: GradingConfig,
    config: RolloutConfig,
    sandbox: SandboxRunner,
    workdir: Path,
) -> Regrade:
    """Restore a workspace in `workdir` and grade it as a run does; the folder is gone afterwards."""
    remove_tree(workdir)
    try:
        restore_workspace(archive, workspace_of(workdir))
    except ArchiveError as error:
        remove_tree(workdir)
        raise StoreError(f"rollout {rollout.spec.rollout_id}: {error}") from error
    executed = ExecutedRollout(
        spec=rollout.spec,
        harness=rollout.harness,
        trajectory=rollout.trajectory,
        workdir=workdir,
        time_limit=harness_limit(problem, config)[1],
        failure="",
        overall_expired=False,
        times=RolloutTimes(harness_s=rollout.harness.duration_s),
    )
    finished = await grade_rollout(executed, problem, grading=grading, rollout=config, sandbox=sandbox)
    return Regrade(rollout_id=rollout.spec.rollout_id, before=rollout.grade, after=finished.grade, stands="")


def regrade_report(step: StoredStep, regrades: Sequence[Regrade]) -> RegradeReport:
    """What the new grades would change in the step."""
    grades = {item.rollout_id: item.after for item in regrades}
    advantages_changed = branches_changed = targets_after = 0
    for group in step.groups:
        before, after = step.select(group), step.select(group, grades=grades)
        names = before.advantages.keys() | after.advantages.keys()
        advantages_changed += sum(before.advantages.get(name) != after.advantages.get(name) for name in names)
        old = {(branch.rollout_id, branch.branch): branch for branch in before.branches}
        new = {(branch.rollout_id, branch.branch): branch for branch in after.branches}
        targets_after += sum(int(branch.target.sum()) for branch in after.branches)
        branches_changed += sum(
            key not in old or key not in new or bool(set(differing_fields(old[key], new[key])) - {"advantage"})
            for key in old.keys() | new.keys()
        )
    tokens = sum(rollout.trajectory.tree.sampled_tokens for _, rollout in step.rollouts())
    return RegradeReport(
        regrades=tuple(regrades),
        rewards_changed=sum(item.before.reward != item.after.reward for item in regrades),
        outcomes_changed=sum(item.before.outcome != item.after.outcome for item in regrades),
        advantages_changed=advantages_changed,
        reward_mean_before=_mean([item.before.reward for item in regrades]),
        reward_mean_after=_mean([item.after.reward for item in regrades]),
        tokens_before=int(step.record.stats.get("tokens_sampled", tokens)),
        tokens_after=tokens,
        targets_before=sum(int(branch.target.sum()) for group in step.groups for branch in group.branches),
        targets_after=targets_after,
        branches_changed=branches_changed,
    )


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return round(sum(known) / len(known), 6) if known else None
