"""The cell host: owns one engine and one trainer, keeps both warm, and switches between them.

Enters: control requests (role changes, micro-steps, publications, checkpoints). Leaves: an engine that serves calls
while the cell is in rollout, gradients and weights while it trains. Invariants: one role at a time; the engine never
serves weights that were not verified against the trainer's; a message of an older epoch is refused.

All trainer work runs on one thread of its own, in order; the control API stays responsive meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.cells.settings import CellSettings
from gyre_core.config.models import TransferConfig
from gyre_core.engine.sglang import SGLangServer
from gyre_core.errors import ConfigError, GyreError, TransferError
from gyre_core.scheduler.cell import CellState, CellStatus
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import MegatronReplica
from gyre_core.train.packing import pack_for_training
from gyre_core.train.queue_records import QueueRules, StepAccount
from gyre_core.train.stats import combine_stats
from gyre_core.transfer.branches import branches_from_ipc
from gyre_core.transfer.weights import WeightPublisher
from gyre_core.types import TrainingBranch

logger = logging.getLogger(__name__)
T = TypeVar("T")

PUBLISH_ATTEMPTS = 3  # the second as the first, the third through files


class CellHost:
    """One cell. `start()` returns when engine and trainer are warm; `stop()` leaves no process behind.

    Without engine settings it is a trainer alone: it trains and compares, and publishes to nobody.

    Example: host = CellHost(settings); await host.start(); await host.role("train", epoch=0)
    """

    def __init__(self, settings: CellSettings) -> None:
        self.settings = settings
        self.status = CellStatus(cell_id=settings.cell_id, state=CellState.RETURNING, epoch=0)
        self.policy_version = settings.policy_version
        self._engine: SGLangServer | None = None
        self._trainer: MegatronTrainer | None = None
        self._publisher: WeightPublisher | None = None
        self._hub: MemberHub | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._lock = asyncio.Lock()
        self._published: int | None = None

    async def start(self) -> dict[str, float]:
        """Boot the engine and build the trainer side by side; returns seconds by phase."""
        started = time.monotonic()
        settings = self.settings
        if settings.engine is None:
            await self._on_trainer_thread(self._build_trainer)
            self._published = self.policy_version  # nobody serves it
            self.status = self.status.moved(CellState.ROLLOUT)
            return {"total_s": time.monotonic() - started}
        engine = self._start_engine()
        trainer_built = asyncio.ensure_future(self._on_trainer_thread(self._build_trainer))
        try:
            await asyncio.to_thread(engine.wait_ready, settings.engine.boot_timeout_s)
            booted = time.monotonic()
            await trainer_built
        except BaseException:
            trainer_built.cancel()
            engine.stop()
            raise
        self._publisher = self._make_publisher(engine, settings.transfer)
        if settings.checkpoint is not None:
            await self.publish()
        else:
            self._published = self.policy_version
        self.status = self.status.moved(CellState.ROLLOUT)
        return {"engine_s": booted - started, "total_s": time.monotonic() - started}

    async def role(self, to: str, *, epoch: int) -> dict[str, Any]:
        """Change the role; the caller has drained the cell's calls. Returns the new status and seconds by phase.

        Raises ValueError for an epoch that is not the current one or a move the state machine does not have, GyreError
        when the weights in the engine are not the trainer's.
        """
        async with self._lock:
            if epoch != self.status.epoch:
                raise ValueError(
                    f"epoch {epoch} is not the cell's current one ({self.status.epoch}): ask /status again"
                )
            started = time.monotonic()
            if to == "train":
                self.status = self.status.moved(CellState.DRAINING).moved(CellState.TRAINING)
            elif to == "rollout":
                returning = self.status.moved(CellState.RETURNING)
                if self._published != self.policy_version:
                    raise GyreError(
                        f"{self.status.cell_id} holds version {self.policy_version} but its engine {self._published}: "
                        "publish before returning to rollout"
                    )
                self.status = returning.moved(CellState.ROLLOUT)
            else:
                raise ValueError(f"role {to!r}: use train or rollout")
            return {**self.describe(), "seconds": time.monotonic() - started}

    async def micro_step(self, body: bytes) -> dict[str, Any]:
        """Forward and backward of the branches in `body` (Arrow IPC); gradients accumulate unnormalised."""
        self._require(CellState.TRAINING)
        arrived = time.monotonic()
        branches = branches_from_ipc(body)
        read_s = time.monotonic() - arrived

        def work() -> dict[str, Any]:
            trainer = self._built_trainer()
            started = time.monotonic()
            packed = pack_for_training(branches, self.settings.train)
            packing_s = read_s + time.monotonic() - started
            stats = combine_stats([asdict(trainer.micro_step(part)) for part in packed])
            keys = [[(key.rollout_id, key.branch) for key in part.branches] for part in packed]
            return {"keys": keys, "stats": stats, "packing_s": packing_s, "seconds": time.monotonic() - started}

        async with self._lock:
            return await self._on_trainer_thread(work)

    async def optimizer_step(
        self, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """One optimizer step; `policy_version` must be the next one. Without a learning rate the configuration's.

        `weights_before` in the reply is the digest of the weights that the step started from.
        """
        self._require(CellState.TRAINING)
        if policy_version != self.policy_version + 1:
            raise ValueError(f"the next policy version is {self.policy_version + 1}, not {policy_version}")

        def work() -> dict[str, Any]:
            started = time.monotonic()
            rate = learning_rate
            if rate is None:
                rate = self.settings.train.learning_rate_at(policy_version - 1)
            before = self._built_trainer().weights_digest()
            stats = self._built_trainer().optimizer_step(num_rollouts, rate)
            return {**asdict(stats), "weights_before": before, "seconds": time.monotonic() - started}

        async with self._lock:
            stats = await self._on_trainer_thread(work)
            self.policy_version = policy_version
            await self._on_trainer_thread(self._offer_weights)
            return {**stats, "policy_version": policy_version}

    async def train_step(
        self, body: bytes, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """A whole step over the branches in `body`, shared with whichever satellites join meanwhile.

        The reply has the step's stats and its account: which micro-step was in whose gradient. Raises TrainError for a
        step that was refused; weights and version are then as before.
        """
        self._require(CellState.TRAINING)
        groups: dict[str, list[TrainingBranch]] = {}
        for branch in branches_from_ipc(body):
            groups.setdefault(branch.group_id, []).append(branch)

        def work() -> dict[str, Any]:
            started = time.monotonic()
            trainer, train, hub = self._built_trainer(), self.settings.train, self._hub
            if hub is None:
                raise ValueError(f"{self.status.cell_id} shares no steps: its settings have no members")
            if policy_version != self.policy_version + 1:
                raise ValueError(f"the next policy version is {self.policy_version + 1}, not {policy_version}")
            before = trainer.weights_digest()
            queue = hub.open_step(policy_version - 1, QueueRules.of(train))
            for group_id, branches in groups.items():
                if not queue.has_group(group_id):
                    queue.add_group(group_id, branches)
            queue.seal()
            rate = train.learning_rate_at(policy_version - 1) if learning_rate is None else learning_rate

            def step(_: StepAccount) -> dict[str, Any]:
                return asdict(trainer.optimizer_step(num_rollouts, rate))

            account, stats = hub.run_step(queue, step)
            self.policy_version = policy_version
            return {
                **stats,
                "account": asdict(account),
                "weights_before": before,
                "policy_version": policy_version,
                "seconds": time.monotonic() - started,
            }

        async with self._lock:
            return await self._on_trainer_thread(work)

    async def skip_step(self, *, policy_version: int) -> dict[str, Any]:
        """A step without any gradient: the version advances, weights and optimizer state stay as they are."""
        self._require(CellState.TRAINING)
        async with self._lock:
            if policy_version != self.policy_version + 1:
                raise ValueError(f"the next policy version is {self.policy_version + 1}, not {policy_version}")
            before = await self._on_trainer_thread(lambda: self._built_trainer().weights_digest())
            self.policy_version = policy_version
            await self._on_trainer_thread(self._offer_weights)
            return {"grad_norm": 0.0, "weights_before": before, "policy_version": policy_version}

    async def reset_gradients(self) -> None:
        """Drop accumulated gradients."""
        async with self._lock:
            await self._on_trainer_thread(lambda: self._built_trainer().reset_gradients())

    async def publish(self) -> dict[str, Any]:
        """Trainer's weights into the engine, paused meanwhile and verified by checksum.

        A publication that fails is tried again, on a new engine when the old one had to be stopped, at last through
        files unless the configuration demands Mooncake. `failures` in the report says what went wrong before. Raises
        TransferError when every try failed.
        """
        async with self._lock:
            tensors = await self._on_trainer_thread(lambda: list(self._built_trainer().export_hf()))
            failures: list[str] = []
            while True:
                if self._publisher is None:
                    raise GyreError(f"{self.status.cell_id} has no engine to publish to")
                try:
                    report = await self._publisher.publish(tensors, self.policy_version)
                except TransferError as error:
                    failures.append(str(error))
                    if len(failures) >= PUBLISH_ATTEMPTS:
                        raise
                    logger.warning("%s: try %d to publish failed: %s", self.status.cell_id, len(failures), error)
                    await self._mend_engine(last_try=len(failures) == PUBLISH_ATTEMPTS - 1)
                else:
                    self._published = self.policy_version
                    return {**asdict(report), "failures": failures}

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

        async with self._lock:
            return await self._on_trainer_thread(work)

    async def finish_checkpoint(self) -> dict[str, Any]:
        """Wait until the checkpoint that was begun is durable; raises TrainError when it could not be written.

        Not under the lock and not on the trainer's thread: both are free for the step meanwhile.
        """
        started = time.monotonic()
        saved = await asyncio.to_thread(self._built_trainer().finish_checkpoint)
        if saved is None:
            raise ValueError(f"{self.status.cell_id} writes no checkpoint")
        waited_s = time.monotonic() - started
        return {"path": str(saved.path), "bytes": saved.size_bytes, "write_s": saved.write_s, "seconds": waited_s}

    async def export_hf(self, path: Path) -> dict[str, Any]:
        """Write the weights as a Hugging Face folder, whole or absent."""

        def work() -> dict[str, Any]:
            started = time.monotonic()
            self._built_trainer().save_hf(path)
            return {"path": str(path), "seconds": time.monotonic() - started}

        async with self._lock:
            return await self._on_trainer_thread(work)

    async def weights(self) -> dict[str, Any]:
        """Digest of the trainer's weights, and the back end that holds them."""

        def work() -> dict[str, Any]:
            trainer = self._built_trainer()
            return {"weights_digest": trainer.weights_digest(), "back_end": trainer.back_end()}

        async with self._lock:
            return await self._on_trainer_thread(work)

    async def compare_checkpoint(self, path: Path) -> dict[str, Any]:
        """The trainer's state against a checkpoint's; the trainer holds the checkpoint's afterwards."""
        self._require(CellState.TRAINING)

        def work() -> dict[str, Any]:
            return asdict(self._built_trainer().compare_checkpoint(path))

        async with self._lock:
            return await self._on_trainer_thread(work)

    def describe(self) -> dict[str, Any]:
        """The cell's state as /role and /status answer it; without the engine's key, so that it may be shown."""
        engine_alive = self._engine is not None and self._engine.running()
        state = self.status.state if engine_alive or self._engine is None else CellState.DEAD
        return {
            "cell_id": self.status.cell_id,
            "state": state.value,
            "epoch": self.status.epoch,
            "policy_version": self.policy_version,
            "published_version": self._published,
            "engine_url": self._engine.url if self._engine is not None else None,
            "members_url": self._hub.url if self._hub is not None else None,
        }

    @property
    def engine_key(self) -> str | None:
        """What calls to the engine must bring."""
        return self._engine.api_key if self._engine is not None else None

    async def stop(self) -> None:
        """End the engine and the trainer's thread."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        if self._hub is not None:
            await asyncio.to_thread(self._hub.close)
        if self._trainer is not None:
            await self._on_trainer_thread(self._trainer.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start_engine(self) -> SGLangServer:
        settings = self.settings
        assert settings.engine is not None, "a trainer alone has no engine"
        self._engine = SGLangServer(
            settings.engine,
            settings.model_path,
            context_length=settings.context_length,
            slots=settings.slots,
            seed=settings.seed,
            log_path=settings.work_dir / "logs" / f"{settings.cell_id}-engine.log",
            policy_version=settings.policy_version,
            remote_weights=settings.transfer.backend != "local",
        )
        self._engine.start()
        return self._engine

    def _make_publisher(self, engine: SGLangServer, transfer: TransferConfig) -> WeightPublisher:
        return WeightPublisher(engine, transfer, self.settings.work_dir / "weights")

    async def _mend_engine(self, *, last_try: bool) -> None:
        """After a failed publication: an engine that runs and a publisher for it. The engine takes no calls yet."""
        settings = self.settings.engine
        assert self._engine is not None and self._publisher is not None and settings is not None
        engine = self._engine
        if not engine.running():
            engine = self._start_engine()
            await asyncio.to_thread(engine.wait_ready, settings.boot_timeout_s)
        self._publisher.close()
        transfer = self.settings.transfer
        if last_try and transfer.backend == "auto":
            transfer = transfer.model_copy(update={"backend": "local"})
        self._publisher = self._make_publisher(engine, transfer)

    def _build_trainer(self) -> None:
        settings = self.settings
        self._trainer = MegatronTrainer(settings.model_path, settings.train, seed=settings.seed)
        if settings.checkpoint is not None:
            self._trainer.load_checkpoint(settings.checkpoint)
        if settings.members is not None:
            if settings.train.tensor_parallel * settings.train.data_parallel != 1:
                raise ConfigError("satellites need train.tensor_parallel = 1 and train.data_parallel = 1")
            hub_settings = HubSettings(
                **settings.members.model_dump(), work_dir=settings.work_dir / "members", owner=settings.cell_id
            )
            self._hub = MemberHub(MegatronReplica(self._trainer), hub_settings)
            self._hub.start()
            self._offer_weights()

    def _offer_weights(self) -> None:
        """Satellites pull what the trainer holds now."""
        if self._hub is not None:
            self._hub.publish_weights(self.policy_version)

    def _built_trainer(self) -> MegatronTrainer:
        if self._trainer is None:
            raise GyreError(f"{self.status.cell_id} has no trainer yet")
        return self._trainer

    def _require(self, state: CellState) -> None:
        if self.status.state is not state:
            raise ValueError(f"{self.status.cell_id} is {self.status.state}, this needs {state}")

    async def _on_trainer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
