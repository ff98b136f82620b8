"""Are two ways to the same numbers the same? Branches and a trainer in, plain dictionaries of errors out.

`sampler_trainer_parity` is the maths of `gyre bench parity`: the trainer's log-probs of recorded targets against those
the engine sampled with. `packed_vs_branch_parity` compares prefix sharing with one plain causal pass for each branch.
Neither changes weights; the second uses, and clears, the gradient buffer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_core.errors import TrainError
from gyre_core.train.packing import PackedMicroStep, pack_branches
from gyre_core.types import TrainingBranch

if TYPE_CHECKING:
    from gyre_core.train.megatron.backend import MegatronTrainer
    from gyre_core.train.parallel import ParallelTrainer


def sampler_trainer_parity(trainer: "MegatronTrainer", branches: Sequence[TrainingBranch]) -> dict[str, Any]:
    """Absolute differences in nats between trainer and sampler log-probs over all targets.

    Keys: sampler_trainer_max_abs, sampler_trainer_mean_abs, tokens (targets compared), and `worst` (rollout_id, branch,
    position, token_id, sampler, trainer) of the largest one, None without targets. Weights must be those that sampled.
    """
    worst, largest, total, tokens = None, -1.0, 0.0, 0
    for branch, logprobs in zip(branches, trainer.logprobs(branches), strict=True):
        at = np.flatnonzero(branch.target)
        if not len(at):
            continue
        apart = np.abs(logprobs[at].astype(np.float64) - branch.sampler_logprobs[at])
        apart = np.where(np.isnan(apart), np.inf, apart)  # a NaN is the worst difference, not none
        total += float(apart.sum())
        tokens += len(at)
        here = int(apart.argmax())
        if apart[here] > largest:
            largest = float(apart[here])
            worst = {
                "rollout_id": branch.rollout_id,
                "branch": branch.branch,
                "position": int(at[here]),
                "token_id": int(branch.token_ids[at[here]]),
                "sampler": float(branch.sampler_logprobs[at[here]]),
                "trainer": float(logprobs[at[here]]),
            }
    return {
        "sampler_trainer_max_abs": max(largest, 0.0),
        "sampler_trainer_mean_abs": total / tokens if tokens else 0.0,
        "tokens": tokens,
        "worst": worst,
    }


def wrong_positions(packed: PackedMicroStep) -> PackedMicroStep:
    """Negative control: positions count packed tokens instead of depths."""
    return replace(packed, position=np.arange(packed.num_tokens))


def wrong_mask(packed: PackedMicroStep) -> PackedMicroStep:
    """Negative control: every segment hangs where its elder sibling ends, so siblings see each other."""
    above = packed.segment_parent.copy()
    for segment in range(1, len(above)):
        if above[segment] >= 0:
            above[segment] = segment - 1
    return replace(packed, segment_parent=above)


CONTROLS = {"wrong_mask": wrong_mask, "wrong_positions": wrong_positions}


def packed_vs_branch_parity(
    trainer: "MegatronTrainer | ParallelTrainer",
    branches: Sequence[TrainingBranch],
    *,
    controls: Mapping[str, Callable[[PackedMicroStep], PackedMicroStep]] | None = None,
) -> dict[str, Any]:
    """Log-probs and gradients with shared prefixes against a causal pass of its own for each branch.

    Both runs use advantages +1 and -1 in turn and the trainer's own log-probs as the sampler's, so that nothing is
    clipped and every target has a gradient. Keys: max_rel_logprob_err (|a - b| / max(1, |b|) over all positions),
    max_rel_grad_err (largest norm(a - b) / norm(b) over parameters), worst_parameter, packed_tokens, branch_tokens.

    `controls` break the packing on purpose: with them `controls` in the report has, by name, max_rel_grad_err and
    max_abs_logprob_err (nats, over targets) of the broken packing, which must be far from the exact one's.

    Raises TrainError in the middle of a step, whose gradients this would lose.
    """
    if trainer.accumulated_micro_steps:
        raise TrainError("parity uses the gradient buffer: run it between steps")
    alone = [trainer.logprobs([branch], share_prefixes=False)[0] for branch in branches]
    packed = trainer.logprobs(branches)
    logprob_error = max(
        (float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()) for a, b in zip(packed, alone, strict=True)),
        default=0.0,
    )
    comparable = [
        replace(
            branch, sampler_logprobs=np.where(branch.target, own, 0.0).astype(np.float32), advantage=(-1.0) ** index
        )
        for index, (branch, own) in enumerate(zip(branches, alone, strict=True))
    ]
    budget = max([trainer.config.micro_step_tokens, *(len(branch.token_ids) for branch in branches)])
    shared_steps = pack_branches(comparable, budget)
    single_steps = [step for branch in comparable for step in pack_branches([branch], budget, share_prefixes=False)]
    shared, _ = _gradients(trainer, shared_steps)
    single, _ = _gradients(trainer, single_steps)
    largest, worst = _largest_error(shared, single)
    report = {
        "max_rel_logprob_err": logprob_error,
        "max_rel_grad_err": largest,
        "worst_parameter": worst,
        "packed_tokens": sum(step.num_tokens for step in shared_steps),
        "branch_tokens": sum(step.num_tokens for step in single_steps),
    }
    if controls is not None:
        report["controls"] = {}
        for name, broken in controls.items():
            gradients, apart = _gradients(trainer, [broken(step) for step in shared_steps])
            error, _ = _largest_error(gradients, single)
            report["controls"][name] = {"max_rel_grad_err": error, "max_abs_logprob_err": apart}
    return report


def _gradients(
    trainer: "MegatronTrainer | ParallelTrainer", steps: Sequence[PackedMicroStep]
) -> tuple[dict[str, Any], float]:
    """Summed gradients of the steps, and the largest difference to the sampler's log-probs, nats."""
    apart = max((trainer.micro_step(step).sampler_trainer_max_abs for step in steps), default=0.0)
    gradients = trainer.gradients()
    trainer.reset_gradients()
    return gradients, apart


def _largest_error(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[float, str]:
    errors = {name: _relative(first[name], other) for name, other in second.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _relative(first: Any, second: Any) -> float:
    scale = float(second.norm())
    apart = float((first - second).norm())
    return apart / scale if scale else apart
