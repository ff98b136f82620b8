"""Policy losses as pure functions of log-probs: torch tensors in, a differentiable sum and counts out.

Legend: R loss rows (one for each trained target), U units. Log-probs are in nats at the sampling temperature, fp32.
The two-level mean (trajectories.md section 7) is in the row weights, which sum to 1 over a rollout's targets, so a
loss here is the *sum over the rollouts* of a micro-step; the optimizer step divides once by the included rollouts.
Results are therefore independent of packing, of the order of micro-steps and of the number of cells.

All losses have one signature, so that a setting picks one (`policy_loss`). They differ in the ratio (of a unit or of a
token), and in what happens where the ratio leaves its range: the min of two terms stops the gradient (GSPO, GRPO), a
capped weight keeps it (CISPO), or there is no ratio at all (plain policy gradient).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossName = Literal["gspo", "gspo_token", "grpo", "cispo", "policy_gradient"]

# Cap of the truncated importance weight between sampler and reference, "C" in Yao et al. 2025, "Your efficient RL
# framework secretly brings you off-policy RL training"; 2 is the value of their experiments.
SAMPLER_CORRECTION_CAP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """What a loss is of. All tensors are [R]; only `logprobs` may carry a gradient.

    Example: LossRows(logprobs=l, reference=r, weights=w, advantages=a, units=u, num_units=3)
    """

    logprobs: Tensor  # the trainer's, of the trained targets
    reference: Tensor  # what the ratio is to
    weights: Tensor  # two-level mean: 1 over a rollout's rows
    advantages: Tensor
    units: Tensor  # [0, U): the unit of each row; a unit has all its rows here
    num_units: int  # U


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A loss and what happened in it. Example: gspo(rows).loss.backward()"""

    loss: Tensor  # scalar, differentiable: minus the weighted objective, summed over rollouts
    unit_ratios: Tensor  # [U] s_u, detached; also of losses that do not use it
    clipped_units: int  # units with a clipped row
    clipped_tokens: int  # rows whose gradient the clip stops (GSPO, GRPO) or whose weight it changes (CISPO)
    dropped_tokens: int  # rows that cannot move the weights: weight x advantage = 0 (with a KL term: weight = 0)
    kl_sum: float = 0.0  # sum over rows of weight x k3; 0 without a KL term


def policy_loss(
    name: LossName,
    logprobs: Tensor,
    reference: Tensor,
    weights: Tensor,
    advantages: Tensor,
    units: Tensor,
    *,
    num_units: int,
    clip_low: float,
    clip_high: float,
    kl_coefficient: float = 0.0,
) -> LossTerms:
    """The loss of that name, plus `kl_coefficient` x the weighted k3 estimate of the divergence from `reference`.

    The KL term is weighted like the loss (two-level mean) and does not depend on advantages, so a rollout with
    advantage 0 trains too. Source of its place: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), equation 3; the
    divergence there is from a frozen model, here from the reference that the ratio has.
    """
    rows = LossRows(
        logprobs=logprobs,
        reference=reference,
        weights=weights,
        advantages=advantages,
        units=units,
        num_units=num_units,
    )
    terms = _LOSSES[name](rows, clip_low=clip_low, clip_high=clip_high)
    if kl_coefficient == 0.0:
        return terms
    penalty = (weights * kl_k3(logprobs, reference)).sum()
    return LossTerms(
        loss=terms.loss + kl_coefficient * penalty,
        unit_ratios=terms.unit_ratios,
        clipped_units=terms.clipped_units,
        clipped_tokens=terms.clipped_tokens,
        dropped_tokens=int((weights == 0).sum()),
        kl_sum=float(penalty.detach()),
    )


def unit_ratios(logprobs: Tensor, reference: Tensor, units: Tensor, num_units: int) -> Tensor:
    """GSPO's sequence ratio, [U]: s_u = exp(mean over the unit's rows of (trainer - reference) log-prob).

    `logprobs` and `reference` are [R], `units` [R] with values in [0, U). Each unit must have all its rows here.
    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), equation 7.
    """
    sums = torch.zeros(num_units, dtype=logprobs.dtype, device=logprobs.device)
    sums = sums.index_add(0, units, logprobs - reference)
    counts = torch.bincount(units, minlength=num_units).clamp(min=1)
    return torch.exp(sums / counts)


def gspo(rows: LossRows, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossTerms:
    """GSPO: -sum over rows of w * min(s_u A, clip(s_u, 1 - clip_low, 1 + clip_high) A), with the row's unit's s_u.

    Source: arXiv 2507.18071, equations 5 to 7, with its published clip range as the default; the paper's mean over
    groups and responses is here the two-level mean of the weights.
    """
    ratios = unit_ratios(rows.logprobs, rows.reference, rows.units, rows.num_units)
    return _clipped(rows, ratios[rows.units], ratios, clip_low, clip_high)


def gspo_token(rows: LossRows, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossTerms:
    """GSPO's token variant: the value is s_u, the gradient goes through each row's own log-prob.

    s_t = sg(s_u) * exp(logprob_t - sg(logprob_t)), clipped like in `gspo`. Equal to `gspo` in value always, and in
    gradient when weights and advantage are constant in a unit. Source: arXiv 2507.18071, equations 13 and 14.
    """
    ratios = _detached_ratios(rows)
    row_ratios = ratios[rows.units] * torch.exp(rows.logprobs - rows.logprobs.detach())
    return _clipped(rows, row_ratios, ratios, clip_low, clip_high)


def sampler_correction(reference: Tensor, sampler: Tensor, cap: float = SAMPLER_CORRECTION_CAP) -> Tensor:
    """Truncated importance weights [R], min(exp(reference - sampler), cap), without gradient.

    Multiplies the row weights when the reference is not the sampler itself (`reference = "burst_start"`): rows were
    drawn by the engine, whose log-probs differ from the trainer's by kernels and staleness. Source: Yao et al. 2025.
    """
    return torch.exp(reference.detach() - sampler).clamp(max=cap)


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[R] estimates of KL(trainer || reference) at the sampled tokens: exp(-d) - 1 + d with d = logprob - reference.

    Never negative, unbiased in value for tokens drawn from the trainer's policy; its gradient, 1 - exp(-d) a log-prob,
    pulls a token back to its reference. Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    apart = logprobs - reference
    return torch.expm1(-apart) + apart


def grpo(rows: LossRows, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossTerms:
    """GRPO: -sum over rows of w * min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t the row's own ratio.

    `units` only group the counts. Source: Shao et al. 2024 (arXiv 2402.03300), equation 3, with PPO's range (Schulman
    et al. 2017, arXiv 1707.06347); the mean over a response's tokens is here the two-level mean of the weights.
    """
    row_ratios = torch.exp(rows.logprobs - rows.reference)
    return _clipped(rows, row_ratios, _detached_ratios(rows), clip_low, clip_high)


def cispo(rows: LossRows, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossTerms:
    """CISPO: -sum over rows of w * sg(clip(r_t, 1 - clip_low, 1 + clip_high)) * A * logprob_t.

    The clip bounds a token's importance weight and never stops its gradient. Source: MiniMax 2025, "MiniMax-M1" (arXiv
    2506.13585), equations 4 and 5, which sets no lower bound (clip_low 1: 1 - 1 = 0) and names no upper one; 1 + 4 lies
    in the range whose choice hardly mattered in Khatri et al. 2025, "ScaleRL" (arXiv 2510.13786).
    """
    row_ratios = torch.exp(rows.logprobs.detach() - rows.reference)
    bounded = row_ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(rows.weights * bounded * rows.advantages * rows.logprobs).sum()
    return _terms(rows, loss, bounded != row_ratios, _detached_ratios(rows))


def policy_gradient(rows: LossRows, *, clip_low: float = 0.0, clip_high: float = 0.0) -> LossTerms:
    """REINFORCE with the group advantage: -sum over rows of w * A * logprob_t; `reference` only feeds the statistics.

    Right on-policy only. There is nothing to clip: the range is ignored. Source: Williams 1992, "Simple statistical
    gradient-following algorithms for connectionist reinforcement learning".
    """
    loss = -(rows.weights * rows.advantages * rows.logprobs).sum()
    return _terms(rows, loss, torch.zeros_like(rows.units, dtype=torch.bool), _detached_ratios(rows))


def _detached_ratios(rows: LossRows) -> Tensor:
    return unit_ratios(rows.logprobs.detach(), rows.reference, rows.units, rows.num_units)


def _clipped(rows: LossRows, row_ratios: Tensor, ratios: Tensor, clip_low: float, clip_high: float) -> LossTerms:
    free = row_ratios * rows.advantages
    bounded = row_ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * rows.advantages
    loss = -(rows.weights * torch.minimum(free, bounded)).sum()
    return _terms(rows, loss, (bounded < free).detach(), ratios)


def _terms(rows: LossRows, loss: Tensor, clipped: Tensor, ratios: Tensor) -> LossTerms:
    return LossTerms(
        loss=loss,
        unit_ratios=ratios.detach(),
        clipped_units=int(torch.unique(rows.units[clipped]).numel()),
        clipped_tokens=int(clipped.sum()),
        dropped_tokens=int((rows.weights * rows.advantages == 0).sum()),
    )


_LOSSES: dict[LossName, Callable[..., LossTerms]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "grpo": grpo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
