"""Tree-packed training against itself without sharing, against dense masks, and against broken packings."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from gyre_core.train.megatron import model as model_module
from gyre_core.train.megatron.attention import SegmentAttention, flex_block_mask, segment_layout
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import PackedMicroStep, pack_branches, pack_for_training
from gyre_core.train.parity import packed_vs_branch_parity
from gyre_core.types import TrainingBranch
from tests.support.trainers import WIDE_CLIP
from tests.support.training import make_branch, random_branches


@pytest.mark.parametrize("seed", range(4))
def test_packed_vs_branch_parity_random_tries_agree(seed, make_trainer) -> None:
    trainer = make_trainer(micro_step_tokens=[10_000, 120][seed % 2])
    report = packed_vs_branch_parity(trainer, random_branches(seed, num_groups=2, rollouts=3, branches=3))
    assert report["packed_tokens"] < 0.8 * report["branch_tokens"]
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5


def test_packed_vs_branch_parity_long_segments_and_deep_trees_agree(make_trainer) -> None:
    # Beyond the padded buckets: segments over 64 tokens, and a caterpillar whose every step forks.
    trainer = make_trainer()
    rng = np.random.default_rng(0)
    long = random_branches(7, num_groups=1, rollouts=3, branches=2, prefix=150, tail=140)
    spine = rng.integers(0, 64, 40).tolist()
    caterpillar = [
        make_branch([*spine[:at], (spine[at] + 1) % 64, 5], [at, at + 1], rollout_id=f"c{at}", group_id="c")
        for at in range(1, 40)
    ]
    report = packed_vs_branch_parity(trainer, long + caterpillar)
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5


def broken_positions(packed: PackedMicroStep) -> PackedMicroStep:
    return replace(packed, position=np.arange(packed.num_tokens))


def broken_ancestors(packed: PackedMicroStep) -> PackedMicroStep:
    """Every segment hangs where its elder sibling ends: siblings see each other."""
    above = packed.segment_parent.copy()
    for segment in range(1, len(above)):
        if above[segment] >= 0:
            above[segment] = segment - 1
    return replace(packed, segment_parent=above)


@pytest.mark.parametrize("breakage", [broken_positions, broken_ancestors])
def test_packed_vs_branch_parity_broken_packing_is_caught(breakage, make_trainer, monkeypatch) -> None:
    trainer = make_trainer()
    branches = random_branches(0)
    original = model_module.forest_of
    monkeypatch.setattr(
        "gyre_core.train.megatron.backend.forest_of",
        lambda packed, device: original(breakage(packed) if len(packed.branches) > 1 else packed, device),
    )
    report = packed_vs_branch_parity(trainer, branches)
    assert report["max_rel_logprob_err"] > 1e-2
    assert report["max_rel_grad_err"] > 1e-2


def test_segment_attention_random_forest_equals_a_dense_mask_and_flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    branches = random_branches(4, num_groups=2, rollouts=3, branches=3, prefix=70, tail=20)
    (packed,) = pack_branches(branches, 10_000)
    layout, num = segment_layout(packed), packed.num_tokens
    assert layout.causal and layout.padded and layout.across
    tensors = [torch.randn(num, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    out_grad = torch.randn(num, 4, 16)
    sees = torch.zeros(num, num, dtype=torch.bool)
    for token in range(num):
        sees[token, torch.from_numpy(packed.path(token))] = True
    results = []
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
    for out in (
        SegmentAttention.apply(*tensors, layout, 0.25),
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=0.25, enable_gqa=True
        )[0].transpose(0, 1),
    ):
        results.append([out.detach(), *torch.autograd.grad(out, tensors, out_grad)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5), (ours - theirs).abs().max()
    with torch.no_grad():  # FlexAttention has no backward pass on CPU
        mask = flex_block_mask(layout, torch.device("cpu"))
        q, k, v = (tensor.detach() for tensor in (query, key, value))
        flex = flex_attention(q, k, v, block_mask=mask, scale=0.25, enable_gqa=True)
        assert isinstance(flex, torch.Tensor)
        flex = flex[0].transpose(0, 1)
    assert torch.allclose(results[0][0], flex, atol=2e-5)


def test_head_logprobs_in_chunks_and_mixed_temperatures_equal_log_softmax(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(model_module, "_CHUNK_LOGITS", 40)  # 4 heads of a vocabulary of 10
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(10, 6, requires_grad=True)
    temperature = torch.tensor([1.0, 0.5] * 5 + [2.0])
    head, token = torch.randint(0, 11, (30,)), torch.randint(0, 10, (30,))
    grad = torch.randn(30)
    ours = model_module.HeadLogProbs.apply(hidden, weight, temperature, head, token)
    plain = torch.log_softmax(hidden @ weight.t() / temperature[:, None], -1)[head, token]
    assert torch.allclose(ours, plain, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight), grad),
        torch.autograd.grad(plain, (hidden, weight), grad),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_micro_step_recompute_gives_the_same_gradients(make_trainer) -> None:
    branches = random_branches(0)
    grads = []
    for recompute in (False, True):
        trainer = make_trainer(recompute=recompute, **WIDE_CLIP)
        trainer.micro_step(pack_branches(branches, 10_000)[0])
        grads.append(trainer.gradients())
    assert all(torch.allclose(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-7) for name in grads[0])


# -- trees larger than a micro-step ------------------------------------------------------------------------------------


def caterpillar(seed: int, branches: int = 24, trunk: int = 60) -> list[TrainingBranch]:
    """One rollout that branches off its trunk all along: a tree several micro-steps large with one long prefix."""
    rng = np.random.default_rng(seed)
    spine = rng.integers(0, 64, trunk)
    made = []
    for index in range(branches):
        cut = int(rng.integers(5, trunk))
        own = rng.integers(0, 64, int(rng.integers(4, 24)))
        ids = np.concatenate([spine[:cut], own])
        targets = range(cut + 1, len(ids))
        made.append(
            make_branch(ids.tolist(), targets, branch=index, advantage=float(rng.normal()), sampler=-4.0, weight=0.01)
        )
    return made


def gradients_of(trainer: MegatronTrainer, steps: Sequence[PackedMicroStep]) -> dict[str, torch.Tensor]:
    for step in steps:
        trainer.micro_step(step)
    found = trainer.gradients()
    trainer.reset_gradients()
    return found


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name] - other).norm() / other.norm()) for name, other in theirs.items())


def cut_prefixes(branches: Sequence[TrainingBranch], tokens: int) -> list[TrainingBranch]:
    """What silent truncation would do: each branch loses its first tokens, all targets stay."""
    return [
        replace(
            branch,
            **{name: getattr(branch, name)[tokens:] for name in ("token_ids", "target", "sampler_logprobs", "weights")},
        )
        for branch in branches
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_micro_step_tree_split_at_branching_points_gives_the_unsplit_gradient(seed, make_trainer) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    branches = caterpillar(seed)
    whole, parts = pack_branches(branches, 10_000), pack_branches(branches, 120)
    assert len(whole) == 1
    assert len(parts) >= 3
    assert sum(part.num_tokens for part in parts) > whole[0].num_tokens  # the shared prefix is computed again
    assert sum(part.num_branch_tokens for part in parts) == whole[0].num_branch_tokens  # and nothing is cut
    unsplit = gradients_of(trainer, whole)
    assert apart(gradients_of(trainer, parts), unsplit) <= 1e-5
    assert apart(gradients_of(trainer, pack_branches(cut_prefixes(branches, 3), 120)), unsplit) > 1e-2


def test_micro_step_one_branch_a_hundred_times_longer_is_trained_whole(make_trainer) -> None:
    trainer = make_trainer(micro_step_tokens=1600, **WIDE_CLIP)
    rng = np.random.default_rng(0)
    short = [make_branch(rng.integers(0, 64, 16).tolist(), [8, 15], rollout_id=f"s{i}", sampler=-4.0) for i in range(6)]
    long = make_branch(rng.integers(0, 64, 1600).tolist(), range(800, 1600), rollout_id="long", sampler=-4.0)
    packed = pack_for_training([*short, long], trainer.config)
    assert [part.num_tokens for part in packed] == [1600, 96]
    together = gradients_of(trainer, packed)
    alone = gradients_of(trainer, [part for one in [*short, long] for part in pack_branches([one], 1600)])
    assert apart(together, alone) <= 1e-5


# -- without sharing ---------------------------------------------------------------------------------------------------


def test_share_prefixes_off_trains_chains_with_the_same_gradient(make_trainer) -> None:
    branches = random_branches(8)
    shared, chained = (make_trainer(share_prefixes=share, **WIDE_CLIP) for share in (True, False))
    packed, chains = (pack_for_training(branches, trainer.config) for trainer in (shared, chained))
    assert all((part.segment_parent < 0).all() for part in chains)
    assert sum(part.num_tokens for part in chains) == sum(len(branch.token_ids) for branch in branches)
    assert sum(part.num_tokens for part in packed) < sum(part.num_tokens for part in chains)
    assert apart(gradients_of(shared, packed), gradients_of(chained, chains)) <= 1e-5
    layout = segment_layout(chains[0])
    assert not layout.across  # nothing attends to another chain
    # Negative control: the comparison sees a branch that is missing.
    assert apart(gradients_of(shared, pack_branches(branches[1:], 10_000)), gradients_of(chained, chains)) > 1e-2
