"""Checkpoints: training goes on bit for bit; refusals leave what was there."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches
from tests.support.trainers import WIDE_CLIP, train
from tests.support.training import random_branches, write_tiny_qwen3


def test_checkpoint_resume_in_a_fresh_trainer_continues_bit_for_bit(make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, "weight_decay": 0.01, **WIDE_CLIP}
    branches = random_branches(0)
    straight = make_trainer(**config)
    train(straight, branches, 3, budget=90)
    straight.save_checkpoint(tmp_path / "step-3", {"frontier": ["a", 1]})
    after_three = straight.weights_digest()
    train(straight, branches, 2, budget=90)

    resumed = make_trainer(seed=7, **config)
    train(resumed, random_branches(9), 1)  # other weights, other AdamW state
    assert resumed.load_checkpoint(tmp_path / "step-3") == {"frontier": ["a", 1]}
    assert resumed.step == 3
    assert resumed.weights_digest() == after_three
    train(resumed, branches, 2, budget=90)
    assert resumed.weights_digest() == straight.weights_digest()
    # Negative control: the same weights without AdamW's state end elsewhere.
    straight.load_checkpoint(tmp_path / "step-3")
    for part in straight._optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
    train(straight, branches, 2, budget=90)
    assert straight.weights_digest() != resumed.weights_digest()


def test_checkpoint_resume_in_a_fresh_process_continues_bit_for_bit(tiny, make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, **WIDE_CLIP}
    straight = make_trainer(**config)
    train(straight, random_branches(0), 3)
    straight.save_checkpoint(tmp_path / "step-3", {})
    train(straight, random_branches(0), 2)
    # From standard input on purpose: there is no __main__ file that a helper process could import.
    script = f"""
import sys
from pathlib import Path
from gyre_core.config.models import TrainConfig
from gyre_core.train.megatron.backend import MegatronTrainer
from tests.support.trainers import train
from tests.support.training import random_branches
trainer = MegatronTrainer(Path({str(tiny[0])!r}), TrainConfig(threads=1, **{config!r}), 5)
trainer.load_checkpoint(Path({str(tmp_path / "step-3")!r}))
train(trainer, random_branches(0), 2)
trainer.save_checkpoint(Path({str(tmp_path / "step-5")!r}), {{}})
print(trainer.weights_digest())
trainer.close()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, cwd=root, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == straight.weights_digest()
    assert (tmp_path / "step-5" / "metadata.json").exists()


def test_checkpoint_before_the_first_step_can_be_resumed(make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, **WIDE_CLIP}
    trainer = make_trainer(**config)
    trainer.save_checkpoint(tmp_path / "step-0", {})
    train(trainer, random_branches(0), 2)
    first = trainer.weights_digest()
    trainer.load_checkpoint(tmp_path / "step-0")
    assert trainer.step == 0
    train(trainer, random_branches(0), 2)
    assert trainer.weights_digest() == first


def test_checkpoint_new_learning_rate_wins_over_the_stored_one(make_trainer, tmp_path) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(trainer, random_branches(0), 1)
    trainer.save_checkpoint(tmp_path / "step-1", {})
    frozen = make_trainer(learning_rate=0.0, **WIDE_CLIP)
    frozen.load_checkpoint(tmp_path / "step-1")
    train(frozen, random_branches(0), 1)
    assert frozen.weights_digest() == trainer.weights_digest()


def test_checkpoint_refusals_name_the_folder_and_keep_what_was_there(make_trainer, tied, tmp_path) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    with pytest.raises(TrainError, match="not a complete checkpoint"):
        trainer.load_checkpoint(tmp_path / "nowhere")
    trainer.micro_step(pack_branches(random_branches(0), 10_000)[0])
    with pytest.raises(TrainError, match="in the middle of a step"):
        trainer.save_checkpoint(tmp_path / "half", {})
    trainer.reset_gradients()
    trainer.save_checkpoint(tmp_path / "one", {"n": 1})
    with pytest.raises(TrainError, match="exists already"):
        trainer.save_checkpoint(tmp_path / "one", {"n": 2})
    assert trainer.load_checkpoint(tmp_path / "one") == {"n": 1}
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="could not be written"):
        trainer.save_checkpoint(tmp_path / "file" / "one", {})
    foreign = make_trainer(tied[0])
    with pytest.raises(TrainError, match="could not be read"):
        foreign.load_checkpoint(tmp_path / "one")
    (tmp_path / "one" / "metadata.json").unlink()  # what a kill before the end leaves
    with pytest.raises(TrainError, match=r"no metadata\.json"):
        trainer.load_checkpoint(tmp_path / "one")


def test_trainer_several_one_after_the_other_work_in_one_process(tmp_path) -> None:
    folder = tmp_path / "model"
    write_tiny_qwen3(folder, layers=1)
    results = []
    for _ in range(3):
        trainer = MegatronTrainer(folder, TrainConfig(threads=1))
        results.append(trainer.logprobs(random_branches(0)[:1])[0])
        trainer.close()
        assert not torch.distributed.is_initialized()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
