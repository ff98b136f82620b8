"""The real cell host around parts that take no time: a fake engine, a trainer that counts targets. One process each.

Any phase can be stopped at by name (`POST /fake/block`), so that a test can kill or stop the process right there. The
engine's greedy outputs depend on the tokens before them only: a call that is moved must end as one that was not. The
trainer's weights are the counts of all targets trained so far: what was trained twice or never can be read off them.
"""

import asyncio
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import uvicorn
import xxhash
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import pre_tokenizers

import gyre_core.cells.app as cell_app
from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings
from gyre_core.config.emulation import EmulationConfig
from gyre_core.engine.fake import FakeEngine, FakeEngineServer
from gyre_core.train.emulated import EmulatedTrainer
from gyre_core.train.packing import PackedMicroStep
from gyre_core.train.stats import MicroStepStats
from gyre_core.transfer.branches import branches_from_ipc, branches_to_ipc
from gyre_core.transfer.layout import host_checksum, overall_checksum
from gyre_core.transfer.weights import PublishReport
from tests.support.members import group

# The ids of tests/support/tokenizer.py, without importing transformers: the bytes' alphabet, then the special tokens.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
START, END, VOCAB_SIZE = 257, 258, 320
LETTERS = [ALPHABET.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
TURN = len("assistant\n")
LENGTH = 40  # tokens of one reply
INSTANT = EmulationConfig(compression=1e12)
PR_SET_PDEATHSIG = 1

branches_from_ipc(branches_to_ipc(group("warm")))  # its first call imports pandas: once, before all forks


def reply(ids: Sequence[int]) -> list[int]:
    """What comes after these ids: letters by what is before the turn, so many since its beginning, then the end."""
    known = list(ids)
    begun = len(known) - 1 - known[::-1].index(START)
    digest = xxhash.xxh3_128_digest(repr(known[: begun + 1]).encode())
    already = len(known) - begun - 1 - TURN
    return [LETTERS[digest[i % 16] % 26] for i in range(already, LENGTH)] + [END]


class Blocks:
    """A place in the process where it stops, when a test asked for it."""

    def __init__(self) -> None:
        self.at = ""
        self.reached = ""
        self._go = threading.Event()

    def set(self, at: str) -> None:
        """Stop there from now on; an empty name lets it go on."""
        self.at, self.reached = at, ""
        self._go.clear() if at else self._go.set()

    def pass_by(self, name: str) -> None:
        """In the trainer's thread, or in the engine's event loop, which then stands still as a hung engine's does."""
        if name == self.at:
            self.reached = name
            self._go.wait()

    async def pass_by_async(self, name: str) -> None:
        """In the host's event loop, which goes on with other requests."""
        await asyncio.to_thread(self.pass_by, name)


class FastEngine(FakeEngine):
    """Its aborts can be stopped at. The weights that it serves are kept, to be looked at."""

    def __init__(self, blocks: Blocks, version: int) -> None:
        super().__init__(reply, vocab_size=VOCAB_SIZE, stop_token_ids=[END], version=version)
        self.blocks = blocks
        self.weights: list[float] = []

    def abort_calls(self, rid: str | None = None) -> None:
        self.blocks.pass_by("abort")
        super().abort_calls(rid)


class FastServer(FakeEngineServer):
    """What a host asks of an SGLangServer."""

    alive = True
    shares_memory = False  # with the trainer

    def wait_ready(self, timeout_s: float | None = None) -> float:
        return 0.0

    def running(self) -> bool:
        return self.alive


class FastPublisher:
    """Weights arrive at once."""

    def __init__(self, engine: FastEngine) -> None:
        self._engine = engine

    async def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> PublishReport:
        await self._engine.blocks.pass_by_async("load")
        weights = dict(tensors)
        self._engine.set_version(version)
        self._engine.weights = weights["counts"].tolist()
        await self._engine.blocks.pass_by_async("verify")
        checksum = overall_checksum({name: host_checksum(tensor) for name, tensor in weights.items()})
        return PublishReport(
            version=version, backend="local", reason="fast", size_bytes=0, checksum=checksum, seconds=0.0, paused_s=0.0
        )

    def close(self) -> None:
        """Nothing to let go."""


class FastTrainer(EmulatedTrainer):
    """Micro-steps can be stopped at."""

    blocks: Blocks

    def micro_step(self, packed: PackedMicroStep, reference_logprobs: Any = None) -> MicroStepStats:
        self.blocks.pass_by("compute")
        return super().micro_step(packed, reference_logprobs)


class FastHost(CellHost):
    """See the module."""

    def __init__(self, settings: CellSettings) -> None:
        super().__init__(settings)
        self.blocks = Blocks()

    async def role(self, to: str, *, epoch: int, policy_version: int | None = None) -> dict[str, Any]:
        await self.blocks.pass_by_async(to)
        answer = await super().role(to, epoch=epoch, policy_version=policy_version)
        await self.blocks.pass_by_async(f"{to} is done")
        return answer

    def _start_engine(self) -> Any:
        engine = FastEngine(self.blocks, self.settings.policy_version)
        server = FastServer(engine, api_key=f"key-of-{os.getpid()}")
        server.start()
        self._engine = server  # type: ignore[assignment]
        return server

    def _make_publisher(self, engine: Any, transfer: Any) -> Any:
        return FastPublisher(engine.engine)

    def _open_trainer(self) -> Any:
        trainer = FastTrainer(self.settings.train, INSTANT)
        trainer.blocks = self.blocks
        return trainer


def add_test_routes(app: Any, host: FastHost) -> None:
    """What a test asks and does, beside the control API and behind its secret."""

    async def see(_: Request) -> Response:
        server: Any = host._engine
        return JSONResponse(
            {
                "blocked": host.blocks.reached,
                "running": [len(call.output_ids) for call in server.engine.calls if not call.finished],
                "served_weights": server.engine.weights[:64] or [0.0] * 64,
            }
        )

    async def block(request: Request) -> Response:
        host.blocks.set((await request.json())["at"])
        return JSONResponse({})

    async def hold(request: Request) -> Response:
        server: Any = host._engine
        after = (await request.json())["after"]
        server.engine.release() if after is None else server.engine.hold(after)
        return JSONResponse({})

    async def end_engine(_: Request) -> Response:
        server: Any = host._engine
        server.alive = False
        await asyncio.to_thread(server.stop)
        return JSONResponse({})

    posts = {"/fake/block": block, "/fake/hold": hold, "/fake/end_engine": end_engine}
    app.router.routes += [Route("/fake/see", see), *(Route(path, act, methods=["POST"]) for path, act in posts.items())]


def serve(text: str, log_path: str) -> None:
    """The process's whole life: settings as JSON, and its log."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    logging.basicConfig(level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    settings = CellSettings.model_validate_json(text, strict=False)
    host = FastHost(settings)
    cell_app._host = lambda _: host  # type: ignore[attr-defined]
    app = cell_app.create_app(settings)
    add_test_routes(app, host)
    uvicorn.run(app, host="127.0.0.1", port=settings.port, log_level="warning", access_log=False)
