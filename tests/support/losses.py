"""Rows of losses from tensors in the order that formulas name them."""

from torch import Tensor

from gyre_core.train.loss import LossRows


def loss_rows(
    logprobs: Tensor, reference: Tensor, weights: Tensor, advantages: Tensor, units: Tensor, *, num_units: int
) -> LossRows:
    """Example: gspo(loss_rows(logprobs, reference, weights, advantages, units, num_units=2)).loss.backward()"""
    return LossRows(
        logprobs=logprobs,
        reference=reference,
        weights=weights,
        advantages=advantages,
        units=units,
        num_units=num_units,
    )
