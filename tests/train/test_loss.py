import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.train.loss import gspo, gspo_token, sampler_correction, unit_ratios
from tests.support.losses import loss_rows


def tensors(*columns):
    return [torch.tensor(column, dtype=torch.float32) for column in columns]


def test_gspo_inside_the_clip_gives_numbers_checked_by_hand() -> None:
    # unit 0: differences 0.0002 and 0.0004, mean 0.0003; unit 1: difference -0.0002
    reference, weights, advantages = tensors([-1.0, -2.0, -3.0], [0.5, 0.25, 1.0], [2.0, 2.0, -1.0])
    logprobs = (reference + torch.tensor([0.0002, 0.0004, -0.0002])).requires_grad_()
    units = torch.tensor([0, 0, 1])
    terms = gspo(loss_rows(logprobs, reference, weights, advantages, units, num_units=2))
    first, second = math.exp(0.0003), math.exp(-0.0002)
    assert terms.unit_ratios.tolist() == pytest.approx([first, second], abs=1e-6)
    assert terms.loss.item() == pytest.approx(-(0.75 * first * 2.0 - second * 1.0), abs=1e-6)
    terms.loss.backward()
    # d loss / d logprob_t = -(unit's weight) * A * s / (unit's targets): the same for both rows of unit 0
    expected = [-0.75 * 2 * first / 2, -0.75 * 2 * first / 2, second]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)
    assert (terms.clipped_units, terms.clipped_tokens, terms.dropped_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("shift", "advantage", "value", "clipped"),
    [
        (+0.01, +1.0, -1.0004, True),  # above the range, would be pushed further up: stopped
        (-0.01, -1.0, +0.9997, True),  # below the range, would be pushed further down: stopped
        (+0.01, -1.0, +math.exp(0.01), False),  # above the range, pushed back: free
        (-0.01, +1.0, -math.exp(-0.01), False),
    ],
)
def test_gspo_outside_the_clip_stops_only_the_side_that_goes_further(shift, advantage, value, clipped) -> None:
    reference, weights, advantages = tensors([-1.0, -1.0], [0.5, 0.5], [advantage, advantage])
    logprobs = (reference + shift).requires_grad_()
    terms = gspo(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 0]), num_units=1))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(value, abs=1e-6)
    assert (logprobs.grad == 0).all().item() is clipped
    assert terms.clipped_units == int(clipped)
    assert terms.clipped_tokens == 2 * int(clipped)


def test_gspo_unit_changes_what_is_averaged() -> None:
    reference, weights, advantages = tensors([0.0, 0.0], [0.5, 0.5], [1.0, 1.0])
    logprobs = torch.tensor([0.0003, -0.0003])
    separate = gspo(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 1]), num_units=2))
    together = gspo(loss_rows(logprobs, reference, weights, advantages, torch.tensor([0, 0]), num_units=1))
    assert separate.unit_ratios.tolist() == pytest.approx([math.exp(0.0003), math.exp(-0.0003)], abs=1e-7)
    assert together.unit_ratios.tolist() == pytest.approx([1.0], abs=1e-7)


def test_gspo_token_has_gspos_value_and_each_rows_own_gradient() -> None:
    reference, weights, advantages = tensors([-1.0, -2.0, -3.0], [0.5, 0.25, 1.0], [2.0, 2.0, -1.0])
    logprobs = (reference + torch.tensor([0.0002, 0.0004, -0.0002])).requires_grad_()
    units = torch.tensor([0, 0, 1])
    terms = gspo_token(loss_rows(logprobs, reference, weights, advantages, units, num_units=2))
    same = gspo(loss_rows(logprobs.detach(), reference, weights, advantages, units, num_units=2))
    assert terms.loss.item() == pytest.approx(same.loss.item(), abs=1e-7)
    terms.loss.backward()
    first, second = math.exp(0.0003), math.exp(-0.0002)
    # -w * A * s: the row's own weight, not the unit's mean
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 2 * first, -0.25 * 2 * first, second], abs=1e-6)


@settings(max_examples=50)
@given(st.lists(st.floats(-2e-4, 2e-4), min_size=2, max_size=8), st.floats(-2, 2), st.floats(0.01, 1))
def test_gspo_constant_weight_and_advantage_agrees_with_its_token_variant(shifts, advantage, weight) -> None:
    reference = torch.full((len(shifts),), -1.0, dtype=torch.float64)
    units = torch.zeros(len(shifts), dtype=torch.int64)
    grads = []
    for function in (gspo, gspo_token):
        logprobs = (reference + torch.tensor(shifts, dtype=torch.float64)).requires_grad_()
        row = torch.ones_like(reference)
        terms = function(loss_rows(logprobs, reference, weight * row, advantage * row, units, num_units=1))
        terms.loss.backward()
        grads.append(logprobs.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def test_gspo_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    # With s = 1 and equal weights the gradient of each row is -w A: REINFORCE with the group advantage.
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    weights, advantages = tensors([0.25] * 3, [1.5] * 3)
    gspo(
        loss_rows(logprobs, logprobs.detach(), weights, advantages, torch.tensor([0, 0, 0]), num_units=1)
    ).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.375] * 3)


def test_gspo_dropped_rows_are_counted() -> None:
    reference, weights, advantages = tensors([-1.0] * 4, [0.5, 0.0, 0.5, 0.5], [1.0, 1.0, 0.0, -1.0])
    terms = gspo(loss_rows(reference, reference, weights, advantages, torch.tensor([0, 0, 1, 2]), num_units=3))
    assert terms.dropped_tokens == 2


def test_sampler_correction_is_truncated_and_without_gradient() -> None:
    reference = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    correction = sampler_correction(reference, torch.tensor([-1.5, -5.0, -2.0]))
    assert correction.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-1.0)])
    assert not correction.requires_grad


def test_unit_ratios_overflow_is_not_hidden() -> None:
    ratios = unit_ratios(torch.tensor([200.0]), torch.tensor([0.0]), torch.tensor([0]), 1)
    assert not torch.isfinite(ratios).any()
