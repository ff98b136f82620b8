"""Publishing the trainer's weights to an engine: whole and verified, or not at all.

    tensors (HF names) -> host, engine's type -> checksums -> [engine pauses, drops its cache]
        -> written (files or one-sided writes) -> engine's checksums compared -> version named -> [engine goes on]

Invariants. The engine never serves weights whose checksums were not compared with the trainer's. When a publication
fails, either the engine still holds the old weights whole (checked by checksum), serves on under the old version and
the TransferError says so; or what it holds is not known, and it is stopped at once: its calls fail and go elsewhere,
and its owner starts it anew. A cancelled publication runs to its end first.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from gyre_core.config.models import TransferConfig
from gyre_core.errors import EngineError, GyreError, SetupError, TransferError
from gyre_core.transfer.layout import (
    EngineRanks,
    device_checksum,
    engine_tensors,
    host_checksum,
    host_tensors,
    overall_checksum,
)
from gyre_core.transfer.local import remove_stale, staged_weights
from gyre_core.transfer.mooncake import MooncakeWriter, RemoteMemory, load_mooncake

logger = logging.getLogger(__name__)

Backend = Literal["local", "mooncake"]
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLUSH_ATTEMPTS = 50  # a pause takes hold within one decoding step; the flush is refused until then
FLUSH_WAIT_S = 0.1


class WeightTarget(Protocol):
    """The control verbs of a connected engine that a publication uses (see SGLangClient)."""

    async def pause(self, mode: Literal["retract"] = "retract") -> None: ...
    async def continue_generation(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def update_weights_from_disk(self, path: str) -> None: ...
    async def weight_version(self) -> int: ...
    async def update_weight_version(self, version: int) -> None: ...
    async def checksums(self) -> list[dict[str, str]]: ...
    async def weight_memory(self, rank: int = 0) -> tuple[str, dict[str, tuple[int, int, int]]]: ...


class WeightEngine(Protocol):
    """An engine that Gyre owns (see SGLangServer)."""

    @property
    def dtype(self) -> str:
        """Type of the engine's weights: float32 or bfloat16."""
        ...

    @property
    def device(self) -> str:
        """cpu or cuda: which of SGLang's two checksums it reports."""
        ...

    @property
    def remote_weights(self) -> bool:
        """Whether the engine's weight memory takes one-sided writes."""
        ...

    @property
    def ranks(self) -> EngineRanks:
        """How its weights are split."""
        ...

    def client(self) -> AbstractAsyncContextManager[WeightTarget]:
        """A connection for the calling event loop."""
        ...

    def stop(self) -> None:
        """End the engine's processes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """How one publication went.

    Example: PublishReport(version=3, backend="local", reason="...", size_bytes=820736, checksum="ff80...", seconds=0.1)
    """

    version: int  # policy version that the engine serves now
    backend: Backend
    reason: str  # why this back end
    size_bytes: int  # of the weights
    checksum: str  # SHA-256 over all parameters' checksums, equal on both sides
    seconds: float  # all of it
    paused_s: float  # of these, the engine did not sample
    phases_s: dict[str, float] = field(default_factory=dict)  # prepare, stage, pause, write, verify, name


def choose_backend(wanted: str, *, remote_weights: bool, mooncake_error: str) -> tuple[Backend, str]:
    """Back end and reason; `mooncake_error` is empty when it loads. Raises SetupError when it is demanded and absent.

    Example: choose_backend("auto", remote_weights=True, mooncake_error="") == ("mooncake", "auto: ...")
    """
    if wanted == "local":
        return "local", "transfer.backend is local"
    obstacle = mooncake_error or ("" if remote_weights else "the engine was started without remote weights")
    if not obstacle:
        return "mooncake", f"transfer.backend is {wanted} and Mooncake loads on both sides"
    if wanted == "mooncake":
        raise SetupError(f"transfer.backend is mooncake, but {obstacle}; install it, or set transfer.backend to local")
    return "local", f"auto: {obstacle}"


class WeightPublisher:
    """Publishes to one engine. Publications come one after the other.

    Example: report = await WeightPublisher(server, TransferConfig(), Path("work/weights")).publish(tensors, version=3)
    """

    def __init__(self, engine: WeightEngine, config: TransferConfig, work_dir: Path) -> None:
        """Raises SetupError when the back end that `config` demands cannot work."""
        self._engine = engine
        self._work_dir = work_dir
        self.backend: Backend
        mooncake_error = ""
        if config.backend != "local" and engine.remote_weights:
            try:
                load_mooncake()
            except SetupError as error:
                mooncake_error = str(error)
        self.backend, self.reason = choose_backend(
            config.backend, remote_weights=engine.remote_weights, mooncake_error=mooncake_error
        )
        self._writer: MooncakeWriter | None = None
        self._served: list[dict[str, str]] | None = None  # by rank, checksums of what the engine serves, once known
        self._lock = asyncio.Lock()
        remove_stale(work_dir)
        logger.info("weights go through %s (%s)", self.backend, self.reason)

    async def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> PublishReport:
        """Make the engine serve `tensors` as policy version `version`.

        `tensors` are all of the model's, by Hugging Face name, on any device. Raises TransferError; the message says
        whether the engine serves the old version on or was stopped.
        """
        async with self._lock:
            started = time.monotonic()
            weights = await asyncio.to_thread(host_tensors, tensors, DTYPES[self._engine.dtype])
            work = asyncio.ensure_future(self._publish(weights, version, started))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    await work
                raise

    async def _publish(self, weights: dict[str, torch.Tensor], version: int, started: float) -> PublishReport:
        clock = _Phases(started)
        checksum_of = device_checksum if self._engine.device == "cuda" else host_checksum
        async with self._engine.client() as target, contextlib.AsyncExitStack() as stack:
            try:
                old_version = await target.weight_version()
                old = self._served or await target.checksums()
            except EngineError as error:
                raise TransferError(f"version {version} was not published, nothing was changed: {error}") from error
            prepared = await asyncio.to_thread(self._split, weights, old)
            wanted = await asyncio.to_thread(_checksums, prepared, checksum_of)
            clock.mark("prepare")
            folder = None
            if self.backend == "local":
                folder = stack.enter_context(staged_weights(weights, self._work_dir))
            clock.mark("stage")
            paused = time.monotonic()
            try:
                await target.pause("retract")
                await _flush(target)
                clock.mark("pause")
                if folder is not None:
                    await target.update_weights_from_disk(str(folder))
                else:
                    await self._write_remote(target, prepared)
                clock.mark("write")
                held = await target.checksums()
                if held != wanted:
                    mine, theirs = _named(wanted), _named(held)
                    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
                    raise TransferError(f"{len(wrong)} of {len(mine)} parameters arrived changed, {wrong[0]} first")
                clock.mark("verify")
                await target.update_weight_version(version)
                await target.continue_generation()
            except Exception as error:
                raise await self._after_failure(target, error, version, old, old_version) from error
            clock.mark("name")
        self._served = wanted
        return PublishReport(
            version=version,
            backend=self.backend,
            reason=self.reason,
            size_bytes=sum(tensor.nbytes for part in prepared for tensor in part.values()),
            checksum=overall_checksum(_named(wanted)),
            seconds=time.monotonic() - started,
            paused_s=time.monotonic() - paused,
            phases_s=clock.seconds,
        )

    def _split(
        self, weights: Mapping[str, torch.Tensor], names: Sequence[Mapping[str, str]]
    ) -> list[dict[str, torch.Tensor]]:
        """What each rank of the engine is to hold."""
        ranks = self._engine.ranks
        if len(names) != ranks.count:
            raise TransferError(f"the engine has {len(names)} ranks, engine.tensor_parallel says {ranks.count}")
        return [engine_tensors(weights, held, ranks=ranks, rank=rank) for rank, held in enumerate(names)]

    async def _write_remote(self, target: WeightTarget, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for rank, prepared in enumerate(parts):
            await self._write_rank(target, rank, prepared)

    async def _write_rank(self, target: WeightTarget, rank: int, prepared: Mapping[str, torch.Tensor]) -> None:
        session, memory = await target.weight_memory(rank)
        if memory.keys() != prepared.keys():
            raise TransferError("the engine's registered memory and its parameters have different names")
        names = list(prepared)
        targets = [
            RemoteMemory(address=address, num_elements=count, itemsize=size)
            for address, count, size in (memory[name] for name in names)
        ]

        def write() -> None:
            if self._writer is None:
                self._writer = MooncakeWriter()
            self._writer.write(session, [prepared[name] for name in names], targets)

        try:
            await asyncio.to_thread(write)
        except BaseException:
            self._writer = None
            raise

    async def _after_failure(
        self, target: WeightTarget, error: Exception, version: int, old: Sequence[Mapping[str, str]], old_version: int
    ) -> TransferError:
        """Serve the old weights on if the engine holds them whole, else stop it; returns the error to raise."""
        what = f"version {version} was not published: {error}"
        self._served = None
        try:
            if await target.checksums() == old:
                await target.update_weight_version(old_version)
                await target.continue_generation()
                logger.warning("%s; the engine serves the old weights", what)
                return TransferError(f"{what}. The engine holds the old weights whole and serves them on")
        except GyreError as second:
            logger.error("the engine does not tell what it holds: %s", second)
        await asyncio.to_thread(self._engine.stop)
        logger.error("%s; the engine was stopped", what)
        return TransferError(f"{what}. What the engine holds is not known, so it was stopped: start it anew")

    def close(self) -> None:
        """Let go of Mooncake's engine."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _checksums(
    parts: Sequence[Mapping[str, torch.Tensor]], checksum_of: Callable[[torch.Tensor], str]
) -> list[dict[str, str]]:
    return [{name: checksum_of(tensor) for name, tensor in part.items()} for part in parts]


def _named(checksums: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of all ranks in one; an engine of one rank has the plain names."""
    if len(checksums) == 1:
        return dict(checksums[0])
    return {f"rank{rank}.{name}": value for rank, part in enumerate(checksums) for name, value in part.items()}


async def _flush(target: WeightTarget) -> None:
    """Drop the prefix cache. Its reply also proves that the pause took hold: the engine handles messages in order."""
    for attempt in range(FLUSH_ATTEMPTS):
        try:
            return await target.flush_cache()
        except EngineError as error:
            if not error.retryable or attempt == FLUSH_ATTEMPTS - 1:
                raise
            await asyncio.sleep(FLUSH_WAIT_S)


class _Phases:
    """Seconds between marks."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = started

    def mark(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now
