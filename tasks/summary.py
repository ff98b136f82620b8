"""What a run reports of itself: per step, per evaluation, and the totals; all read from the store, so that a resumed
run
reports what the whole run did.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gyre_core.store import StepRecord
from gyre_core.train.accounting import flops_per_s, phase_shares
from gyre_core.types import Outcome
from tasks.alerts import warn_of_evaluations, warn_of_outcomes
from tasks.context import RunContext
from tasks.pages import show_rollouts
from tasks.trajectories import CompleteGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One held-out evaluation.

    Example: Evaluation(tag="before", policy_version=0, reward=0.41, num_problems=24, outcomes={"finished": 48})
    """

    tag: str
    policy_version: int
    reward: float | None  # mean over included rollouts; None when there was none
    num_problems: int
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens_sampled: int = 0


def stored_evaluation(run: RunContext, tag: str) -> Evaluation | None:
    """An evaluation that an earlier process of this run committed."""
    for commit in run.store.commits("evaluation"):
        if commit.record["tag"] == tag:
            return Evaluation(**commit.record)
    return None


def report_evaluation(run: RunContext, tag: str, policy_version: int, groups: Sequence[CompleteGroup]) -> Evaluation:
    """Commit an evaluation and show it."""
    rewards = [reward for group in groups for reward in group.rewards]
    outcomes: Counter[str] = Counter()
    for group in groups:
        outcomes.update(group.outcomes)
    result = Evaluation(
        tag=tag,
        policy_version=policy_version,
        reward=sum(rewards) / len(rewards) if rewards else None,
        num_problems=len(groups),
        outcomes=dict(outcomes),
        tokens_sampled=sum(group.tokens_sampled for group in groups),
    )
    run.store.commit("evaluation", {}, asdict(result), f"evaluation-{tag}")
    run.metrics.write(policy_version, {"heldout/reward_mean": float("nan") if result.reward is None else result.reward})
    shown = f"{result.reward:.3f}" if result.reward is not None else "none (no included rollout)"
    run.progress.note(f"held-out reward {tag}: {shown} at version {policy_version} over {len(groups)} problems")
    warn_of_evaluations(run.folder.run_id, run.store)
    _outcome_row(run, f"held-out {tag}", outcomes, [group for group in groups])
    _pictures(run)
    return result


def report_step(run: RunContext, record: StepRecord) -> None:
    """Metrics, progress and artifacts of a committed step."""
    stats = record.stats
    run.metrics.write(
        record.step,
        {
            "reward/mean": stats["reward_mean"],
            "rollout/duration_s": stats["rollout_s"],
            "rollout/tokens_sampled_count": stats["tokens_sampled"],
            "select/tokens_trained_count": stats["tokens_trained"],
            "select/groups_trained_count": len(record.groups_trained),
            "select/groups_dropped_count": len(record.groups_dropped),
            "select/groups_without_signal_count": stats["groups_without_signal"],
            "select/rollouts_dropped_count": len(record.rollouts_dropped),
            "train/loss": stats["loss"],
            "train/grad_norm": stats["grad_norm"],
            "train/learning_rate": stats["learning_rate"],
            "train/duration_s": stats["train_s"],
            "train/clipped_units_count": stats.get("clipped_units", 0.0),
            "train/clipped_tokens_count": stats.get("clipped_tokens", 0.0),
            "train/sampler_trainer_max_abs": stats.get("sampler_trainer_max_abs", 0.0),
            "train/staleness_max_count": stats["staleness_max"],
            "train/flops_per_s": flops_per_s(stats),
            "publish/duration_s": stats["publish_s"],
            "step/duration_s": stats["step_s"],
            **{f"step/{phase}_share": share for phase, share in (phase_shares(stats) or {}).items()},
            **{f"outcome/{outcome.value}_count": record.outcomes.get(outcome.value, 0) for outcome in Outcome},
        },
    )
    run.progress.step_done(
        record.step,
        {
            "reward": float(stats["reward_mean"]),
            "groups": len(record.groups_trained),
            "dropped": len(record.groups_dropped),
            "grad_norm": float(stats["grad_norm"]),
            "staleness": float(stats["staleness_max"]),
            "rollout_s": float(stats["rollout_s"]),
            "train_s": float(stats["train_s"]),
        },
    )
    _outcome_row(
        run, f"step {record.step + 1}", record.outcomes, [], {**record.rollouts_dropped, **record.groups_dropped}
    )
    warn_of_outcomes(run.folder.run_id, record)
    report_totals(run)
    show_rollouts(run, record)


def report_totals(run: RunContext) -> None:
    """Progress bar, step table and pictures, from the store."""
    steps = run.store.read_steps()
    run.reporter.progress(len(steps))
    if steps:
        run.reporter.steps([_step_row(record) for record in steps])
    _pictures(run)


def run_summary(run: RunContext) -> dict[str, Any]:
    """The numbers of the whole run, every process of it included."""
    steps = run.store.read_steps()
    before, after = stored_evaluation(run, "before"), stored_evaluation(run, "after")
    rollouts: Counter[str] = Counter()
    for record in steps:
        rollouts.update(record.outcomes)
    evaluations = [Evaluation(**commit.record) for commit in run.store.commits("evaluation")]
    for evaluation in evaluations:
        rollouts.update(evaluation.outcomes)
    sampled = sum(int(record.stats["tokens_sampled"]) for record in steps)
    return {
        "run": run.folder.run_id,
        "steps": len(steps),
        "heldout_before": _rounded(before),
        "heldout_after": _rounded(after),
        "rollouts": dict(sorted(rollouts.items())),
        "groups_trained": sum(len(record.groups_trained) for record in steps),
        "groups_dropped": sum(len(record.groups_dropped) for record in steps),
        "tokens_sampled": sampled + sum(evaluation.tokens_sampled for evaluation in evaluations),
        "tokens_trained": sum(int(record.stats["tokens_trained"]) for record in steps),
    }


def _rounded(evaluation: Evaluation | None) -> float | None:
    return None if evaluation is None or evaluation.reward is None else round(evaluation.reward, 4)


def _step_row(record: StepRecord) -> dict[str, Any]:
    stats = record.stats
    return {
        "step": record.step + 1,
        "reward": round(float(stats["reward_mean"]), 4),
        "groups trained": len(record.groups_trained),
        "groups dropped": len(record.groups_dropped),
        "tokens sampled": int(stats["tokens_sampled"]),
        "tokens trained": int(stats["tokens_trained"]),
        "grad norm": round(float(stats["grad_norm"]), 4),
        "staleness": int(stats["staleness_max"]),
        "rollout s": round(float(stats["rollout_s"]), 1),
        "train s": round(float(stats["train_s"]), 1),
        "publish s": round(float(stats["publish_s"]), 2),
        "checkpoint": record.checkpoint,
    }


def _outcome_row(
    run: RunContext,
    where: str,
    outcomes: Any,
    groups: Sequence[CompleteGroup],
    reasons: dict[str, str] | None = None,
) -> None:
    reasons = dict(reasons or {})
    for group in groups:
        reasons.update(group.rollouts_dropped)
    told = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())[:3])
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    counts = {outcome.value: outcomes.get(outcome.value, 0) for outcome in Outcome}
    run.outcome_rows.append({"where": where, **counts, "excluded because": told + more})
    run.reporter.outcomes(run.outcome_rows)


def _pictures(run: RunContext) -> None:
    steps = run.store.read_steps()
    evaluations = [Evaluation(**commit.record) for commit in run.store.commits("evaluation")]
    heldout = [(item.policy_version, item.reward) for item in evaluations if item.reward is not None]
    if steps or heldout:
        rewards = [float(record.stats["reward_mean"]) for record in steps]
        run.reporter.reward_curve([record.step for record in steps], rewards, sorted(heldout))
    timeline = run.scheduling.timeline
    if timeline.spans():
        run.reporter.cell_timeline(timeline.spans(), timeline.levels())
