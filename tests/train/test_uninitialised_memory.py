"""No result depends on what was in memory before: torch fills fresh tensors with NaN, and every bit stays the same."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gyre_core.train.packing import pack_branches
from tests.support.training import random_branches


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def results(trainer) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    # Padded short segments, long ones, and both.
    forests = [random_branches(seed, branches=3, prefix=size, tail=size) for seed, size in enumerate((12, 80, 40))]
    logprobs = [values for branches in forests for values in trainer.logprobs(branches)]
    for branches in forests:
        for packed in pack_branches(branches, 10_000):
            trainer.micro_step(packed)
    gradients = trainer.gradients()
    trainer.reset_gradients()
    return logprobs, gradients


def test_trainer_with_poisoned_memory_gives_the_same_bits(make_trainer, request) -> None:
    trainer = make_trainer(loss="policy_gradient")
    logprobs, gradients = results(trainer)
    request.getfixturevalue("poisoned_memory")
    assert torch.empty(8).isnan().all()
    again, gradients_again = results(trainer)
    assert all(np.array_equal(first, second) for first, second in zip(logprobs, again, strict=True))
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())
