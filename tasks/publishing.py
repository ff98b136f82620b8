"""Tasks that end a step: checkpoint and publication, then the commit that makes the step count."""

import shutil
import time
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.replay.section import REPLAY, replay_section
from gyre_core.store import StepRecord
from tasks.context import Box, RunContext
from tasks.training import TrainedStep
from tasks.trajectories import CompleteGroup


def checkpoint_path(run: RunContext, policy_version: int) -> Path:
    """Where the state of a policy version lies."""
    return run.folder.checkpoints / f"version-{policy_version:05d}"


@task(name="publish_weights", task_run_name="step {step_label} / publish", cache_policy=NO_CACHE)
def publish_weights(run: RunContext, step_label: int) -> Box[dict[str, Any]]:
    """Save the trainer's state, then bring its weights into the engine and verify them by checksum.

    The checkpoint comes first: once the step is committed, a resumed run must find the state that the commit names. A
    folder of that name is the leftover of a process that died before its commit, and is replaced.
    """
    started = time.monotonic()
    path = checkpoint_path(run, run.cell_version)
    if path.exists():
        shutil.rmtree(path)
    saved = run.services.cell.save_checkpoint(str(path), {"run": run.folder.run_id, "step": step_label - 1})
    published = run.services.cell.publish()
    return Box(
        {
            "checkpoint": path.name,
            "checkpoint_s": saved["seconds"],
            "weights_after": saved.get("weights_digest", ""),
            "back_end": saved.get("back_end", {}),
            "publish": published,
            "publish_s": time.monotonic() - started,
        }
    )


@task(name="commit_step", task_run_name="step {step_label} / commit", cache_policy=NO_CACHE)
def commit_step(
    run: RunContext,
    step_label: int,
    groups: Box[list[CompleteGroup]],
    trained: Box[TrainedStep],
    published: Box[dict[str, Any]],
    rollout_s: float,
) -> Box[StepRecord]:
    """Record the step in the store: from here on it counts, and a resumed run goes on after it."""
    step = step_label - 1
    result = trained.value
    outcomes: dict[str, int] = {}
    rollouts_dropped: dict[str, str] = {}
    for group in groups.value:
        for name, count in group.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
        rollouts_dropped.update(group.rollouts_dropped)
    rewards = [reward for group in groups.value for reward in group.rewards]
    report = published.value
    record = StepRecord(
        step=step,
        version_before=run.policy_version,
        version_after=run.cell_version,
        groups_trained=result.groups_trained,
        groups_dropped=result.groups_dropped,
        rollouts_dropped=rollouts_dropped,
        outcomes=outcomes,
        seeds={"run": run.config.seed},
        micro_steps=result.micro_steps,
        denominators={"rollouts": result.num_rollouts},
        stats={
            **result.stats,
            "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
            "tokens_sampled": sum(group.tokens_sampled for group in groups.value),
            "tokens_unique": sum(group.unique_tokens for group in groups.value),
            "tokens_in_branches": sum(group.branch_tokens for group in groups.value),
            "tokens_trained": result.stats.get("num_targets", 0.0),
            "staleness_max": max((group.staleness_max for group in groups.value), default=0),
            "rollout_s": rollout_s,
            "publish_s": report["publish_s"],
            "checkpoint_s": report["checkpoint_s"],
        },
        checkpoint=report["checkpoint"],
        extra={
            "groups": {group.group_id: group.commit_seq for group in groups.value},
            "publish": report["publish"],
            "decisions": run.decisions,
            "workspaces": {
                "kept": sum(group.workspaces_kept for group in groups.value),
                "dropped": {name: why for group in groups.value for name, why in group.workspaces_dropped.items()},
            },
            REPLAY: replay_section(
                run.config,
                learning_rate=result.stats["learning_rate"],
                weights_before=result.weights_before,
                weights_after=report["weights_after"],
                back_end=report["back_end"],
            ),
        },
    )
    run.store.commit_step(record, token=f"step-{step:06d}")
    run.policy_version = run.cell_version
    run.decisions = []
    _prune_checkpoints(run)
    return Box(record)


def _prune_checkpoints(run: RunContext) -> None:
    """Keep the newest checkpoints that committed steps name."""
    named = [str(commit.record["checkpoint"]) for commit in run.store.commits("step")]
    keep = set(named[-run.config.train.keep_checkpoints :])
    for path in sorted(run.folder.checkpoints.glob("version-*")):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
