"""The flow's spans: what it measured of a rollout and of a step, as parts of their traces (gyre_core/tracing).

All is recorded when it is over: a flow run that is killed leaves no half span, and one that goes on adds to the traces.
"""

import time
from collections.abc import Iterable, Sequence

from gyre_core.rollout.runner import ExecutedRollout, FinishedRollout
from gyre_core.store import StepRecord
from tasks.context import RunContext
from tasks.trajectories import CompleteGroup


def record_executed(run: RunContext, rollout: ExecutedRollout) -> None:
    """Preparing, the harness, fetching what the proxy recorded."""
    if not run.tracing.enabled:
        return
    parent, harness, times = run.tracing.rollout(rollout.spec.rollout_id), rollout.harness, rollout.times
    begin_s, end_s = harness.started_s, harness.finished_s
    about: dict[str, str | int | bool] = {
        "gyre.harness": run.config.rollout.harness.name,
        "gyre.timed_out": harness.timed_out,
    }
    if harness.exit_code is not None:
        about["gyre.exit_code"] = harness.exit_code
    run.tracing.record("prepare", begin_s - times.prepare_s, begin_s, parent=parent)
    run.tracing.record("harness", begin_s, end_s, about, parent=parent, error=rollout.failure or harness.error)
    run.tracing.record(
        "seal", end_s, end_s + times.seal_s, {"gyre.calls": len(rollout.trajectory.calls)}, parent=parent
    )


def record_graded(run: RunContext, rollout: FinishedRollout, started_s: float) -> None:
    """Grading, which began at `started_s`, and with it the rollout as a whole."""
    if not run.tracing.enabled:
        return
    spec, grade, ended_s = rollout.spec, rollout.grade, time.time()
    verdict: dict[str, str | float] = {"gyre.outcome": grade.outcome.value}
    if grade.reward is not None:
        verdict["gyre.reward"] = grade.reward
    excluded = grade.reason if grade.reward is None else ""
    run.tracing.record(
        "grade", started_s, ended_s, verdict, parent=run.tracing.rollout(spec.rollout_id), error=excluded
    )
    about = {
        "gyre.rollout": spec.rollout_id,
        "gyre.group": spec.group_id,
        "gyre.problem": spec.problem_id,
        "gyre.step": spec.step,
        "gyre.policy_version": spec.dispatch_version,
        "gyre.calls": len(rollout.trajectory.calls),
        "gyre.sampled_tokens": rollout.trajectory.tree.sampled_tokens,
        **verdict,
    }
    begin_s = rollout.harness.started_s - rollout.times.prepare_s
    run.tracing.record_rollout(spec.rollout_id, begin_s, ended_s, about, error=excluded)


def record_trained(run: RunContext, step: int, handed: Iterable[tuple[CompleteGroup, float]], ended_s: float) -> None:
    """From a group's hand-over to training until its optimizer step, for each rollout that has branches in it."""
    if not run.tracing.enabled:
        return
    for group, handed_s in handed:
        for rollout_id in dict.fromkeys(branch.rollout_id for branch in group.branches):
            run.tracing.record(
                "train",
                handed_s,
                ended_s,
                {"gyre.step": step, "gyre.group": group.group_id},
                parent=run.tracing.rollout(rollout_id),
            )


def record_step(run: RunContext, record: StepRecord, groups: Sequence[CompleteGroup], started_s: float) -> None:
    """A committed step, which began at `started_s`, and what it did one after the other."""
    if not run.tracing.enabled:
        return
    stats, parent, end_s = record.stats, run.tracing.step(record.step), time.time()
    collected_s = started_s + float(stats["rollout_s"])
    trained_s = collected_s + float(stats["train_tail_s"])
    run.tracing.record("rollouts", started_s, collected_s, {"gyre.groups": len(groups)}, parent=parent)
    run.tracing.record("train tail", collected_s, trained_s, parent=parent)
    run.tracing.record("publish and commit", trained_s, end_s, parent=parent)
    about = {
        "gyre.step": record.step,
        "gyre.policy_version": record.version_after,
        "gyre.groups_trained": len(record.groups_trained),
        "gyre.groups_dropped": len(record.groups_dropped),
        "gyre.reward_mean": float(stats["reward_mean"]),
    }
    run.tracing.record_step(record.step, started_s, end_s, about)
