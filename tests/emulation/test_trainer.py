"""Emulated trainers: their time by hand, and that what they hold shows what was trained."""

import threading
from pathlib import Path

import pytest

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.config.emulation import EmulationConfig, TrainCosts
from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.checkpoint_manifest import read_manifest
from gyre_core.train.emulated import EmulatedTrainer
from gyre_core.train.megatron.replica import MegatronReplica
from gyre_core.train.packing import pack_for_training
from gyre_core.train.queue_records import QueueRules
from tests.support.members import SECRET, group, satellite_thread

EMULATION = EmulationConfig(compression=10.0, train=TrainCosts(token_s=2.0, micro_step_s=5.0, optimizer_s=30.0))


def make_trainer() -> tuple[EmulatedTrainer, list[float]]:
    slept: list[float] = []
    return EmulatedTrainer(TrainConfig(), EMULATION, sleep=slept.append), slept


def test_trainer_takes_the_time_of_its_tokens_and_counts_its_targets():
    trainer, slept = make_trainer()
    # two rollouts that differ from the first token on, 6 targets each: 14 tokens, 12 targets
    (packed,) = pack_for_training(group("g", rollouts=2, length=6), trainer.config)
    stats = trainer.micro_step(packed)
    assert (stats.num_tokens, stats.num_targets) == (14, 12)
    assert slept == [(5.0 + 14 * 2.0) / 10.0]
    step = trainer.optimizer_step(2)
    assert slept[1:] == [30.0 / 10.0]
    assert (step.num_micro_steps, step.grad_norm, trainer.targets_trained) == (1, 12.0, 12)
    assert trainer.busy_s == 5.0 + 28.0 + 30.0
    with pytest.raises(TrainError, match="no micro-step"):
        trainer.optimizer_step(2)


def test_checkpoint_loaded_goes_on_with_the_same_counts(tmp_path: Path):
    trainer, _ = make_trainer()
    for part in pack_for_training(group("g", rollouts=3, length=4), trainer.config):
        trainer.micro_step(part)
    trainer.optimizer_step(3)
    trainer.begin_checkpoint(tmp_path / "version-1", {"run": "r"}, 1)
    saved = trainer.finish_checkpoint()
    assert saved is not None and saved.path.is_dir()
    assert read_manifest(saved.path).weights_digest == trainer.weights_digest()
    other, _ = make_trainer()
    assert other.load_checkpoint(saved.path) == {"run": "r"}
    assert (other.weights_digest(), other.targets_trained, other.step) == (trainer.weights_digest(), 12, 1)


def test_step_shared_with_a_satellite_trains_every_target_once(tmp_path: Path):
    trainer, _ = make_trainer()
    other, _ = make_trainer()
    first_claimed = threading.Event()
    other_step = other.micro_step
    other.micro_step = lambda packed, reference=None: (first_claimed.set(), other_step(packed))[1]
    groups = [group(f"g{number}", rollouts=4, length=20, token=number) for number in range(6)]
    with MemberHub(MegatronReplica(trainer), HubSettings(secret=SECRET, work_dir=tmp_path)) as hub:
        hub.publish_weights(0)
        queue = hub.open_step(0, QueueRules(micro_step_tokens=64))
        for branches in groups:
            queue.add_group(branches[0].group_id, branches)
        queue.seal()
        with satellite_thread("cell-1", hub.url, MegatronReplica(other)):  # type: ignore[arg-type]
            assert first_claimed.wait(20.0)  # the core begins once the satellite computes
            account, stats = hub.run_step(queue, lambda _: {"norm": trainer.optimizer_step(24).grad_norm})
    assert stats["norm"] == trainer.targets_trained == 6 * 4 * 20
    assert {session.split("#")[0].split("/")[1] for session in account.taken.values()} >= {"cell-1"}
    assert trainer.step == 1 and other.step == 0
