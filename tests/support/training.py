"""Training branches by seed or by hand, and a tiny random Qwen3, for tests of packing and the trainer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gyre_core.types import Role, TrainingBranch


def make_branch(
    ids: Sequence[int],
    target: Sequence[int],
    *,
    rollout_id: str = "r0",
    group_id: str = "g0",
    branch: int = 0,
    advantage: float = 1.0,
    temperature: float = 1.0,
    sampler: float = -1.0,
    weight: float | None = None,
) -> TrainingBranch:
    """A branch whose targets are at the given positions, equally weighted (or each with `weight`)."""
    mask = np.zeros(len(ids), bool)
    mask[list(target)] = True
    each = weight if weight is not None else 1.0 / max(1, len(target))
    return TrainingBranch(
        rollout_id=rollout_id,
        group_id=group_id,
        branch=branch,
        role=Role.MAIN,
        token_ids=np.array(ids, np.int32),
        target=mask,
        sampler_logprobs=np.where(mask, sampler, 0.0).astype(np.float32),
        weights=np.where(mask, each, 0.0).astype(np.float32),
        advantage=advantage,
        temperature=temperature,
        min_version=0,
    )


def random_branches(
    seed: int,
    *,
    num_groups: int = 2,
    rollouts: int = 3,
    branches: int = 2,
    vocab: int = 64,
    prefix: int = 12,
    tail: int = 14,
    temperature: float = 1.0,
) -> list[TrainingBranch]:
    """Groups whose rollouts share a prompt, and whose branches share a random part of their rollout; disjoint targets.

    Lengths vary, and now and then a rollout repeats another's first sampled tokens, so edges are shared too.
    """
    rng = np.random.default_rng(seed)
    made = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab, prefix + int(rng.integers(0, 5)))
        trunk: np.ndarray = np.empty(0, np.int64)
        for rollout in range(rollouts):
            common = trunk[: int(rng.integers(0, len(trunk) + 1))]
            trunk = np.concatenate([common, rng.integers(0, vocab, tail)])[: tail + int(rng.integers(0, 6))]
            mine = []
            cut = 0
            for branch in range(branches):
                own = rng.integers(0, vocab, tail // 2 + int(rng.integers(0, 8)))
                ids = np.concatenate([prompt, trunk if branch == 0 else np.concatenate([trunk[:cut], own])])
                target = np.zeros(len(ids), bool)
                first = len(prompt) if branch == 0 else len(prompt) + cut
                target[first:] = rng.random(len(ids) - first) < 0.7
                target[-1] = True
                cut = int(rng.integers(1, len(trunk)))
                mine.append((branch, ids, target))
            total = sum(int(target.sum()) for _, _, target in mine)
            advantage = float(rng.normal())
            for branch, ids, target in mine:
                base = make_branch(
                    ids.tolist(),
                    np.flatnonzero(target).tolist(),
                    rollout_id=f"g{group}-r{rollout}",
                    group_id=f"g{group}",
                    branch=branch,
                    advantage=advantage,
                    temperature=temperature,
                    weight=1.0 / total,
                )
                noise = rng.normal(-4.0, 0.1, len(ids)).astype(np.float32)
                made.append(replace(base, sampler_logprobs=np.where(target, noise, 0.0).astype(np.float32)))
    return made


def write_tiny_qwen3(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    vocab: int = 64,
    hidden: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 80,
):
    """Write a random Qwen3 checkpoint folder with transformers and return the transformers model.

    Weights are scaled up from transformers' initialisation, whose attention is near uniform: with sharp attention a
    wrong position or a wrong ancestor shows.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    return model
