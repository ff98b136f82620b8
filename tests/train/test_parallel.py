"""A trainer of two processes against one of one: split weights (TP), split micro-steps (DP)."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from gyre_core.config.models import TrainConfig
from gyre_core.errors import ConfigError, TrainError
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches
from gyre_core.train.parallel import ParallelTrainer, open_trainer
from gyre_core.train.parity import CONTROLS, packed_vs_branch_parity
from tests.support.models import write_model
from tests.support.training import random_branches

SETTINGS = {"loss": "grpo", "clip_low": 0.9, "clip_high": 9.0, "learning_rate": 1e-3, "threads": 1}


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / second.norm().clamp(min=1e-12))


@pytest.fixture(scope="module", params=["tp2", "tp2-tied", "tp2-llama", "dp2"])
def pair(request, tmp_path_factory) -> Iterator[tuple[ParallelTrainer, MegatronTrainer, Path]]:
    """The same model in two processes and in one. Each test leaves both with the same weights and no gradient."""
    layout, _, variant = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    tied = {"tie_word_embeddings": True} if variant == "tied" else {}
    write_model(folder, "llama" if variant == "llama" else "qwen3", **tied)
    split = {"tensor_parallel": 2} if layout == "tp2" else {"data_parallel": 2}
    several = open_trainer(folder, TrainConfig(**SETTINGS, **split))
    one = open_trainer(folder, TrainConfig(**SETTINGS))
    assert isinstance(several, ParallelTrainer) and isinstance(one, MegatronTrainer)
    yield several, one, folder
    several.close()
    one.close()


def test_parallel_weights_and_log_probs_equal_one_process(pair) -> None:
    several, one, folder = pair
    assert several.weights_digest() == one.weights_digest()
    exported, original = dict(several.export_hf()), load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    branches = random_branches(0, temperature=0.7)
    for ours, theirs in zip(several.logprobs(branches), one.logprobs(branches), strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


def test_parallel_gradients_equal_one_process(pair) -> None:
    several, one, _ = pair
    packed = pack_branches(random_branches(1, num_groups=3), 150)
    assert len(packed) >= 3
    theirs = [one.micro_step(part) for part in packed]
    ours = several.micro_steps(packed)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.num_tokens, mine.clipped_tokens, mine.num_units) == (
            other.num_tokens,
            other.clipped_tokens,
            other.num_units,
        )
        assert mine.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-5)
    assert several.accumulated_micro_steps == one.accumulated_micro_steps == len(packed)
    gradients, expected = several.gradients(), one.gradients()
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(gradients[name], gradient) <= 1e-5, name
    several.reset_gradients()
    one.reset_gradients()
    assert not any(gradient.any() for gradient in several.gradients().values())


def test_parallel_packed_equals_branch_by_branch_and_broken_packings_are_caught(pair) -> None:
    report = packed_vs_branch_parity(pair[0], random_branches(4), controls=CONTROLS)
    assert report["packed_tokens"] < report["branch_tokens"]
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5
    for control in report["controls"].values():
        assert control["max_rel_grad_err"] > 1e-2
        assert control["max_abs_logprob_err"] > 1e-2


def test_parallel_training_equals_one_process_and_checkpoints_go_both_ways(pair, tmp_path) -> None:
    several, one, _ = pair
    several.save_checkpoint(tmp_path / "first", {"by": "several"})
    packed = pack_branches(random_branches(2, num_groups=2), 200)
    for _ in range(2):
        for part in packed:
            one.micro_step(part)
        several.micro_steps(packed)
        mine, other = several.optimizer_step(6), one.optimizer_step(6)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (mine.step, mine.num_micro_steps) == (other.step, other.num_micro_steps)
    branches = random_branches(3)
    for ours, theirs in zip(several.logprobs(branches), one.logprobs(branches), strict=True):
        assert np.abs(ours - theirs).max() <= 2e-4 * max(1.0, np.abs(theirs).max())  # Adam amplifies rounding at zero
    assert one.load_checkpoint(tmp_path / "first") == {"by": "several"}
    assert several.load_checkpoint(tmp_path / "first") == {"by": "several"}
    assert (several.step, one.step) == (0, 0)
    assert several.weights_digest() == one.weights_digest()


def test_parallel_refused_micro_step_drops_gradients_everywhere_and_goes_on(pair) -> None:
    several, _, _ = pair
    good = random_branches(0)
    bad = [replace(b, sampler_logprobs=np.where(b.target, -1e4, 0).astype(np.float32), advantage=-1.0) for b in good]
    several.micro_steps(pack_branches(good, 150))
    with pytest.raises(TrainError, match="micro-step refused: its loss is inf"):
        several.micro_step(pack_branches(bad, 10_000)[0])
    assert several.accumulated_micro_steps == 0
    assert not any(gradient.any() for gradient in several.gradients().values())
    with pytest.raises(TrainError, match="no micro-step since the last one"):
        several.optimizer_step(6)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        several.logprobs([replace(good[0], token_ids=good[0].token_ids + 1000)])
    assert len(several.logprobs(good)) == len(good)


def test_parallel_lost_rank_breaks_the_trainer_at_once(tmp_path) -> None:
    write_model(tmp_path, "qwen3")
    trainer = ParallelTrainer(tmp_path, TrainConfig(tensor_parallel=2, threads=1))
    try:
        os.kill(trainer.pids()[1], signal.SIGKILL)
        with pytest.raises(TrainError, match=r"a rank of it is gone .*start the trainer anew from a checkpoint"):
            trainer.logprobs(random_branches(0))
        with pytest.raises(RuntimeError, match="cannot be used"):
            trainer.weights_digest()
    finally:
        pids = trainer.pids()
        trainer.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_parallel_rank_that_fails_alone_does_not_leave_the_others_waiting(tmp_path, monkeypatch) -> None:
    write_model(tmp_path, "qwen3")
    monkeypatch.setattr("gyre_core.train.parallel._AFTER_ERROR_S", 0.5)
    trainer = ParallelTrainer(tmp_path, TrainConfig(tensor_parallel=2, threads=1))
    try:
        (packed,) = pack_branches(random_branches(0), 10_000)
        unlike = replace(packed, token_ids=packed.token_ids + 1000)  # refused by rank 1 before any collective
        with pytest.raises(
            TrainError, match=r"ranks \[0\] did not answer micro_steps in time; another failed: token id"
        ):
            trainer._call("micro_steps", each=[[(packed, None)], [(unlike, None)]])
    finally:
        trainer.close()


def test_parallel_model_that_cannot_be_split_is_a_config_error(tmp_path) -> None:
    write_model(tmp_path, "qwen3", vocab_size=63)
    with pytest.raises(ConfigError, match=r"does not divide the model's vocab_size \(63\)"):
        ParallelTrainer(tmp_path, TrainConfig(tensor_parallel=2, threads=1))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("pipeline_parallel", "forests of unequal shape"),
        ("expert_parallel", "which tree packing does not split"),
        ("context_parallel", "needs all ancestors of a token in one process"),
    ],
)
def test_train_config_unsupported_parallelism_is_refused_with_its_reason(key, reason) -> None:
    assert getattr(TrainConfig(**{key: 1}), key) == 1
    with pytest.raises(ValidationError, match=rf"train\.{key} must be 1: .*{reason}"):
        TrainConfig(**{key: 2})
