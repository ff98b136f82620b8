"""A cell's trainer and what it does now: on one thread of its own, a step or a satellite's work, and verbs in between.

    verbs (event loop) --pause, queue, go on--> trainer thread: [ step | satellite ] .. verb .. [ step | satellite ] ..

Enters: the flow's verbs. Leaves: statistics, digests, checkpoints, and steps by the desk (cells/steps.py). Invariants:
the trainer is used from its thread alone; a verb waits for a micro-step boundary at most; a step that was interrupted
goes on with the gradient that it had; the event loop never waits for the trainer, so the control API answers meanwhile.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.cells.satellite import SatelliteMember
from gyre_core.cells.settings import CellSettings
from gyre_core.cells.steps import LocalSteps, StepDesk
from gyre_core.cells.traced import TracedReplica
from gyre_core.errors import GyreError
from gyre_core.nodes import NodeHub, node_key
from gyre_core.tracing.spans import Tracing
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import MegatronReplica, ParallelReplica
from gyre_core.train.packing import PackedMicroStep, pack_for_training
from gyre_core.train.parallel import ParallelTrainer, open_trainer
from gyre_core.train.queue_records import QueueRules
from gyre_core.train.stats import MicroStepStats, combine_stats
from gyre_core.transfer.branches import branches_from_ipc
from gyre_core.types import TrainingBranch

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SATELLITE_WAIT_S = 2.0  # of one request for news; `interrupt` ends it earlier
_SATELLITE_ANSWER_S = 8.0  # beyond it a core that hangs is taken for gone, until it answers again
_INTERRUPT_AGAIN_S = 1.0  # a satellite's request that began just after the interruption is interrupted again
_STOP_LIMIT_S = 3.0  # how long a satellite whose process ends tries to hand its gradient in


class CellTrainer(ABC):
    """The trainer's side of a cell host; `cells/host.py` adds the engine and the roles."""

    def __init__(self, settings: CellSettings) -> None:
        self.settings = settings
        self.desk: StepDesk | None = None  # of a core and of a cell alone
        self.member: SatelliteMember | None = None
        self.tracing = Tracing(settings.tracing, settings.cell_id)
        self._version = settings.policy_version
        self._trainer: MegatronTrainer | ParallelTrainer | None = None
        self._hub: MemberHub | None = None
        self._nodes: NodeHub | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._lock = asyncio.Lock()
        self._pause = threading.Event()
        self._job: asyncio.Future[None] | None = None
        self._replica: MegatronReplica | ParallelReplica | None = None

    @property
    @abstractmethod
    def training(self) -> bool:
        """Whether the trainer works off steps now."""

    @property
    def policy_version(self) -> int:
        """Of the trainer's weights."""
        if self.member is not None and self.member.satellite.version >= 0:
            return self.member.satellite.version
        return self._version

    # -- steps -----------------------------------------------------------------------------------------------------

    async def train_open(self, *, step: int, policy_version: int, learning_rate: float | None = None) -> dict[str, Any]:
        """Open a step; the trainer begins with it as soon as it is in its training role. Safe to repeat."""
        rate = self.settings.train.learning_rate_at(policy_version) if learning_rate is None else learning_rate
        desk = self._desk()
        async with self._lock:
            opened = await asyncio.to_thread(
                desk.open, step, policy_version=policy_version, held_version=self.policy_version, learning_rate=rate
            )
            self._go_on()
            return opened

    async def train_group(self, group_id: str, body: bytes) -> dict[str, Any]:
        """A graded group's branches (Arrow IPC) into the open step. Safe to repeat."""
        desk = self._desk()
        return await asyncio.to_thread(lambda: desk.add_group(group_id, branches_from_ipc(body)))

    async def train_seal(self, *, num_rollouts: int) -> dict[str, Any]:
        """No more groups come. Safe to repeat."""
        return await asyncio.to_thread(self._desk().seal, num_rollouts)

    async def train_finish(self, *, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The step's statistics and account, None while it runs. Safe to repeat; TrainError for a refused one."""
        return await asyncio.to_thread(self._desk().finish, wait_s)

    async def train_abort(self) -> dict[str, Any]:
        """Give the open step up. Safe to repeat."""
        desk = self._desk()
        aborted = await asyncio.to_thread(desk.abort)
        if aborted:
            await self.between(lambda: self._built_trainer().reset_gradients())
        return {"aborted": aborted}

    async def cut_off(self, trainer: str) -> dict[str, Any]:
        """A member's process is dead: what it has not handed in goes to others."""
        lost = await asyncio.to_thread(self._desk().gone, trainer, "its process is dead, says the fleet")
        return {"trainer": trainer, "sessions": list(lost)}

    async def train_step(
        self, body: bytes, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """A whole step over the branches in `body`: opened, fed, sealed and waited for.

        Raises TrainError for a step that was refused; weights and version are then as before.
        """
        if not self.training:
            raise ValueError(f"{self.settings.cell_id} is not training")
        if policy_version != self.policy_version + 1:
            raise ValueError(f"the next policy version is {self.policy_version + 1}, not {policy_version}")
        desk = self._desk()
        groups: dict[str, list[TrainingBranch]] = {}
        for branch in branches_from_ipc(body):
            groups.setdefault(branch.group_id, []).append(branch)
        before = policy_version - 1
        await self.train_open(step=before, policy_version=before, learning_rate=learning_rate)
        for group_id, branches in groups.items():
            await asyncio.to_thread(desk.add_group, group_id, branches)
        await self.train_seal(num_rollouts=num_rollouts)
        while (result := await self.train_finish(wait_s=5.0)) is None:
            pass
        return result

    # -- micro-steps one by one (replay, cells without members) ----------------------------------------------------

    async def micro_step(self, body: bytes) -> dict[str, Any]:
        """Forward and backward of the branches in `body` (Arrow IPC); gradients accumulate unnormalised."""
        self._require_training()
        arrived = time.monotonic()
        branches = branches_from_ipc(body)
        read_s = time.monotonic() - arrived

        def work() -> dict[str, Any]:
            self._require_no_step()
            started = time.monotonic()
            packed = pack_for_training(branches, self.settings.train)
            packing_s = read_s + time.monotonic() - started
            stats = combine_stats([asdict(part) for part in self._compute(packed)])
            keys = [[(key.rollout_id, key.branch) for key in part.branches] for part in packed]
            return {"keys": keys, "stats": stats, "packing_s": packing_s, "seconds": time.monotonic() - started}

        return await self.between(work)

    async def optimizer_step(
        self, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """One optimizer step; `policy_version` must be the next one. Without a learning rate the configuration's.

        `weights_before` in the reply is the digest of the weights that the step started from.
        """
        self._require_training()

        def work() -> dict[str, Any]:
            self._require_next(policy_version)
            started = time.monotonic()
            rate = learning_rate
            if rate is None:
                rate = self.settings.train.learning_rate_at(policy_version - 1)
            before = self._built_trainer().weights_digest()
            stats = self._built_trainer().optimizer_step(num_rollouts, rate)
            seconds = time.monotonic() - started
            self._advance(policy_version)
            return {**asdict(stats), "weights_before": before, "seconds": seconds, "policy_version": policy_version}

        return await self.between(work)

    async def skip_step(self, *, policy_version: int) -> dict[str, Any]:
        """A step without any gradient: the version advances, weights and optimizer state stay as they are."""
        self._require_training()

        def work() -> dict[str, Any]:
            self._require_next(policy_version)
            before = self._built_trainer().weights_digest()
            self._advance(policy_version)
            return {"grad_norm": 0.0, "weights_before": before, "policy_version": policy_version}

        return await self.between(work)

    async def reset_gradients(self) -> None:
        """Drop accumulated gradients."""

        def work() -> None:
            self._require_no_step()
            self._built_trainer().reset_gradients()

        await self.between(work)

    async def sum_begin(self) -> None:
        """Put the gradient so far aside: micro-steps sum from zero until `sum_end`, as they did in a satellite."""
        self._require_training()

        def work() -> None:
            self._require_no_step()
            self._built_trainer().put_gradients_aside()

        await self.between(work)

    async def sum_end(self) -> None:
        """Add what was put aside to the sum since then: the same bits as a core that takes a satellite's over."""
        self._require_training()

        def work() -> None:
            self._built_trainer().take_gradients_back()

        await self.between(work)

    # -- state -----------------------------------------------------------------------------------------------------

    async def save_checkpoint(self, path: Path, extra: dict[str, Any]) -> dict[str, Any]:
        """Begin a checkpoint: the trainer may go on when this returns, the folder is there after `finish_checkpoint`.

        Whole or absent: written beside `path`, then renamed. The reply has the weights' digest and the back end;
        `seconds` is what the trainer stood still for.
        """

        def work() -> dict[str, Any]:
            started = time.monotonic()
            trainer = self._built_trainer()
            trainer.begin_checkpoint(path, extra, self.policy_version)
            return {
                "path": str(path),
                "weights_digest": trainer.weights_digest(),
                "back_end": trainer.back_end(),
                "seconds": time.monotonic() - started,
            }

        return await self.between(work)

    async def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint that was begun is durable; raises TrainError when it could not be written.

        Not under the lock and not on the trainer's thread: both are free for the step meanwhile.
        """
        started = time.monotonic()
        saved = await asyncio.to_thread(self._built_trainer().finish_checkpoint)
        if saved is None:
            raise ValueError(f"{self.settings.cell_id} writes no checkpoint")
        waited_s = time.monotonic() - started
        return {"path": str(saved.path), "bytes": saved.size_bytes, "write_s": saved.write_s, "seconds": waited_s}

    async def export_hf(self, path: Path) -> dict[str, Any]:
        """Write the weights as a Hugging Face folder, whole or absent."""

        def work() -> dict[str, Any]:
            started = time.monotonic()
            self._built_trainer().save_hf(path)
            return {"path": str(path), "seconds": time.monotonic() - started}

        return await self.between(work)

    async def weights(self) -> dict[str, Any]:
        """Digest of the trainer's weights, and the back end that holds them."""

        def work() -> dict[str, Any]:
            trainer = self._built_trainer()
            return {"weights_digest": trainer.weights_digest(), "back_end": trainer.back_end()}

        return await self.between(work)

    async def compare_checkpoint(self, path: Path) -> dict[str, Any]:
        """The trainer's state against a checkpoint's; the trainer holds the checkpoint's afterwards."""
        self._require_training()

        def work() -> dict[str, Any]:
            self._require_no_step()
            return asdict(self._built_trainer().compare_checkpoint(path))

        return await self.between(work)

    # -- the trainer's thread --------------------------------------------------------------------------------------

    async def between(self, work: Callable[[], T]) -> T:
        """Run this on the trainer's thread, at the next micro-step boundary; then the step or satellite goes on."""
        async with self._lock:
            await self._halt()
            try:
                return await self._on_trainer_thread(work)
            finally:
                self._go_on()

    async def halt(self) -> None:
        """The trainer rests from its next micro-step boundary on; a satellite has handed its gradient in."""
        async with self._lock:
            await self._halt()

    async def _halt(self) -> None:
        job = self._job
        if job is None:
            return
        self._pause.set()
        while not job.done():
            if self.desk is not None:
                self.desk.wake()
            if self.member is not None:
                await asyncio.to_thread(self.member.satellite.interrupt)
            await asyncio.wait([job], timeout=_INTERRUPT_AGAIN_S)
        self._job = None

    def _go_on(self) -> None:
        """Let the trainer's thread work, if there is something for it to do."""
        if not self.training or (self._job is not None and not self._job.done()):
            return
        if self.member is not None:
            run = self.member.run
        elif self.desk is not None and self.desk.running:
            run = self.desk.work
        else:
            return
        self._pause.clear()
        self._job = asyncio.ensure_future(self._on_trainer_thread(lambda: run(self._pause)))
        self._job.add_done_callback(self._job_done)

    def _job_done(self, job: "asyncio.Future[None]") -> None:
        """The thread is free. A step that was opened just before found it busy: begin with it now."""
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.error("the trainer's thread stopped working: %r", error, exc_info=error)
        elif not self._lock.locked():  # else the verb that interrupted it, or opens a step, goes on itself
            self._go_on()

    async def _on_trainer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open_nodes(self) -> None:
        settings = self.settings
        if settings.nodes > 1:
            self._nodes = NodeHub(settings.host, settings.nodes_port, node_key(), count=settings.nodes)

    def _build_trainer(self) -> None:
        settings = self.settings
        trainer = self._trainer = self._open_trainer()
        if settings.checkpoint is not None:
            trainer.load_checkpoint(settings.checkpoint)
        replica = self._replica = _replica_of(trainer)
        member = TracedReplica(replica, self.tracing, settings.cell_id) if self.tracing.enabled else replica
        if settings.core_url is not None:
            self.member = SatelliteMember(
                settings.cell_id,
                settings.core_url,
                settings.core_secret,
                member,
                channel=settings.core_channel,
                host=settings.host,
                wait_s=_SATELLITE_WAIT_S,
                answer_s=_SATELLITE_ANSWER_S,
            )
            return
        if settings.members is not None:
            hub_settings = HubSettings(
                **settings.members.model_dump(), work_dir=settings.work_dir / "members", owner=settings.cell_id
            )
            source = self._hub = MemberHub(member, hub_settings)
            self._hub.start()
        else:
            source = LocalSteps(member, trainer.weights_digest, settings.cell_id)
        source.publish_weights(self._version)
        self._source = source
        self.desk = StepDesk(source, trainer, QueueRules.of(settings.train), self._set_version)

    def _open_trainer(self) -> MegatronTrainer | ParallelTrainer:
        settings = self.settings
        return open_trainer(settings.model_path, settings.train, seed=settings.seed, nodes=self._nodes)

    async def _close_trainer(self) -> None:
        if self.member is not None:
            self.member.satellite.leave_limit_s = _STOP_LIMIT_S
        await self.halt()
        if self._hub is not None:
            await asyncio.to_thread(self._hub.close)
        if self.member is not None:
            await asyncio.to_thread(self.member.close)
        if self._trainer is not None:
            await self._on_trainer_thread(self._trainer.close)
        if isinstance(self._replica, ParallelReplica):
            self._replica.close()
        if self._nodes is not None:
            self._nodes.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.tracing.close)

    def _set_version(self, policy_version: int) -> None:
        self._version = policy_version

    def _advance(self, policy_version: int) -> None:
        self._version = policy_version
        if self.desk is not None:
            self._source.publish_weights(policy_version)

    def _compute(self, packed: Sequence[PackedMicroStep]) -> list[MicroStepStats]:
        trainer = self._built_trainer()
        if isinstance(trainer, ParallelTrainer):
            return trainer.micro_steps(packed)
        return [trainer.micro_step(part) for part in packed]

    def _desk(self) -> StepDesk:
        if self.desk is None:
            raise ValueError(f"{self.settings.cell_id} is a satellite or not ready: steps are opened on the core")
        return self.desk

    def _built_trainer(self) -> MegatronTrainer | ParallelTrainer:
        if self._trainer is None:
            raise GyreError(f"{self.settings.cell_id} has no trainer yet")
        return self._trainer

    def _require_training(self) -> None:
        if not self.training:
            raise ValueError(f"{self.settings.cell_id} is not in its training role, this needs it")

    def _require_no_step(self) -> None:
        if self.desk is not None and self.desk.running:
            raise ValueError(f"{self.settings.cell_id} has an open step: finish or abort it first")

    def _require_next(self, policy_version: int) -> None:
        self._require_no_step()
        if policy_version != self.policy_version + 1:
            raise ValueError(f"the next policy version is {self.policy_version + 1}, not {policy_version}")


def _replica_of(trainer: MegatronTrainer | ParallelTrainer) -> MegatronReplica | ParallelReplica:
    return ParallelReplica(trainer) if isinstance(trainer, ParallelTrainer) else MegatronReplica(trainer)
