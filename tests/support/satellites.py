"""Satellite processes on a tiny real model, and a core of this process that steps with them."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.cells.satellite import Channel, SatelliteSettings
from gyre_core.config.models import TrainConfig
from gyre_core.process import ChildProcess, log_tail, python_command
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import MegatronReplica
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.train.queue_records import QueueRules, StepAccount
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.gradients import BufferReader
from gyre_core.types import TrainingBranch
from tests.support.training import random_branches

SECRET = "satellites-secret"
# A wide clip range: with the published one a random batch is clipped nearly everywhere, and nothing is compared.
TRAIN = TrainConfig(
    learning_rate=1e-4, threads=1, micro_step_tokens=4096, clip_low=0.5, clip_high=0.5, loss="gspo", keep_checkpoints=1
)
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def groups_of_step(step: int, num_groups: int = 6) -> dict[str, list[TrainingBranch]]:
    """The groups of one step, the same ones each time."""
    by_group: dict[str, list[TrainingBranch]] = {}
    for branch in random_branches(100 + step, num_groups=num_groups, rollouts=4):
        by_group.setdefault(branch.group_id, []).append(branch)
    return by_group


def num_rollouts(groups: Mapping[str, Sequence[TrainingBranch]]) -> int:
    """What the step divides by."""
    return len({branch.rollout_id for branches in groups.values() for branch in branches})


@contextlib.contextmanager
def real_hub(
    model: Path, work_dir: Path, *, channel: Channel = "local", reader: BufferReader | None = None
) -> Iterator[tuple[MemberHub, MegatronTrainer]]:
    """A core with version 0 published."""
    trainer = MegatronTrainer(model, TRAIN, seed=0)
    try:
        settings = HubSettings(secret=SECRET, work_dir=work_dir, channel=channel)
        with MemberHub(MegatronReplica(trainer), settings, reader=reader) as hub:
            hub.publish_weights(0)
            yield hub, trainer
    finally:
        trainer.close()


class SatelliteProcess:
    """A satellite with its log. Example: with SatelliteProcess("cell-1", hub.url, model, tmp_path) as satellite: ..."""

    def __init__(self, name: str, url: str, model: Path, folder: Path, *, channel: Channel = "local") -> None:
        settings = SatelliteSettings(
            name=name, core_url=url, secret=SECRET, model_path=model, train=TRAIN, channel=channel, wait_s=3.0
        )
        file = folder / f"{name}.json"
        file.write_text(settings.model_dump_json(), encoding="utf-8")
        self.child = ChildProcess(
            name,
            python_command("gyre_core.cells.satellite", "--settings", str(file)),
            log_path=folder / f"{name}.log",
            env=THREADS,
        )

    @property
    def log(self) -> str:
        return log_tail(self.child.log_path, num_lines=40)

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def __enter__(self) -> "SatelliteProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop(grace_s=5.0)


def run_step(
    hub: MemberHub, trainer: MegatronTrainer, queue: StepQueue, rollouts: int
) -> tuple[StepAccount, dict[str, Any]]:
    """One step with whoever joins."""

    def step(_: StepAccount) -> dict[str, Any]:
        return {"grad_norm": trainer.optimizer_step(rollouts).grad_norm}

    return hub.run_step(queue, step)


def weights_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def relative_difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of a value, relative to the largest value of its tensor, over all tensors."""
    assert first.keys() == second.keys()
    return max(
        float((first[name].double() - second[name].double()).abs().max() / second[name].double().abs().max())
        for name in first
    )


def rules(**settings: Any) -> QueueRules:
    """Small micro-steps, so that there is something to share."""
    lease = LeaseRule(min_s=6.0)  # a machine with busy cores, and a test that does not want to wait
    return QueueRules(**{"micro_step_tokens": 128, "tail_tokens": 64, "silence_s": 5.0, "lease": lease, **settings})
