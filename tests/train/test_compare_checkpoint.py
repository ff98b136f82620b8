"""A trainer's state against a checkpoint's, bit by bit; and what decides the bits beside data and settings."""

from pathlib import Path

import numpy as np
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches
from tests.support.training import random_branches


def step(trainer: MegatronTrainer, seed: int = 1) -> None:
    for packed in pack_branches(random_branches(seed, vocab=50), 10_000):
        trainer.micro_step(packed)
    trainer.optimizer_step(3, 1e-3)


def test_compare_checkpoint_of_the_same_training_finds_nothing_and_of_another_names_it(tiny, tmp_path: Path) -> None:
    config = TrainConfig(threads=1)
    trainer = MegatronTrainer(tiny[0], config, 0)
    try:
        trainer.save_checkpoint(tmp_path / "v0", {})
        step(trainer)
        trainer.save_checkpoint(tmp_path / "v1", {})
        digest = trainer.weights_digest()
        trainer.load_checkpoint(tmp_path / "v0")
        first = trainer.weights_digest()
        step(trainer)
        same = trainer.compare_checkpoint(tmp_path / "v1")
        assert (same.digest, same.checkpoint_digest) == (digest, digest)
        assert (same.different_weights, same.different_moments) == ((), ())
        assert (same.max_abs_weights, same.max_abs_moments) == (0.0, 0.0)
        assert same.num_weights == len(list(trainer.model.named_parameters()))

        name, parameter = next(iter(trainer.model.named_parameters()))
        with torch.no_grad():
            parameter.view(-1)[0] += 0.5
        other = trainer.compare_checkpoint(tmp_path / "v1")
        assert other.different_weights == (name,) and other.different_moments == ()
        assert np.isclose(other.max_abs_weights, 0.5, rtol=1e-5)
        assert trainer.weights_digest() == digest, "the trainer holds the checkpoint's state afterwards"
        assert trainer.compare_checkpoint(tmp_path / "v0").checkpoint_digest == first
    finally:
        trainer.close()


def test_back_end_names_versions_device_and_threads(tiny) -> None:
    trainer = MegatronTrainer(tiny[0], TrainConfig(threads=2), 0)
    try:
        found = trainer.back_end()
    finally:
        trainer.close()
    assert (found["name"], found["threads"], found["torch"]) == ("megatron-core", 2, torch.__version__)
    assert found["megatron_core"].startswith("0.16") and found["processor"]
