"""An emulated cell: the real cell host around an engine and a trainer that take the time a cost model says.

Enters: CellSettings with `emulate`. Leaves: a host with the same states, epochs, steps, members and verbs; calls,
micro-steps, optimizer steps, publications and role changes last as long as `[emulate]` says, compressed. Nothing else
knows that it is emulated: fleet, proxies, scheduler and flow are those of any run. What engine and trainer did is
written to `emulated/<cell>.json` in the run's folder, on the cluster's clock.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer

from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings
from gyre_core.config.emulation import EmulationConfig, account_path
from gyre_core.config.models import TransferConfig
from gyre_core.engine.emulated import EmulatedEngine
from gyre_core.engine.emulated_kv import SharedPages
from gyre_core.engine.emulated_server import EmulatedServer
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.errors import EngineError, TransferError
from gyre_core.process import new_secret
from gyre_core.train.emulated import EmulatedTrainer
from gyre_core.transfer.layout import host_checksum, overall_checksum
from gyre_core.transfer.weights import PublishReport

logger = logging.getLogger(__name__)

_LETTERS = "abcdefghijklmnop"
_VOCAB_SIZE = 2**20  # ids are the proxy's to check


class EmulatedSGLang:
    """What a host asks of an SGLangServer, of an emulated one in this process."""

    shares_memory = False  # the switch's time has it in

    def __init__(self, emulation: EmulationConfig, settings: CellSettings) -> None:
        self.api_key = new_secret()
        self.url = ""
        self.engine: EmulatedEngine | None = None
        self._emulation = emulation
        self._settings = settings
        self._server: EmulatedServer | None = None

    def start(self) -> None:
        """Serve at once."""
        settings = self._settings
        tokenizer: Any = Tokenizer.from_file(str(settings.model_path / "tokenizer.json"))
        self.engine = EmulatedEngine(
            self._emulation,
            slots=settings.slots,
            letters=[tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in _LETTERS],
            version=settings.policy_version,
            shared=SharedPages(settings.work_dir / "emulated" / "kv"),
        )
        self._server = EmulatedServer(self.engine, api_key=self.api_key)
        self._server.start()
        self.url = self._server.url

    def wait_ready(self, timeout_s: float | None = None) -> float:
        """It is."""
        return 0.0

    def running(self) -> bool:
        """Whether it serves."""
        return self._server is not None and self._server.running()

    def stop(self) -> None:
        """Calls end with what they have."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def client(self) -> SGLangClient:
        """For the calling event loop."""
        return SGLangClient(self.url, vocab_size=_VOCAB_SIZE, api_key=self.api_key)


class EmulatedPublisher:
    """Weights that take their time to arrive, and then do: the engine names the new version."""

    def __init__(self, engine: EmulatedSGLang, emulation: EmulationConfig) -> None:
        self._engine = engine
        self._emulation = emulation

    async def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> PublishReport:
        """Make the engine serve them as `version`; raises TransferError."""
        started = time.monotonic()
        weights = dict(tensors)
        async with self._engine.client() as target:
            try:
                await target.pause("retract")
                await asyncio.sleep(self._emulation.wall_s(self._emulation.switch.publish_s))
                await target.update_weight_version(version)
                await target.continue_generation()
            except EngineError as error:
                raise TransferError(f"version {version} was not published: {error}") from error
        seconds = time.monotonic() - started
        return PublishReport(
            version=version,
            backend="local",
            reason="emulated",
            size_bytes=sum(tensor.nbytes for tensor in weights.values()),
            checksum=overall_checksum({name: host_checksum(tensor) for name, tensor in weights.items()}),
            seconds=seconds,
            paused_s=seconds,
        )

    def close(self) -> None:
        """Nothing to let go."""


class EmulatedCellHost(CellHost):
    """See the module.

    Example: host = EmulatedCellHost(settings); await host.start()
    """

    def __init__(self, settings: CellSettings) -> None:
        super().__init__(settings)
        assert settings.emulate is not None, "an emulated cell has costs"
        self._emulation: EmulationConfig = settings.emulate
        self._since_s = time.monotonic()
        self._switch_s = 0.0
        self._trained_s = 0.0  # wall seconds in the training role, without the one that lasts
        self._trains_since_s: float | None = None

    async def _to_training(self) -> None:
        await self._take(self._emulation.switch.to_train_s)
        await super()._to_training()
        self._trains_since_s = time.monotonic()

    async def _to_rollout(self, policy_version: int | None) -> None:
        await super()._to_rollout(policy_version)
        self._trained_s, self._trains_since_s = self._training_role_s(), None
        await self._take(self._emulation.switch.to_rollout_s)
        self._write_account()

    async def stop(self) -> None:
        self._write_account()
        await super().stop()

    async def _take(self, seconds: float) -> None:
        self._switch_s += seconds
        with self._phase("switch"):
            await asyncio.sleep(self._emulation.wall_s(seconds))

    def _start_engine(self) -> Any:
        engine = EmulatedSGLang(self._emulation, self.settings)
        self._engine = engine  # type: ignore[assignment]  # what the host asks of an engine, and no more
        engine.start()
        return engine

    def _make_publisher(self, engine: Any, transfer: TransferConfig) -> Any:
        return EmulatedPublisher(engine, self._emulation)

    def _open_trainer(self) -> Any:
        return EmulatedTrainer(self.settings.train, self._emulation)

    def _training_role_s(self) -> float:
        since_s = self._trains_since_s
        return self._trained_s + (0.0 if since_s is None else time.monotonic() - since_s)

    def _write_account(self) -> None:
        """What this process did so far, on the cluster's clock; whole or absent."""
        engine, trainer = self._engine, self._trainer
        emulated: Any = getattr(engine, "engine", None)
        account = {
            "cell_id": self.settings.cell_id,
            "seconds": (time.monotonic() - self._since_s) * self._emulation.compression,
            "serving_s": emulated.busy_s if emulated is not None else 0.0,
            "training_role_s": self._training_role_s() * self._emulation.compression,
            "training_s": getattr(trainer, "busy_s", 0.0),
            "switch_s": self._switch_s,
            "targets_trained": getattr(trainer, "targets_trained", 0),
            **(emulated.counters if emulated is not None else {}),
        }
        path = account_path(self.settings.work_dir, self.settings.cell_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(account))
            part.replace(path)
