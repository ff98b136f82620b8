"""Tasks that train: micro-steps of a step's groups, then the optimizer step."""

import time
from dataclasses import dataclass, field

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.train.stats import combine_stats
from tasks.context import Box, RunContext
from tasks.trajectories import CompleteGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What one optimizer step did.

    Example: TrainedStep(num_rollouts=48, micro_steps=(...), stats={"grad_norm": 0.3}, groups_trained=("s0000-p01",),
    ...)
    """

    num_rollouts: int  # the outer mean's denominator
    micro_steps: tuple[tuple[tuple[str, int], ...], ...]  # (rollout_id, branch) by micro-step, in order
    stats: dict[str, float] = field(default_factory=dict)
    groups_trained: tuple[str, ...] = ()
    groups_dropped: dict[str, str] = field(default_factory=dict)
    weights_before: str = ""  # digest of the weights that the step started from


@task(name="stream_train", task_run_name="step {step_label} / train", cache_policy=NO_CACHE)
def stream_train(run: RunContext, step_label: int, groups: Box[list[CompleteGroup]]) -> Box[TrainedStep]:
    """Send each group's branches to the cell as micro-steps, then take the optimizer step.

    Every group is trained or dropped with its reason. A group whose members all have advantage 0 is trained: it
    counts in the mean, and its gradient is known to be exactly 0 without computing it. When no group is left the step
    is taken with no gradient at all: the policy version advances, the weights do not change.
    """
    started = time.monotonic()
    cell = run.services.cell
    cell.reset_gradients()
    rows: list[dict[str, float]] = []
    micro_steps: list[tuple[tuple[str, int], ...]] = []
    trained: list[str] = []
    dropped: dict[str, str] = {}
    num_rollouts = 0
    without_signal = 0
    packing_s = 0.0
    for group in sorted(groups.value, key=lambda group: group.group_id):
        if group.dropped_reason is not None:
            dropped[group.group_id] = group.dropped_reason
            continue
        trained.append(group.group_id)
        num_rollouts += group.num_included
        branches = [branch for branch in group.branches if branch.advantage != 0.0]
        if not branches:
            without_signal += 1
            continue
        result = cell.micro_step(branches)
        micro_steps += [tuple((str(rollout_id), int(branch)) for rollout_id, branch in part) for part in result["keys"]]
        rows.append(result["stats"])
        packing_s += float(result.get("packing_s", 0.0))
    if micro_steps:
        step = cell.optimizer_step(num_rollouts=num_rollouts, policy_version=run.cell_version + 1)
    else:
        step = cell.skip_step(policy_version=run.cell_version + 1)
    run.cell_version += 1
    totals = combine_stats(rows)
    stats = {
        **totals,
        "loss": totals.get("loss", 0.0) / max(1, num_rollouts),
        "grad_norm": float(step.get("grad_norm", 0.0)),
        "learning_rate": run.config.train.learning_rate_at(step_label - 1),
        "groups_without_signal": float(without_signal),
        "train_s": time.monotonic() - started,
        "packing_s": packing_s,
        "forward_backward_s": totals.get("duration_s", 0.0),
        "gradients_s": float(step.get("gradients_s", 0.0)),
        "optimizer_s": float(step.get("seconds", 0.0)) - float(step.get("gradients_s", 0.0)),
    }
    return Box(
        TrainedStep(
            num_rollouts=num_rollouts,
            micro_steps=tuple(micro_steps),
            stats=stats,
            groups_trained=tuple(trained),
            groups_dropped=dropped,
            weights_before=str(step.get("weights_before", "")),
        )
    )
