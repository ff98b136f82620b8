"""Policy losses as pure functions of log-probs: torch tensors in, a differentiable sum and counts out.

Legend: R loss rows (one for each trained target), U units. Log-probs are in nats at the sampling temperature, fp32.
The two-level mean (trajectories.md section 7) is in the row weights, which sum to 1 over a rollout's targets, so a
loss here is the *sum over the rollouts* of a micro-step; the optimizer step divides once by the included rollouts.
Results are therefore independent of packing, of the order of micro-steps and of the number of cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Cap of the truncated importance weight between sampler and reference, "C" in Yao et al. 2025, "Your efficient RL
# framework secretly brings you off-policy RL training"; 2 is the value of their experiments.
SAMPLER_CORRECTION_CAP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A loss and what happened in it.

    Example: gspo(logprobs, reference, weights, advantages, units, num_units=3).loss.backward()
    """

    loss: Tensor  # scalar, differentiable: minus the weighted objective, summed over rollouts
    unit_ratios: Tensor  # [U] s_u, detached
    clipped_units: int  # units with a clipped row: the clip lowers their objective and stops their gradient
    clipped_tokens: int  # rows of those
    dropped_tokens: int  # rows with weight x advantage = 0: they cannot move the weights


def unit_ratios(logprobs: Tensor, reference: Tensor, units: Tensor, num_units: int) -> Tensor:
    """GSPO's sequence ratio, [U]: s_u = exp(mean over the unit's rows of (trainer - reference) log-prob).

    `logprobs` and `reference` are [R], `units` [R] with values in [0, U). Each unit must have all its rows here.
    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), equation 7.
    """
    sums = torch.zeros(num_units, dtype=logprobs.dtype, device=logprobs.device)
    sums = sums.index_add(0, units, logprobs - reference)
    counts = torch.bincount(units, minlength=num_units).clamp(min=1)
    return torch.exp(sums / counts)


def gspo(
    logprobs: Tensor,
    reference: Tensor,
    weights: Tensor,
    advantages: Tensor,
    units: Tensor,
    *,
    num_units: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """GSPO: -sum over rows of w * min(s_u A, clip(s_u, 1 - clip_low, 1 + clip_high) A), with the row's unit's s_u.

    All tensors are [R]; `reference` carries no gradient. Source: arXiv 2507.18071, equations 5 to 7, with its published
    clip range as the default; the paper's mean over groups and responses is here the two-level mean of the weights.
    """
    ratios = unit_ratios(logprobs, reference, units, num_units)
    return _clipped(ratios[units], ratios, weights, advantages, units, clip_low, clip_high)


def gspo_token(
    logprobs: Tensor,
    reference: Tensor,
    weights: Tensor,
    advantages: Tensor,
    units: Tensor,
    *,
    num_units: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """GSPO's token variant: the value is s_u, the gradient goes through each row's own log-prob.

    s_t = sg(s_u) * exp(logprob_t - sg(logprob_t)), clipped like in `gspo`. Equal to `gspo` in value always, and in
    gradient when weights and advantage are constant in a unit. Source: arXiv 2507.18071, equations 13 and 14.
    """
    ratios = unit_ratios(logprobs.detach(), reference, units, num_units)
    row_ratios = ratios[units] * torch.exp(logprobs - logprobs.detach())
    return _clipped(row_ratios, ratios, weights, advantages, units, clip_low, clip_high)


def sampler_correction(reference: Tensor, sampler: Tensor, cap: float = SAMPLER_CORRECTION_CAP) -> Tensor:
    """Truncated importance weights [R], min(exp(reference - sampler), cap), without gradient.

    Multiplies the row weights when the reference is not the sampler itself (`reference = "burst_start"`): rows were
    drawn by the engine, whose log-probs differ from the trainer's by kernels and staleness. Source: Yao et al. 2025.
    """
    return torch.exp(reference.detach() - sampler).clamp(max=cap)


def _clipped(
    row_ratios: Tensor,
    ratios: Tensor,
    weights: Tensor,
    advantages: Tensor,
    units: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    free = row_ratios * advantages
    bounded = row_ratios.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(weights * torch.minimum(free, bounded)).sum()
    clipped = (bounded < free).detach()
    return LossTerms(
        loss=loss,
        unit_ratios=ratios.detach(),
        clipped_units=int(torch.unique(units[clipped]).numel()),
        clipped_tokens=int(clipped.sum()),
        dropped_tokens=int((weights * advantages == 0).sum()),
    )
