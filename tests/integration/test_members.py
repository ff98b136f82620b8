"""Several replicas in processes of their own: the parameters are those of one replica, whatever happens."""

import contextlib
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre_core.cells.members import MemberHub
from gyre_core.errors import TrainError
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.train.queue_records import StepAccount
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.gradients import BufferOffer
from gyre_core.transfer.mooncake_buffers import MooncakeReader
from gyre_core.types import TrainingBranch
from tests.support.members import until
from tests.support.satellites import (
    SatelliteProcess,
    groups_of_step,
    num_rollouts,
    real_hub,
    relative_difference,
    rules,
    run_step,
    weights_of,
)
from tests.support.training import make_branch, write_tiny_qwen3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_qwen3(folder)
    yield folder
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The parameters of one replica before the first step and after each."""
    with real_hub(model, tmp_path_factory.mktemp("alone")) as (hub, trainer):
        weights = [weights_of(trainer)]
        for step in range(NUM_STEPS):
            queue = hub.open_step(step, rules())
            groups = groups_of_step(step)
            for name, branches in groups.items():
                queue.add_group(name, branches)
            queue.seal()
            run_step(hub, trainer, queue, num_rollouts(groups))
            weights.append(weights_of(trainer))
        return weights


def test_four_replicas_with_joins_and_a_kill_give_the_parameters_of_one(
    model: Path, alone: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    chance = random.Random(11)
    starts = {"cell-1": 0, "cell-2": 0, "cell-3": chance.randrange(1, 3)}
    kill_step = 2
    seen: list[set[str]] = []
    lost: list[str] = []
    with real_hub(model, tmp_path) as (hub, trainer), ExitStack() as stack:
        running: dict[str, SatelliteProcess] = {}
        for step in range(NUM_STEPS):
            groups = groups_of_step(step)
            queue = hub.open_step(step, rules())

            def feed(step: int = step, groups: Any = groups, queue: StepQueue = queue) -> None:
                """Groups come in while the members work; members come and go at seeded random places."""
                joins_at = {cell: chance.randrange(len(groups)) for cell, when in starts.items() if when == step}
                for index, (name, branches) in enumerate(groups.items()):
                    queue.add_group(name, branches)
                    for cell, at in joins_at.items():
                        if at == index:
                            satellite = SatelliteProcess(cell, hub.url, model, tmp_path)
                            running[cell] = stack.enter_context(satellite)
                queue.seal()

            if step == kill_step:  # the core is late: a satellite computes something, and dies with it
                feed()
                lost.append(held_by_others(queue))
                victim = running[cell_of(lost[0])]
                victim.signal(signal.SIGKILL)
                victim.child.wait()
                account, _ = run_step(hub, trainer, queue, num_rollouts(groups))
            else:
                feeder = threading.Thread(target=feed)
                feeder.start()
                if step == kill_step + 1:
                    held_by_others(queue)
                account, _ = run_step(hub, trainer, queue, num_rollouts(groups))
                feeder.join()
            assert set(account.groups) == set(groups), "every group once"
            assert not set(lost) & set(account.taken.values()), "nothing of the dead member's session counts"
            seen.append({cell_of(session) for session in account.taken.values()})
        apart = relative_difference(weights_of(trainer), alone[-1])
        moved = relative_difference(alone[0], alone[-1])
    print(
        f"\nmembers by step {[sorted(names) for names in seen]}, "
        f"largest relative difference {apart:.2e}, the steps moved {moved:.2e}"
    )
    assert len(lost) == 1
    assert len(set.union(*seen)) >= 2
    assert apart <= 1e-5
    assert moved > 1e-4


def cell_of(session: str) -> str:
    return session.rsplit("/", 1)[1].split("#")[0]


def held_by_others(queue: StepQueue) -> str:
    """Wait for a satellite whose gradient holds something; returns its session."""

    def found() -> list[str]:
        sessions = queue.status()["sessions"].items()
        return [name for name, state in sessions if "core#" not in name and state["completed"]]

    until(found, 60.0)
    return found()[0]


class Steps:
    """Steps with the same groups as `alone`, one fault in each."""

    def __init__(self, hub: MemberHub, trainer: MegatronTrainer) -> None:
        self.hub, self.trainer = hub, trainer
        self.queue: StepQueue
        self.groups: dict[str, list[TrainingBranch]]

    def open(self, step: int) -> StepQueue:
        self.groups = groups_of_step(step)
        self.queue = self.hub.open_step(step, rules())
        return self.queue

    def feed(self, *, seal: bool = True) -> None:
        for name, branches in self.groups.items():
            self.queue.add_group(name, branches)
        if seal:
            self.queue.seal()

    def finish(self) -> StepAccount:
        account, _ = run_step(self.hub, self.trainer, self.queue, num_rollouts(self.groups))
        assert set(account.groups) == set(self.groups)
        return account

    def joined(self) -> str:
        """Wait for a satellite's session."""
        until(lambda: [name for name in self.queue.status()["sessions"] if "core#" not in name], 60.0)
        return next(name for name in self.queue.status()["sessions"] if "core#" not in name)

    def feed_a_stopped_one(self, satellite: SatelliteProcess, session: str) -> None:
        """Stop the satellite and give it work: it holds a lease and will not complete it. Then the other groups.

        The work reaches it only if it was stopped while its request waited, so try with one group after the other.
        """
        left = list(self.groups.items())
        while not self.queue.status()["sessions"][session]["lease"]:
            satellite.signal(signal.SIGCONT)
            until(lambda: self.queue.status()["pending"] + self.queue.status()["leased"] == 0, 30.0)
            until(lambda: self.hub.board._listeners, 30.0)  # its next request waits
            satellite.signal(signal.SIGSTOP)
            self.queue.add_group(*left.pop(0))
            with contextlib.suppress(AssertionError):
                until(lambda: self.queue.status()["sessions"][session]["lease"], 1.0)
        for name, branches in left:
            self.queue.add_group(name, branches)
        self.queue.seal()


def kill(satellite: SatelliteProcess) -> None:
    satellite.signal(signal.SIGKILL)
    satellite.child.wait()


def test_satellite_that_dies_or_hangs_in_any_phase_changes_nothing(
    model: Path, alone: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with real_hub(model, tmp_path) as (hub, trainer):
        steps = Steps(hub, trainer)

        steps.open(0)
        with SatelliteProcess("before-claim", hub.url, model, tmp_path) as satellite:
            gone = steps.joined()
            kill(satellite)
            steps.feed()
            assert gone not in steps.finish().taken.values()

        steps.open(1)
        with SatelliteProcess("in-micro-step", hub.url, model, tmp_path) as satellite:
            gone = steps.joined()
            steps.feed_a_stopped_one(satellite, gone)
            kill(satellite)
            account = steps.finish()
            assert account.cut_off == (gone,)
            assert account.requeued >= 1

        steps.open(2)
        with SatelliteProcess("after-complete", hub.url, model, tmp_path) as satellite:
            gone = steps.joined()
            steps.feed(seal=False)
            until(lambda: steps.queue.status()["pending"] + steps.queue.status()["leased"] == 0, 30.0)
            kill(satellite)
            steps.queue.seal()
            account = steps.finish()
            assert account.cut_off == (gone,)
            assert account.requeued == len(account.taken)

        steps.open(3)
        with SatelliteProcess("hangs", hub.url, model, tmp_path) as satellite:
            gone = steps.joined()
            steps.feed_a_stopped_one(satellite, gone)
            assert steps.finish().cut_off == (gone,)  # by its deadline
            steps.open(4)
            satellite.signal(signal.SIGCONT)  # it completes what nobody waits for, of a step that is over
            back = steps.joined()
            assert back.startswith(steps.queue.name)
            steps.feed(seal=False)
            until(lambda: steps.queue.status()["completed"], 30.0)
            steps.queue.seal()
            account = steps.finish()
            assert back in account.taken.values()
            assert "clear the gradient" in satellite.log or "is over" in satellite.log
        assert relative_difference(weights_of(trainer), alone[5]) <= 1e-5


def test_satellite_killed_during_the_pull_over_mooncake_loses_its_gradient(
    model: Path, alone: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    processes: list[SatelliteProcess] = []

    class Reader(MooncakeReader):
        def read(self, offer: BufferOffer, into: torch.Tensor) -> None:
            if processes:
                kill(processes.pop())
            super().read(offer, into)

    with real_hub(model, tmp_path, channel="mooncake", reader=Reader()) as (hub, trainer):
        steps = Steps(hub, trainer)
        for step, dies in ((0, False), (1, True)):
            steps.open(step)
            with SatelliteProcess(f"cell-{step + 1}", hub.url, model, tmp_path, channel="mooncake") as satellite:
                session = steps.joined()
                steps.feed(seal=False)
                until(lambda: steps.queue.status()["completed"], 30.0)
                steps.queue.seal()
                processes[:] = [satellite] if dies else []
                account = steps.finish()
                assert (session in account.taken.values()) is not dies
                assert (session in account.cut_off) is dies
        assert relative_difference(weights_of(trainer), alone[2]) <= 1e-5


def test_rollout_a_hundred_times_longer_is_waited_for_and_a_poisoned_one_refused(model: Path, tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    ids = chance.integers(0, 60, 3000).tolist()
    short, long = [make_branch(ids[:length], range(1, length), rollout_id=f"r{length}") for length in (30, 3000)]
    poisoned = make_branch(ids[:30], range(1, 30), rollout_id="bad", sampler=-1e30)
    lease = LeaseRule(min_s=5.0, slack=4.0, assumed_tokens_per_s=100.0)
    with (
        real_hub(model, tmp_path) as (hub, trainer),
        SatelliteProcess("cell-1", hub.url, model, tmp_path) as satellite,
    ):
        queue = hub.open_step(0, rules(micro_step_tokens=4096, lease=lease))
        until(lambda: queue.status()["sessions"], 60.0)
        queue.add_group("short", [short])
        until(lambda: queue.status()["completed"] == 1, 30.0)
        queue.add_group("long", [long])
        until(lambda: queue.status()["completed"] == 2, 60.0)
        queue.seal()
        account, _ = run_step(hub, trainer, queue, 2)
        assert account.cut_off == ()
        assert len(set(account.taken.values())) == 1
        before = trainer.weights_digest()

        queue = hub.open_step(1, rules())
        until(lambda: queue.status()["sessions"], 60.0)
        queue.add_group("bad", [poisoned])
        until(lambda: queue.status()["failed"] == 1, 30.0)
        queue.seal()
        with pytest.raises(TrainError, match="refused"):
            run_step(hub, trainer, queue, 1)
        assert trainer.weights_digest() == before
        assert "refused" in satellite.log
        queue = hub.open_step(1, rules())
        until(lambda: queue.status()["sessions"], 60.0)  # the satellite is there again
        queue.abort("enough")
