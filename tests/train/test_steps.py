"""Micro-steps and optimizer steps: numbers checked by hand, against transformers and torch; what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gyre_core.errors import TrainError
from gyre_core.train.packing import pack_branches
from gyre_core.train.parity import packed_vs_branch_parity
from tests.support.trainers import WIDE_CLIP, on_policy, train
from tests.support.training import make_branch, random_branches


def test_micro_step_gradient_equals_transformers_with_a_hand_written_loss(tiny, make_trainer) -> None:
    _, model = tiny
    trainer = make_trainer(**WIDE_CLIP)
    branches = random_branches(3, num_groups=2, rollouts=2, branches=2, temperature=0.7)
    trainer.micro_step(pack_branches(branches, 10_000)[0])
    ours = trainer.gradients()
    model.zero_grad()
    total = torch.zeros(())
    for branch in branches:
        ids = torch.tensor(branch.token_ids, dtype=torch.int64)
        at = torch.tensor(np.flatnonzero(branch.target))
        logits = model(ids[None]).logits[0] / 0.7
        logprobs = torch.log_softmax(logits[at - 1], -1).gather(-1, ids[at, None])[:, 0]
        ratio = torch.exp((logprobs - torch.tensor(branch.sampler_logprobs)[at]).mean())
        weight = torch.tensor(branch.weights)[at].sum()
        scaled = torch.minimum(ratio * branch.advantage, ratio.clamp(0.1, 10.0) * branch.advantage)
        total = total - weight * scaled
    total.backward()
    for name, parameter in (
        ("decoder.final_layernorm.weight", model.model.norm.weight),
        ("output_layer.weight", model.lm_head.weight),
        ("embedding.word_embeddings.weight", model.model.embed_tokens.weight),
        ("decoder.layers.0.mlp.linear_fc2.weight", model.model.layers[0].mlp.down_proj.weight),
    ):
        apart = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
        assert apart < 1e-4, name
    model.zero_grad()


def test_micro_step_split_and_order_give_the_same_gradient(make_trainer) -> None:
    branches = random_branches(6, num_groups=3)
    gradients = []
    trainer = make_trainer(**WIDE_CLIP)
    for budget, flip in ((10_000, False), (80, False), (80, True)):
        packed = pack_branches(branches, budget)
        for micro_step in packed[::-1] if flip else packed:
            trainer.micro_step(micro_step)
        assert trainer.accumulated_micro_steps == len(packed)
        gradients.append(trainer.gradients())
        trainer.reset_gradients()
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert (other[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_micro_step_stats_say_what_happened(make_trainer) -> None:
    trainer = make_trainer()
    branches = on_policy(trainer, random_branches(0))
    branches[0] = replace(branches[0], sampler_logprobs=np.where(branches[0].target, -9.0, 0).astype(np.float32))
    (packed,) = pack_branches(branches, 10_000)
    stats = trainer.micro_step(packed)
    assert stats.num_tokens < stats.num_branch_tokens == sum(len(branch.token_ids) for branch in branches)
    assert stats.num_targets == sum(int(branch.target.sum()) for branch in branches)
    assert stats.num_units == 12
    assert stats.weight_sum == pytest.approx(6)  # six whole rollouts
    assert stats.clipped_units == (1 if branches[0].advantage > 0 else 0)
    assert stats.ratio_max > 1.1
    assert stats.sampler_trainer_max_abs > 0.1
    # On-policy units contribute -(their weight) x advantage each, the clipped one its bound.
    first = branches[0]
    rest = -sum(float(branch.weights.sum()) * branch.advantage for branch in branches[1:])
    own = stats.ratio_max if first.advantage < 0 else 1.0004
    assert stats.loss == pytest.approx(rest - float(first.weights.sum()) * first.advantage * own, abs=1e-3)


def test_micro_step_burst_start_reference_is_on_policy_and_corrects_the_sampler(make_trainer) -> None:
    trainer = make_trainer(reference="burst_start")
    branches = [make_branch([1, 2, 3, 4], [2, 3], sampler=-30.0, advantage=2.0)]
    stats = trainer.micro_step(pack_branches(branches, 100)[0])
    assert stats.ratio_min == stats.ratio_max == 1.0
    assert stats.loss == pytest.approx(-2.0 * 2.0)  # weight 1, advantage 2, correction capped at 2
    reference = np.array([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 loss rows"):
        trainer.micro_step(pack_branches(branches, 100)[0], reference)


def test_optimizer_step_equals_torch_adamw_on_the_divided_clipped_gradient(tiny, make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-3, weight_decay=0.1, grad_clip=0.5, **WIDE_CLIP)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.micro_step(pack_branches(random_branches(1), 10_000)[0])
    gradients = {name: gradient / 6 for name, gradient in trainer.gradients().items()}
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values())).item()
    stats = trainer.optimizer_step(6)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5
    copies = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    for name, copy in copies.items():
        copy.grad = gradients[name] * (0.5 / norm)
    torch.optim.AdamW(
        [
            {"params": [copy for copy in copies.values() if copy.dim() > 1], "weight_decay": 0.1},
            {"params": [copy for copy in copies.values() if copy.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.98),
    ).step()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, copies[name], atol=2e-6), name
        assert not torch.equal(parameter, before[name])


def test_optimizer_step_learning_rate_zero_changes_no_bit(make_trainer) -> None:
    trainer = make_trainer(learning_rate=0.0, weight_decay=0.1, **WIDE_CLIP)
    before = trainer.weights_digest()
    train(trainer, random_branches(0), 2)
    assert trainer.step == 2
    assert trainer.weights_digest() == before


def test_optimizer_step_given_learning_rate_holds_for_that_step_alone(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    before = trainer.weights_digest()
    for packed in pack_branches(random_branches(0), 4096):
        trainer.micro_step(packed)
    stats = trainer.optimizer_step(4, learning_rate=0.0)
    assert (stats.learning_rate, trainer.weights_digest()) == (0.0, before)
    train(trainer, random_branches(0), 1)
    assert trainer.weights_digest() != before


def test_training_same_inputs_give_same_bits_and_other_seeds_do_not_matter(make_trainer) -> None:
    digests = set()
    for seed in (0, 1):
        trainer = make_trainer(seed=seed, learning_rate=1e-2, **WIDE_CLIP)
        train(trainer, random_branches(0), 2, budget=90)
        digests.add(trainer.weights_digest())
    assert len(digests) == 1  # nothing is drawn at random in a step


def test_micro_step_raises_the_probability_of_what_was_good(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    good = make_branch([1, 2, 3, 4, 5], [3, 4], rollout_id="good", advantage=1.0)
    bad = make_branch([1, 2, 3, 6, 7], [3, 4], rollout_id="bad", advantage=-1.0)
    before = trainer.logprobs([good, bad])
    train(trainer, on_policy(trainer, [good, bad]), 1)
    after = trainer.logprobs([good, bad])
    assert after[0][3:].sum() > before[0][3:].sum()
    assert after[1][3:].sum() < before[1][3:].sum()


def test_micro_step_non_finite_loss_is_refused_and_changes_nothing(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    good = random_branches(0)
    train(trainer, good, 1)
    before = trainer.weights_digest()
    trainer.micro_step(pack_branches(good, 10_000)[0])
    bad = [replace(b, sampler_logprobs=np.where(b.target, -1e4, 0).astype(np.float32), advantage=-1.0) for b in good]
    with pytest.raises(TrainError, match=r"micro-step refused: its loss is inf.*g0-r0.*dropped"):
        trainer.micro_step(pack_branches(bad, 10_000)[0])
    assert all(not gradient.any() for gradient in trainer.gradients().values())
    with pytest.raises(TrainError, match="no micro-step since the last one"):
        trainer.optimizer_step(6)
    assert trainer.weights_digest() == before
    assert trainer.step == 1
    train(trainer, good, 1)  # and it goes on as if nothing had been
    other = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(other, good, 2)
    assert trainer.weights_digest() == other.weights_digest()


def test_micro_step_non_finite_gradient_is_refused(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    (packed,) = pack_branches(random_branches(0), 10_000)
    before = trainer.weights_digest()
    handle = trainer.model.decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainError, match="its gradient is not finite"):
        trainer.micro_step(packed)
    handle.remove()
    assert trainer.accumulated_micro_steps == 0
    assert trainer.weights_digest() == before


def test_optimizer_step_non_finite_gradient_is_refused(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    before = trainer.weights_digest()
    trainer.micro_step(pack_branches(random_branches(0), 10_000)[0])
    trainer._gradient_buffers()[0][3] = float("inf")  # what a broken transfer of another replica's would do
    with pytest.raises(TrainError, match="optimizer step 1 refused: the gradient is not finite"):
        trainer.optimizer_step(6)
    assert trainer.weights_digest() == before
    assert trainer.step == 0


def test_trainer_bad_arguments_are_refused(make_trainer) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match="token id 64 is outside the vocabulary of 64"):
        trainer.micro_step(pack_branches([make_branch([1, 64], [1])], 10)[0])
    with pytest.raises(ValueError, match="at least one included rollout"):
        trainer.optimizer_step(0)
    trainer.micro_step(pack_branches([make_branch([1, 2], [1])], 10)[0])
    with pytest.raises(TrainError, match="between steps"):
        packed_vs_branch_parity(trainer, random_branches(0))
    trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.logprobs([])
