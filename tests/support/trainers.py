"""What tests do with a Megatron trainer: compare with transformers, make branches on-policy, take steps."""

from dataclasses import replace

import numpy as np
import torch

from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches

WIDE_CLIP = {"clip_low": 0.9, "clip_high": 9.0}


def hf_logprobs(model, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    tokens = torch.tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()


def on_policy(trainer: MegatronTrainer, branches):
    """The branches with the trainer's own log-probs as the sampler's."""
    return [
        replace(branch, sampler_logprobs=np.where(branch.target, own, 0).astype(np.float32))
        for branch, own in zip(branches, trainer.logprobs(branches), strict=True)
    ]


def train(trainer: MegatronTrainer, branches, steps: int, budget: int = 10_000) -> None:
    packed = pack_branches(branches, budget)
    for _ in range(steps):
        for micro_step in packed:
            trainer.micro_step(micro_step)
        trainer.optimizer_step(len({branch.rollout_id for branch in branches}))
