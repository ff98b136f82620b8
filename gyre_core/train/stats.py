"""What the trainer reports: one record for each micro-step, one for each optimizer step. Plain numbers, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepStats:
    """One forward and backward pass.

    Example: MegatronTrainer.micro_step(packed).clipped_tokens
    """

    loss: float  # sum over the micro-step's rollouts; divide a step's total by its included rollouts
    num_tokens: int  # unique tokens computed
    num_branch_tokens: int  # what a run without prefix sharing computes
    num_targets: int  # loss rows
    num_units: int  # GSPO units
    clipped_units: int
    clipped_tokens: int
    dropped_tokens: int  # targets with weight x advantage = 0: computed, without effect
    kl: float  # k3 divergence from the reference, summed over rollouts like the loss; 0 without a KL term
    weight_sum: float  # of the rows: 1 for each rollout that is wholly in the micro-step
    ratio_min: float  # s_u over units
    ratio_mean: float
    ratio_max: float
    sampler_trainer_max_abs: float  # |trainer - sampler| log-prob over rows, nats
    sampler_trainer_mean_abs: float
    flops: float  # of the model, forward and backward (train/flops.py)
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One optimizer step.

    Example: MegatronTrainer.optimizer_step(num_rollouts=48).grad_norm
    """

    step: int  # optimizer steps done, this one included; skipped steps do not count
    num_rollouts: int  # what the summed gradient was divided by
    num_micro_steps: int
    grad_norm: float  # after the division, before clipping
    learning_rate: float
    gradients_s: float  # of duration_s: gradients summed over ranks, divided and measured
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """A trainer's state beside a checkpoint's.

    Example: MegatronTrainer.compare_checkpoint(folder).max_abs_weights == 0.0
    """

    digest: str  # of the trainer's weights
    checkpoint_digest: str  # of the checkpoint's
    num_weights: int  # tensors
    different_weights: tuple[str, ...]  # by name; equal means equal bits
    max_abs_weights: float  # largest difference of a value
    different_moments: tuple[str, ...]  # AdamW's
    max_abs_moments: float


def combine_stats(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Totals over micro-steps (MicroStepStats as dicts, or totals of this function): counts, losses and seconds are
    summed, extremes kept, means weighted by their counts. No rows give an empty dict.
    """
    total: dict[str, float] = {}
    for name in rows[0] if rows else ():
        values = [float(row[name]) for row in rows]
        if name.endswith(("_max", "_max_abs")):
            total[name] = max(values)
        elif name.endswith("_min"):
            total[name] = min(values)
        elif name.endswith(("_mean", "_mean_abs")):
            counts = [float(row["num_units" if name.startswith("ratio") else "num_targets"]) for row in rows]
            total[name] = sum(v * n for v, n in zip(values, counts, strict=True)) / max(1.0, sum(counts))
        else:
            total[name] = sum(values)
    return total
