"""Checkpoints: training goes on bit for bit; refusals leave what was there."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.checkpoint_manifest import FORMAT, MANIFEST, read_manifest
from gyre_core.train.megatron import checkpoint
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_branches
from tests.support.trainers import WIDE_CLIP, hf_logprobs, train
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
import threading
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
    with pytest.raises(TrainError, match=r"of another model: \S+ is"):
        foreign.load_checkpoint(tmp_path / "one")


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


def test_begin_checkpoint_state_may_change_while_it_is_written(make_trainer, tmp_path) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(trainer, random_branches(0), 1)
    before = trainer.weights_digest()
    written, go = threading.Event(), threading.Event()
    real = checkpoint._write

    def slow(*arguments):
        go.wait(30)
        done = real(*arguments)
        written.set()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_write", slow)
        pending = trainer.begin_checkpoint(tmp_path / "one", {"n": 1}, policy_version=4)
        train(trainer, random_branches(1), 1)  # the step goes on
        assert trainer.weights_digest() != before
        assert not written.is_set()
        assert not (tmp_path / "one").exists()  # not there before it is durable
        go.set()
        saved = pending.result()
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file() and path.name != MANIFEST]
    assert saved.size_bytes == sum(path.stat().st_size for path in files)
    assert trainer.load_checkpoint(tmp_path / "one") == {"n": 1}
    assert trainer.weights_digest() == before
    assert read_manifest(tmp_path / "one").policy_version == 4


def test_begin_checkpoint_failure_is_told_by_the_wait_and_leaves_nothing(make_trainer, tmp_path) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    (tmp_path / "file").write_text("")
    pending = trainer.begin_checkpoint(tmp_path / "file" / "one", {})
    with pytest.raises(TrainError, match="could not be written"):
        pending.result()
    with pytest.raises(TrainError, match="could not be written"):
        trainer.finish_checkpoint()
    assert trainer.finish_checkpoint() is None
    trainer.save_checkpoint(tmp_path / "two", {})  # and it goes on


def test_manifest_says_what_the_folder_holds(make_trainer, tmp_path) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(trainer, random_branches(0), 2)
    trainer.save_checkpoint(tmp_path / "one", {"run": "r", "groups": ["a"]})
    manifest = read_manifest(tmp_path / "one")
    assert (manifest.step, manifest.weights_digest) == (2, trainer.weights_digest())
    assert manifest.extra == {"run": "r", "groups": ["a"]}
    assert (manifest.world_size, manifest.tensor_parallel, manifest.format) == (1, 1, FORMAT)
    assert manifest.model["embedding.word_embeddings.weight"] == (64, 48)
    files = {path.relative_to(tmp_path / "one").as_posix() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert set(manifest.files) == files - {"gyre.json"}
    assert manifest.size_bytes == sum((tmp_path / "one" / name).stat().st_size for name in manifest.files)


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit_manifest(folder: Path, **changes) -> None:
    tree = json.loads((folder / "gyre.json").read_text())
    (folder / "gyre.json").write_text(json.dumps({**tree, **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"is torn: __0_0\.distcp has [\d,]+ bytes of [\d,]+; resume from an older one"),
        (flip_a_bit, r"is damaged: the checksum of __0_0\.distcp"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), r"is torn: __0_0\.distcp is missing"),
        (lambda folder: (folder / "metadata.json").unlink(), r"is torn: metadata\.json is missing"),
        (lambda folder: (folder / "gyre.json").write_text("{"), r"is torn: gyre\.json cannot be read"),
        (lambda folder: edit_manifest(folder, files=None), r"is torn: gyre\.json lacks or garbles a field"),
        (
            lambda folder: (folder / "gyre.json").unlink(),
            r"is not Gyre's: it has Megatron's metadata\.json",
        ),
        (
            lambda folder: edit_manifest(folder, format=FORMAT + 1),
            r"has format 2, this Gyre reads 1.* or a newer one",
        ),
        (shutil.rmtree, r"is not a complete checkpoint \(no gyre\.json\); resume from an older one"),
    ],
)
def test_load_checkpoint_torn_foreign_or_newer_is_refused_and_changes_nothing(
    damage, message, make_trainer, tmp_path
) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    trainer.save_checkpoint(tmp_path / "one", {})
    train(trainer, random_branches(0), 1)
    before = trainer.weights_digest()
    damage(tmp_path / "one")
    with pytest.raises(TrainError, match=message):
        trainer.load_checkpoint(tmp_path / "one")
    assert (trainer.weights_digest(), trainer.step) == (before, 1)


def test_save_hf_whole_or_absent_and_loadable_by_transformers(make_trainer, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    branches = random_branches(2)
    train(trainer, branches, 1)
    trainer.save_hf(tmp_path / "version-00001")
    assert [path.name for path in tmp_path.iterdir()] == ["version-00001"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "version-00001").float()
    expected = hf_logprobs(loaded, branches[0].token_ids)
    assert np.abs(trainer.logprobs(branches[:1])[0][1:] - expected).max() < 2e-5
    with pytest.raises(TrainError, match="exists already"):
        trainer.save_hf(tmp_path / "version-00001")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="could not be written"):
        trainer.save_hf(tmp_path / "file" / "x")


def test_checkpoint_writer_killed_before_the_rename_leaves_nothing_at_the_name_and_is_replaced(
    tiny, make_trainer, tmp_path
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from gyre_core.config.models import TrainConfig
from gyre_core.train.megatron import checkpoint
from gyre_core.train.megatron.backend import MegatronTrainer
trainer = MegatronTrainer(Path({str(tiny[0])!r}), TrainConfig(threads=1))
checkpoint.seal_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # all of Megatron's files are there
trainer.save_checkpoint(Path({str(tmp_path / "one")!r}), {{}})
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=root, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.partial"]
    trainer = make_trainer(**WIDE_CLIP)
    with pytest.raises(TrainError, match="not a complete checkpoint"):
        trainer.load_checkpoint(tmp_path / "one")
    with pytest.raises(TrainError, match="not Gyre's"):
        trainer.load_checkpoint(tmp_path / "one.partial")
    trainer.save_checkpoint(tmp_path / "one", {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert trainer.load_checkpoint(tmp_path / "one") == {"n": 2}
