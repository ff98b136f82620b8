"""Checkpoints of two tensor-parallel processes, continued by one, and back: the same training goes on."""

import json

import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.checkpoint_manifest import read_manifest
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches
from gyre_core.train.parallel import open_trainer
from tests.support.trainers import WIDE_CLIP
from tests.support.training import random_branches

CONFIG = {"threads": 1, "learning_rate": 1e-2, "weight_decay": 0.01, **WIDE_CLIP}


def take_steps(trainer, steps: int) -> dict[str, torch.Tensor]:
    branches = random_branches(0)
    for _ in range(steps):
        for packed in pack_branches(branches, 90):
            trainer.micro_step(packed)
        trainer.optimizer_step(6)
    return {name: tensor.clone() for name, tensor in trainer.export_hf()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - other).norm() / other.norm()) for name, other in theirs.items())


def test_checkpoint_of_two_tensor_parallel_ranks_goes_on_in_one_process_and_back(tiny, tmp_path) -> None:
    two = open_trainer(tiny[0], TrainConfig(tensor_parallel=2, **CONFIG))
    one = MegatronTrainer(tiny[0], TrainConfig(**CONFIG))
    try:
        saved_weights = take_steps(two, 3)
        two.begin_checkpoint(tmp_path / "tp2", {"groups": ["a"]}, 3)
        saved = two.finish_checkpoint()
        manifest = read_manifest(tmp_path / "tp2")
        assert saved is not None and saved.size_bytes == sum(size for size, _digest in manifest.files.values())
        assert (manifest.tensor_parallel, manifest.world_size, manifest.policy_version) == (2, 2, 3)
        assert manifest.weights_digest == two.weights_digest()

        assert one.load_checkpoint(tmp_path / "tp2") == {"groups": ["a"]}
        assert one.weights_digest() == manifest.weights_digest  # bit for bit
        assert largest_difference(dict(one.export_hf()), saved_weights) == 0.0
        # Not the weights alone: AdamW's moments and its step count came along, so the trajectory is the same.
        straight, resharded = take_steps(two, 2), take_steps(one, 2)
        assert largest_difference(resharded, straight) < 1e-5
        assert largest_difference(straight, saved_weights) > 1e-3

        one.save_checkpoint(tmp_path / "tp1", {})
        digest = one.weights_digest()
        assert read_manifest(tmp_path / "tp1").model == manifest.model
        two.load_checkpoint(tmp_path / "tp1")
        assert two.weights_digest() == digest
        # Negative control: the weights alone, with fresh moments, end elsewhere.
        tree = json.loads((tmp_path / "tp2" / "gyre.json").read_text())
        fresh = MegatronTrainer(tiny[0], TrainConfig(**CONFIG))
        with torch.no_grad():
            one.load_checkpoint(tmp_path / "tp2")
            for ours, theirs in zip(fresh.model.parameters(), one.model.parameters(), strict=True):
                ours.copy_(theirs)
        assert largest_difference(take_steps(fresh, 2), straight) > 1e-3
        fresh.close()

        (tmp_path / "tp2" / "gyre.json").write_text(json.dumps({**tree, "files": {**tree["files"], "x": [1, "0"]}}))
        with pytest.raises(TrainError, match="x is missing"):
            two.load_checkpoint(tmp_path / "tp2")  # every rank says so, none waits for another
        assert two.weights_digest() == digest
    finally:
        two.close()
        one.close()
