"""The cell host: owns one engine and one trainer, keeps both warm, and switches between them.

Enters: control requests (role changes, steps, publications, checkpoints). Leaves: an engine that serves calls while the
cell is in rollout, gradients and weights while it trains. Invariants: one role at a time; the engine never serves
weights that were not verified against the trainer's; a message of another epoch changes nothing, and a role change that
is asked for again after its answer was lost is answered again.

    drain     rollout -> draining                     the engine still runs its calls, the caller takes them away
    train     (rollout ->) draining -> training       a core works off the open step, a satellite the core's
    rollout   training -> returning -> rollout        a satellite hands its gradient in; the engine gets its weights
              draining -> rollout                     a move that was given up
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from gyre_core.cells.settings import CellSettings
from gyre_core.cells.trainer import CellTrainer
from gyre_core.config.models import TransferConfig
from gyre_core.engine.sglang import SGLangServer
from gyre_core.errors import GyreError, TransferError
from gyre_core.scheduler.cell import CellState, CellStatus, StaleEpochError
from gyre_core.train.parallel import ParallelTrainer
from gyre_core.train.queue_client import CoreUnreachableError
from gyre_core.transfer.weights import WeightPublisher

logger = logging.getLogger(__name__)

PUBLISH_ATTEMPTS = 3  # the second as the first, the third through files
_TARGETS = {"drain": CellState.DRAINING, "train": CellState.TRAINING, "rollout": CellState.ROLLOUT}


class CellHost(CellTrainer):
    """One cell. `start()` returns when engine and trainer are warm; `stop()` leaves no process behind.

    Without engine settings it is a trainer alone: it trains and compares, and publishes to nobody.

    Example: host = CellHost(settings); await host.start(); await host.role("train", epoch=0)
    """

    def __init__(self, settings: CellSettings) -> None:
        super().__init__(settings)
        self.status = CellStatus(cell_id=settings.cell_id, state=CellState.RETURNING, epoch=0)
        self._engine: SGLangServer | None = None
        self._publisher: WeightPublisher | None = None
        self._role_lock = asyncio.Lock()
        self._last_role: tuple[str, int] | None = None  # what was asked for last, and answered
        self._phases: dict[str, float] = {}  # seconds of the last role change
        self._role_s = 0.0
        self._published: int | None = None
        self._memory_released = False  # of the engine's KV pool, while the trainer has it
        self._published_weights = ""  # a satellite: checksum of the core's snapshot that the engine serves

    @property
    def training(self) -> bool:
        """Whether the trainer works off steps now."""
        return self.status.state is CellState.TRAINING

    async def start(self) -> dict[str, float]:
        """Boot the engine and build the trainer side by side; returns seconds by phase."""
        started = time.monotonic()
        settings = self.settings
        self._open_nodes()
        if settings.engine is None:
            await self._on_trainer_thread(self._build_trainer)
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
            self._published = settings.policy_version
        self.status = self.status.moved(CellState.ROLLOUT)
        return {"engine_s": booted - started, "total_s": time.monotonic() - started}

    # -- roles -----------------------------------------------------------------------------------------------------

    async def role(self, to: str, *, epoch: int, policy_version: int | None = None) -> dict[str, Any]:
        """Change the role; the caller has drained the cell's calls. Returns the new status and `phases` (seconds).

        `policy_version`: which version the engine must serve when this returns (to rollout). Raises StaleEpochError for
        an epoch that is not the current one, ValueError for a move the state machine does not have; GyreError when the
        weights are not in the engine: a cell that was returning then still is, and the same request tries again.
        """
        if to not in _TARGETS:
            raise ValueError(f"role {to!r}: use drain, train or rollout")
        async with self._role_lock:
            if (to, epoch) == self._last_role and self.status.state is _TARGETS[to]:
                return {**self.describe(), "phases": dict(self._phases), "seconds": self._role_s}
            again = to == "rollout" and self.status.state is CellState.RETURNING and (to, epoch) == self._last_role
            if epoch != self.status.epoch and not again:
                raise StaleEpochError(
                    f"epoch {epoch} is not the cell's current one ({self.status.epoch}): ask /status again"
                )
            started = time.monotonic()
            self._phases = {}
            if to == "drain":
                self.status = self.status.moved(CellState.DRAINING)
            elif to == "train":
                await self._to_training()
            else:
                self._check_return(policy_version)
                self._last_role = (to, epoch)
                await self._to_rollout(policy_version)
            self._last_role = (to, epoch)
            self._role_s = time.monotonic() - started
            logger.info("%s is in %s, epoch %d: %s", self.settings.cell_id, to, self.status.epoch, self._phases)
            return {**self.describe(), "phases": dict(self._phases), "seconds": self._role_s}

    async def _to_training(self) -> None:
        draining = self.status
        if draining.state is not CellState.DRAINING:
            draining = draining.moved(CellState.DRAINING)
        status = draining.moved(CellState.TRAINING)
        await self._release_memory()
        member = self.member
        if member is not None:
            with self._phase("pull"):
                try:
                    await self.between(member.satellite.pull)
                except GyreError as error:  # it asks again when it works
                    logger.warning("%s has not pulled the weights yet: %s", self.settings.cell_id, error)
        with self._phase("start"):
            self.status = status
            async with self._lock:
                self._go_on()

    async def _to_rollout(self, policy_version: int | None) -> None:
        if self.status.state is CellState.TRAINING:
            self.status = self.status.moved(CellState.RETURNING)
        with self._phase("hand_in"):
            await self.halt()
        await self._resume_memory()
        if policy_version is not None:
            await self._refresh(policy_version, self._phases)
        self.status = self.status.moved(CellState.ROLLOUT)

    async def _release_memory(self) -> None:
        engine = self._engine
        if engine is not None and engine.shares_memory and not self._memory_released:
            with self._phase("release"):
                async with engine.client() as client:
                    await client.release_kv_memory()
            self._memory_released = True

    async def _resume_memory(self) -> None:
        engine = self._engine
        if engine is not None and self._memory_released:
            with self._phase("resume"):
                async with engine.client() as client:
                    await client.resume_kv_memory()
            self._memory_released = False

    def _check_return(self, policy_version: int | None) -> None:
        """A cell that makes weights serves those, unless the caller says which."""
        if self.status.state is CellState.ROLLOUT:
            self.status.moved(CellState.RETURNING)  # refused with its reason
        behind = self.status.state is not CellState.DRAINING and self._published != self.policy_version
        if policy_version is None and behind and self._engine is not None and self.member is None:
            raise GyreError(
                f"{self.status.cell_id} holds version {self.policy_version} but its engine {self._published}: "
                "publish before returning to rollout"
            )

    # -- weights ---------------------------------------------------------------------------------------------------

    async def refresh(self, policy_version: int) -> dict[str, Any]:
        """Bring this version into the cell's own engine, verified; the caller has drained its calls.

        A satellite pulls the core's snapshot first. Raises ValueError for a version that a core does not hold,
        TransferError when weights did not arrive whole or the core offers others, GyreError when it does not answer.
        """
        async with self._role_lock:
            phases: dict[str, float] = {}
            return {**await self._refresh(policy_version, phases), "phases": phases}

    async def _refresh(self, policy_version: int, phases: dict[str, float]) -> dict[str, Any]:
        member = self.member
        served = self._published if self._engine is not None else self.policy_version
        weights = ""
        if member is not None:
            try:
                with self._phase("pull", phases):
                    await self.between(lambda: member.satellite.pull(policy_version))
            except CoreUnreachableError:
                if served != policy_version:
                    raise
            weights = member.satellite.held or ""
        if served == policy_version and weights == self._published_weights:
            return {"version": policy_version, "refreshed": False}
        if self.policy_version != policy_version:
            raise ValueError(
                f"{self.settings.cell_id} holds policy version {self.policy_version}, {policy_version} is asked for"
            )
        if self._engine is None:
            self._published_weights = weights
            return {"version": policy_version, "refreshed": True}
        with self._phase("publish", phases):
            report = await self.publish()
        if report["version"] != policy_version:
            raise TransferError(f"version {report['version']} is in the engine, {policy_version} was asked for")
        self._published_weights = weights
        return {**report, "refreshed": True}

    async def publish(self) -> dict[str, Any]:
        """Trainer's weights into the engine, paused meanwhile and verified by checksum.

        A publication that fails is tried again, on a new engine when the old one had to be stopped, at last through
        files unless the configuration demands Mooncake. `failures` in the report says what went wrong before. Raises
        TransferError when every try failed.
        """

        def exported() -> tuple[int, list[tuple[str, torch.Tensor]]]:
            return self.policy_version, list(self._built_trainer().export_hf())

        version, tensors = await self.between(exported)
        failures: list[str] = []
        while True:
            if self._publisher is None:
                raise GyreError(f"{self.status.cell_id} has no engine to publish to")
            try:
                report = await self._publisher.publish(tensors, version)
            except TransferError as error:
                failures.append(str(error))
                if len(failures) >= PUBLISH_ATTEMPTS:
                    raise
                logger.warning("%s: try %d to publish failed: %s", self.status.cell_id, len(failures), error)
                await self._mend_engine(last_try=len(failures) == PUBLISH_ATTEMPTS - 1)
            else:
                self._published = version
                return {**asdict(report), "failures": failures}

    # -- what is known ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The cell's state as /role and /status answer it; without the engine's key, so that it may be shown."""
        dead = self._engine is not None and not self._engine.running()
        if isinstance(self._trainer, ParallelTrainer) and self._trainer.broken:
            dead = True
        served = self._published if self._engine is not None else None
        return {
            "cell_id": self.status.cell_id,
            "kind": self.settings.kind,
            "state": (CellState.DEAD if dead else self.status.state).value,
            "epoch": self.status.epoch,
            "policy_version": self.policy_version,
            "served_version": served,
            "published_version": served,
            "engine_url": self._engine.url if self._engine is not None else None,
            "members_url": self._hub.url if self._hub is not None else None,
            "step": self.desk.describe() if self.desk is not None else None,
            "member": self.member.describe() if self.member is not None else None,
            "pid": os.getpid(),
        }

    @property
    def engine_key(self) -> str | None:
        """What calls to the engine must bring."""
        return self._engine.api_key if self._engine is not None else None

    async def stop(self) -> None:
        """End the engine and the trainer's thread; a satellite hands in what it has."""
        self.status = CellStatus(cell_id=self.settings.cell_id, state=CellState.DEAD, epoch=self.status.epoch)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        await self._close_trainer()

    # -- parts -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str, phases: dict[str, float] | None = None) -> Iterator[None]:
        kept = self._phases if phases is None else phases
        started = time.monotonic()
        try:
            yield
        finally:
            kept[name] = kept.get(name, 0.0) + time.monotonic() - started

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
            kv_store=settings.kv_store,
            host=settings.host,
            otlp_endpoint=settings.tracing.collector if settings.tracing is not None else None,
            nodes=self._nodes,
        )
        self._engine.start()
        self._memory_released = False
        return self._engine

    def _make_publisher(self, engine: SGLangServer, transfer: TransferConfig) -> WeightPublisher:
        return WeightPublisher(engine, transfer, self.settings.work_dir / "weights" / self.settings.cell_id)

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
