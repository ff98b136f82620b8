"""Tasks that end a step: checkpoint and publication, then the commit that makes the step count."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.replay.section import REPLAY, replay_section
from gyre_core.store import StepRecord
from gyre_core.train.accounting import phase_seconds
from tasks.context import Box, RunContext
from tasks.training import TrainedStep
from tasks.trajectories import CompleteGroup


def checkpoint_path(run: RunContext, policy_version: int) -> Path:
    """Where the state of a policy version lies."""
    return run.folder.checkpoints / f"version-{policy_version:05d}"


def export_path(run: RunContext, policy_version: int) -> Path:
    """Where the Hugging Face export of a policy version lies."""
    return run.folder.exports / f"version-{policy_version:05d}"


@task(name="publish_weights", task_run_name="step {step_label} / publish", cache_policy=NO_CACHE)
def publish_weights(run: RunContext, step_label: int, trained: Box[TrainedStep]) -> Box[dict[str, Any]]:
    """Save the core's state, and meanwhile bring its weights into every engine that serves, verified by checksum.

    Engines of cells that serve already take them one after the other; cells that trained take them on their way back.
    The checkpoint is begun first and waited for last: the files are written while the weights are published (and
    exported), and this task ends, so that the step can be committed, only when they are durable. Once the step is
    committed, a resumed run must find the state that the commit names. Folders of these names are leftovers of a
    process that died before its commit, and are replaced.
    """
    started = time.monotonic()
    fleet = run.services.fleet
    cell = fleet.core
    path = checkpoint_path(run, run.cell_version)
    _remove_leftovers(path)
    saved = cell.save_checkpoint(str(path), _frontier(run, step_label, trained.value))
    published = asdict(fleet.refresh(run.cell_version))
    run.scheduling.burst.trained()  # not before: a cell that returns takes the version that the fleet knows
    export = export_path(run, run.cell_version) if _is_due(run.cell_version, run.config.train.export_every) else None
    if export is not None:
        _remove_leftovers(export)
        cell.export_hf(str(export))
    run.scheduling.wait_returned()
    written = cell.finish_checkpoint()
    fleet.set_checkpoint(path, run.cell_version)
    return Box(
        {
            "checkpoint": path.name,
            "checkpoint_s": saved["seconds"] + written["seconds"],  # what the step stood still for
            "checkpoint_write_s": written["write_s"],
            "checkpoint_bytes": written["bytes"],
            "export": str(export.relative_to(run.folder.path)) if export is not None else "",
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
    step_s: float,
) -> Box[StepRecord]:
    """Record the step in the store: from here on it counts, and a resumed run goes on after it.

    `rollout_s` and `step_s` are what its rollouts took, and all of it until this commit.
    """
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
    seconds = {
        **result.stats,
        "checkpoint_s": report["checkpoint_s"],
        "publication_s": report["publish_s"] - report["checkpoint_s"],
    }
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
            **phase_seconds(seconds, step_s=step_s),
            "step_s": step_s,
            "checkpoint_write_s": report["checkpoint_write_s"],
            "checkpoint_bytes": report["checkpoint_bytes"],
        },
        checkpoint=report["checkpoint"],
        extra={
            "groups": {group.group_id: group.commit_seq for group in groups.value},
            "publish": report["publish"],
            "export": report["export"],
            "decisions": run.scheduling.take_decisions(),
            "account": result.account,
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
    _prune_checkpoints(run)
    return Box(record)


def _prune_checkpoints(run: RunContext) -> None:
    """Keep the newest checkpoints that committed steps name, and those of every `keep_every`-th version."""
    train = run.config.train
    steps = [commit.record for commit in run.store.commits("step")]
    keep = {str(record["checkpoint"]) for record in steps[-train.keep_checkpoints :]}
    keep |= {str(record["checkpoint"]) for record in steps if _is_due(int(record["version_after"]), train.keep_every)}
    for path in sorted(run.folder.checkpoints.glob("version-*")):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _is_due(policy_version: int, every: int) -> bool:
    return every > 0 and policy_version % every == 0


def _remove_leftovers(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _frontier(run: RunContext, step_label: int, trained: TrainedStep) -> dict[str, Any]:
    """What of the run's data this state has consumed: the step's groups, on top of the checkpoint before."""
    return {
        "run": run.folder.run_id,
        "step": step_label - 1,
        "version_before": run.policy_version,
        "seed": run.config.seed,
        "groups_trained": list(trained.groups_trained),
        "groups_dropped": dict(trained.groups_dropped),
        "rollouts": trained.num_rollouts,
        "micro_steps": len(trained.micro_steps),
    }
