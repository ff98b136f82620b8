"""Only the positions that a target is predicted from are projected to the vocabulary, and never all at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gyre_core.train.megatron import model as model_module
from gyre_core.train.packing import pack_branches
from tests.support.training import make_branch, write_tiny_qwen3

VOCAB, LENGTH = 3072, 2000


class LargestLogits(TorchDispatchMode):
    """The largest tensor with a vocabulary's width that any operation makes, forward or backward."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCAB:
            self.rows = max(self.rows, out.shape[0])
        return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    write_tiny_qwen3(folder, vocab=VOCAB, layers=1, hidden=32, heads=2, kv_heads=1)
    return folder


def measured(trainer, targets: np.ndarray) -> tuple[int, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    branch = make_branch(rng.integers(0, VOCAB, LENGTH).tolist(), targets.tolist())
    (packed,) = pack_branches([branch], LENGTH)
    with LargestLogits() as largest:
        trainer.micro_step(packed)
    gradients = trainer.gradients()
    trainer.reset_gradients()
    return largest.rows, gradients


def test_logits_exist_at_target_positions_only(wide, make_trainer) -> None:
    trainer = make_trainer(wide, loss="policy_gradient")
    few = np.random.default_rng(1).choice(np.arange(1, LENGTH), LENGTH // 20, replace=False)
    assert measured(trainer, np.sort(few))[0] == LENGTH // 20  # 5 % of the logits: 1.2 MB instead of 24.6 MB
    assert measured(trainer, np.arange(1, LENGTH))[0] == LENGTH - 1


def test_logits_of_many_targets_are_made_in_bounded_chunks_with_the_same_result(
    wide, make_trainer, monkeypatch
) -> None:
    trainer = make_trainer(wide, loss="policy_gradient")
    everywhere = np.arange(1, LENGTH)
    _, whole = measured(trainer, everywhere)
    monkeypatch.setattr(model_module, "_CHUNK_LOGITS", 128 * VOCAB)
    rows, chunked = measured(trainer, everywhere)
    assert rows == 128
    for name, gradient in whole.items():
        assert (chunked[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_logits_of_shared_prefixes_are_made_once(wide, make_trainer) -> None:
    # Four rollouts with the same targets on the same prompt: one row of logits for each shared edge's source.
    trainer = make_trainer(wide, loss="policy_gradient")
    ids = np.random.default_rng(2).integers(0, VOCAB, 200).tolist()
    first = make_branch(ids, list(range(100, 200)))
    branches = [replace(first, rollout_id=f"r{index}") for index in range(4)]
    (packed,) = pack_branches(branches, LENGTH)
    assert packed.rows.num_rows == 400
    with LargestLogits() as largest:
        trainer.micro_step(packed)
    assert largest.rows == 100
