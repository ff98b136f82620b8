"""Each loss against numbers checked by hand, against its formula written naively, and its invariants."""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gyre_core.config.models import CLIP_RANGES, TrainConfig
from gyre_core.train import loss as losses
from gyre_core.train.loss import LossTerms, cispo, grpo, kl_k3, policy_gradient, policy_loss
from gyre_core.train.packing import pack_branches, pack_for_training
from tests.support.losses import loss_rows
from tests.support.trainers import on_policy
from tests.support.training import random_branches

NAMES = ("gspo", "gspo_token", "grpo", "cispo", "policy_gradient")


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def naive(name, logprobs, reference, weights, advantages, units, low, high):
    """The formulas of the papers, row by row, in plain Python over differentiable scalars."""
    total = torch.zeros((), dtype=torch.float64)
    for row, unit in enumerate(units.tolist()):
        mine = [other for other, of in enumerate(units.tolist()) if of == unit]
        ratio = torch.exp(logprobs[row] - reference[row])
        sequence = torch.exp(sum(logprobs[other] - reference[other] for other in mine) / len(mine))
        advantage, weight = advantages[row], weights[row]
        if name == "gspo":
            ratio = sequence
        elif name == "gspo_token":
            ratio = sequence.detach() * logprobs[row].exp() / logprobs[row].exp().detach()
        if name == "policy_gradient":
            total = total - weight * advantage * logprobs[row]
        elif name == "cispo":
            total = total - weight * min(max(ratio.item(), 1 - low), 1 + high) * advantage * logprobs[row]
        else:
            bounded = torch.clamp(ratio, 1 - low, 1 + high)
            total = total - weight * min(ratio * advantage, bounded * advantage)
    return total


def random_rows(seed: int, rows: int = 12, num_units: int = 4, spread: float = 0.5):
    rng = np.random.default_rng(seed)
    units = np.concatenate([np.arange(num_units), rng.integers(0, num_units, rows - num_units)])
    reference = rng.normal(-2.0, 1.0, rows)
    logprobs = reference + rng.normal(0.0, spread, rows)
    weights, advantages = rng.uniform(0.05, 0.5, rows), rng.normal(0.0, 1.0, rows)
    return (*tensors(logprobs, reference, weights, advantages), torch.from_numpy(units))


def run(name, rows, **options) -> tuple[LossTerms, torch.Tensor]:
    logprobs = rows[0].clone().requires_grad_()
    low, high = CLIP_RANGES[name]
    given_options = {"num_units": int(rows[4].max()) + 1, "clip_low": low, "clip_high": high, **options}
    terms = policy_loss(name, logprobs, *rows[1:], **given_options)
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    return terms, gradient


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_grpo_gives_numbers_checked_by_hand() -> None:
    # ratios 1.1 (inside), 1.5 (pushed further: stopped at 1.2), 1.5 with A < 0 (pushed back: free), 0.5 with A < 0
    # (pushed further down: stopped at 0.8)
    ratios = [1.1, 1.5, 1.5, 0.5]
    reference, weights, advantages = tensors([-1.0] * 4, [0.5, 0.25, 0.25, 1.0], [2.0, 2.0, -1.0, -1.0])
    logprobs = (reference + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    terms = grpo(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 0, 1, 2]), num_units=3))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-(0.5 * 1.1 * 2 + 0.25 * 1.2 * 2 - 0.25 * 1.5 - 1.0 * 0.8))
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 2 * 1.1, 0.0, 0.25 * 1.5, 0.0])
    assert (terms.clipped_units, terms.clipped_tokens, terms.dropped_tokens) == (2, 2, 0)
    assert terms.unit_ratios.tolist() == pytest.approx([math.sqrt(1.1 * 1.5), 1.5, 0.5])


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    # ratios 2 (inside 0..5), 8 (capped at 5, gradient goes on), 0.01 (no lower bound by default)
    reference, weights, advantages = tensors([-3.0] * 3, [0.5, 0.25, 0.25], [1.0, -2.0, 1.0])
    logprobs = (reference + torch.tensor([2.0, 8.0, 0.01], dtype=torch.float64).log()).requires_grad_()
    terms = cispo(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 1, 2]), num_units=3))
    terms.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 2, 0.25 * 5 * 2, -0.25 * 0.01])
    expected = -(0.5 * 2 * logprobs[0] - 0.25 * 5 * 2 * logprobs[1] + 0.25 * 0.01 * logprobs[2]).item()
    assert terms.loss.item() == pytest.approx(expected)
    assert (terms.clipped_units, terms.clipped_tokens) == (1, 1)
    bounded = cispo(
        loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 1, 2]), num_units=3),
        clip_low=0.5,
        clip_high=0.5,
    )
    assert (bounded.clipped_units, bounded.clipped_tokens) == (3, 3)


def test_policy_gradient_weights_log_probs_by_advantage_alone() -> None:
    logprobs, reference, weights, advantages = tensors(
        [-1.0, -2.0, -4.0], [-9.0, -9.0, -9.0], [0.5, 0.5, 1.0], [2.0, 2.0, 0.0]
    )
    logprobs.requires_grad_()
    terms = policy_gradient(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 0, 1]), num_units=2))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(0.5 * 2 * 1 + 0.5 * 2 * 2)
    assert logprobs.grad.tolist() == pytest.approx([-1.0, -1.0, 0.0])
    assert (terms.clipped_tokens, terms.dropped_tokens) == (0, 1)


def test_kl_k3_gives_numbers_checked_by_hand() -> None:
    logprobs, reference = tensors([-1.0, -1.0, -2.0], [-1.0, -2.0, -1.0])
    logprobs.requires_grad_()
    values = kl_k3(logprobs, reference)
    assert values.tolist() == pytest.approx([0.0, math.exp(-1) - 1 + 1, math.e - 1 - 1])
    values.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-1), 1 - math.e])


def test_kl_k3_mean_over_samples_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, frozen = (torch.log_softmax(torch.randn(5, generator=generator).double(), 0) for _ in range(2))
    drawn = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    exact = (policy.exp() * (policy - frozen)).sum().item()
    assert kl_k3(policy[drawn], frozen[drawn]).mean().item() == pytest.approx(exact, rel=0.02)


def test_policy_loss_kl_term_is_weighted_like_the_loss_and_trains_without_advantage() -> None:
    logprobs, reference, weights, advantages = tensors(
        [-1.0, -2.0, -2.0], [-2.0, -1.0, -9.0], [0.5, 0.5, 0.0], [0.0] * 3
    )
    units = torch.tensor([0, 0, 0])
    terms, gradient = run("grpo", (logprobs, reference, weights, advantages, units), kl_coefficient=0.1)
    k3 = 0.5 * math.exp(-1) + 0.5 * (math.e - 2)
    assert terms.kl_sum == pytest.approx(k3)
    assert terms.loss.item() == pytest.approx(0.1 * k3)
    assert gradient.tolist() == pytest.approx([0.1 * 0.5 * (1 - math.exp(-1)), 0.1 * 0.5 * (1 - math.e), 0.0])
    assert terms.dropped_tokens == 1  # only weight 0 is without effect now
    assert run("grpo", (logprobs, reference, weights, advantages, units))[0].dropped_tokens == 3


# -- against the formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [2e-4, 0.5, 2.0])  # all inside the range; on both sides; far outside
def test_policy_loss_value_and_gradient_equal_the_formula_written_naively(name, seed, spread) -> None:
    rows = random_rows(seed, spread=spread)
    terms, gradient = run(name, rows)
    logprobs = rows[0].clone().requires_grad_()
    expected = naive(name, logprobs, *rows[1:], *CLIP_RANGES[name])
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    if name not in ("cispo", "policy_gradient"):
        stopped = int((gradient == 0).sum())
        assert stopped == terms.clipped_tokens if name != "gspo" else stopped <= terms.clipped_tokens


@pytest.mark.parametrize("name", NAMES)
def test_policy_loss_on_policy_gradient_is_minus_weight_times_advantage(name) -> None:
    logprobs, _, _, _, _ = random_rows(0)
    even = torch.full_like(logprobs, 0.25)  # GSPO spreads a unit's weight and advantage over its rows
    advantage = torch.full_like(logprobs, 1.5)
    units = torch.arange(len(logprobs)) // 3
    _, gradient = run(name, (logprobs, logprobs.clone(), even, advantage, units))
    assert torch.allclose(gradient, -even * advantage, rtol=1e-12)


# -- invariants --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.sampled_from(NAMES), st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([0.0, 0.3]))
def test_policy_loss_does_not_depend_on_packing_or_order(name, seed, parts, kl_coefficient) -> None:
    rows = random_rows(seed)
    whole, gradient = run(name, rows, kl_coefficient=kl_coefficient)
    rng = np.random.default_rng(seed + 1)
    part_of_unit = rng.integers(0, parts, 4)
    pieces, piece_gradient = [], torch.zeros_like(gradient)
    for part in range(parts):
        index = torch.from_numpy(rng.permutation(np.flatnonzero(part_of_unit[rows[4].numpy()] == part)))
        if not len(index):
            continue
        _, units = torch.unique(rows[4][index], return_inverse=True)
        terms, mine = run(name, (*(column[index] for column in rows[:4]), units), kl_coefficient=kl_coefficient)
        pieces.append(terms)
        piece_gradient[index] = mine
    assert sum(piece.loss.item() for piece in pieces) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(piece_gradient, gradient, rtol=1e-9, atol=1e-12)
    for count in ("clipped_units", "clipped_tokens", "dropped_tokens"):
        assert sum(getattr(piece, count) for piece in pieces) == getattr(whole, count)
    assert sum(piece.kl_sum for piece in pieces) == pytest.approx(whole.kl_sum, rel=1e-9)


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 10_000))
def test_policy_loss_zero_advantage_has_zero_loss_and_gradient(name, seed) -> None:
    logprobs, reference, weights, advantages, units = random_rows(seed)
    terms, gradient = run(name, (logprobs, reference, weights, torch.zeros_like(advantages), units))
    assert terms.loss.item() == 0.0
    assert not gradient.any()
    assert terms.dropped_tokens == len(logprobs)
    assert terms.clipped_tokens == 0 or name == "cispo"  # CISPO counts capped weights, whatever they weigh


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 10_000))
def test_policy_loss_weights_scale_the_gradient(name, seed) -> None:
    logprobs, reference, weights, advantages, units = random_rows(seed)
    _, gradient = run(name, (logprobs, reference, weights, advantages, units))
    _, doubled = run(name, (logprobs, reference, 2 * weights, advantages, units))
    assert torch.allclose(doubled, 2 * gradient, rtol=1e-12)


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_clip_range_defaults_are_the_losss_own(name) -> None:
    parameters = inspect.signature(getattr(losses, name)).parameters
    own = (parameters["clip_low"].default, parameters["clip_high"].default)
    assert TrainConfig(loss=name).clip_range == CLIP_RANGES[name] == own
    if name != "policy_gradient":
        assert TrainConfig(loss=name, clip_high=0.3).clip_range == (own[0], 0.3)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"loss": "policy_gradient", "clip_high": 0.2}, "has no ratio to clip: remove train.clip_low"),
        ({"loss": "grpo", "unit": "rollout"}, "a ratio for each token: remove train.unit"),
        ({"loss": "ppo"}, "Input should be 'gspo'"),
        ({"clip_low": 0.0}, "greater than 0"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"kl_coefficient": -0.1}, "greater than or equal to 0"),
    ],
)
def test_train_config_wrong_loss_settings_are_refused(settings_, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**settings_)


# -- in the trainer ----------------------------------------------------------------------------------------------------


def test_losses_on_policy_all_train_alike(make_trainer) -> None:
    # With ratio 1 and equal weights in a unit every loss has the plain policy gradient.
    branches, gradients = None, {}
    for name in NAMES:
        trainer = make_trainer(loss=name)
        branches = branches or on_policy(trainer, random_branches(0))
        (packed,) = pack_branches(branches, 10_000)
        stats = trainer.micro_step(packed)
        assert (stats.clipped_tokens, stats.kl) == (0, 0.0)
        assert stats.ratio_max == pytest.approx(1.0, abs=1e-5)
        gradients[name] = trainer.gradients()
    for name in NAMES[:-1]:
        for parameter, gradient in gradients["policy_gradient"].items():
            assert (gradients[name][parameter] - gradient).norm() <= 1e-4 * gradient.norm(), (name, parameter)


def test_losses_kl_term_pulls_back_to_the_reference(make_trainer) -> None:
    trainer = make_trainer(loss="grpo", kl_coefficient=1.0, learning_rate=1e-3)
    branches = [replace(branch, advantage=0.0) for branch in random_branches(0)]
    (packed,) = pack_for_training(branches, trainer.config)  # without advantage, and yet there
    kl = []
    for _ in range(3):
        kl.append(trainer.micro_step(packed).kl)
        trainer.optimizer_step(6)
    assert kl[0] > kl[1] > kl[2] > 0
    assert not pack_for_training(branches, make_trainer(loss="grpo").config)
