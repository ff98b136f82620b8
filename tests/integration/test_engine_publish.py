"""Weights into a real SGLang server, by both back ends; and servers that die, fail or are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import torch

from gyre_core.config.models import TransferConfig
from gyre_core.errors import EngineError, TransferError
from gyre_core.transfer.mooncake import MooncakeWriter
from gyre_core.transfer.weights import WeightPublisher
from gyre_core.types import SamplingParams, VersionSpan
from tests.support.sglang import RunningEngine, make_server
from tests.support.tiny_model import greedy_tokens, save_tiny_model, tiny_model, tiny_weights

pytestmark = pytest.mark.integration

PROMPT = [(5 * i) % 250 for i in range(30)]


@pytest.fixture
async def base_weights(sglang_server: RunningEngine, tmp_path: Path) -> AsyncIterator[None]:
    """The server's own weights and version are put back afterwards."""
    yield
    await publisher(sglang_server, "local", tmp_path).publish(tiny_weights(0).items(), 0)


def publisher(engine: RunningEngine, backend: str, tmp_path: Path) -> WeightPublisher:
    return WeightPublisher(engine.server, TransferConfig(backend=backend), tmp_path)  # type: ignore[arg-type]


async def greedy(engine: RunningEngine, num_tokens: int = 4) -> tuple[list[int], tuple[VersionSpan, ...]]:
    async with engine.server.client() as client:
        result = await client.generate(PROMPT, SamplingParams(max_new_tokens=num_tokens, temperature=0.0), rid="greedy")
    return result.output_ids.tolist(), result.spans


def expected(seed: int, num_tokens: int = 4) -> list[int]:
    return greedy_tokens(seed, PROMPT, num_tokens)


@pytest.mark.parametrize("backend", ["local", "mooncake"])
@pytest.mark.usefixtures("base_weights")
async def test_publish_serves_the_new_weights_under_the_new_version(
    sglang_server: RunningEngine, tmp_path: Path, backend: str
) -> None:
    target = publisher(sglang_server, backend, tmp_path)
    for version, seed in ((1, 1), (2, 2)):
        report = await target.publish(tiny_weights(seed).items(), version)
        assert report.backend == backend
        assert report.size_bytes == sum(tensor.nbytes for tensor in tiny_weights(seed).values())
        tokens, spans = await greedy(sglang_server)
        assert tokens == expected(seed)[: len(tokens)]
        assert spans == (VersionSpan(version=version, start=0, end=len(tokens)),)
    target.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("base_weights")
async def test_publish_during_a_call_gives_it_spans_of_both_versions(
    sglang_server: RunningEngine, tmp_path: Path
) -> None:
    target = publisher(sglang_server, "local", tmp_path)
    async with sglang_server.server.client() as client:
        params = SamplingParams(max_new_tokens=900, seed=2)
        call = asyncio.create_task(client.generate(PROMPT, params, rid="across", cache_salt="0"))
        await client.generate(PROMPT, SamplingParams(max_new_tokens=5, seed=4), rid="tick", cache_salt="0")
        await target.publish(tiny_weights(3).items(), 7)
        result = await call
    assert [span.version for span in result.spans] == [0, 7]
    boundary = result.spans[0].end
    ids = torch.tensor([PROMPT + result.output_ids.tolist()])
    for seed, span in ((0, slice(0, boundary)), (3, slice(boundary, len(result.output_ids)))):
        with torch.no_grad():
            logprobs = torch.log_softmax(tiny_model(seed)(ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
        picked = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
        # Each part was sampled by its own weights over the whole prefix: nothing of the old cache was kept.
        assert abs(picked[span] - result.logprobs[span]).max() < 1e-4


@pytest.mark.usefixtures("base_weights")
async def test_publish_failed_before_a_byte_was_written_serves_the_old_weights(
    sglang_server: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await greedy(sglang_server)

    def fail(*_: object) -> int:
        raise TransferError("the link is down")

    monkeypatch.setattr(MooncakeWriter, "write", fail)
    with pytest.raises(TransferError, match=r"link is down\. The engine holds the old weights whole"):
        await publisher(sglang_server, "mooncake", tmp_path).publish(tiny_weights(1).items(), 1)
    assert await greedy(sglang_server) == before


async def test_publish_broken_off_half_way_never_serves_half_new_weights(tmp_path: Path) -> None:
    """One real server of its own: it is stopped by the failed publication."""
    server = make_server(save_tiny_model(tmp_path / "model"), tmp_path / "engine.log")
    with server:
        engine = RunningEngine(server, tmp_path / "model")
        target = publisher(engine, "mooncake", tmp_path)
        real = MooncakeWriter.write

        def half(self: MooncakeWriter, session: str, sources: list, targets: list) -> int:
            real(self, session, sources[: len(sources) // 2], targets[: len(targets) // 2])
            raise TransferError("the link went down")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MooncakeWriter, "write", half)
            with pytest.raises(TransferError, match="so it was stopped"):
                await target.publish(tiny_weights(1).items(), 1)
        assert not server.running()
        async with server.client() as client:
            with pytest.raises(EngineError) as caught:
                await client.generate(PROMPT, SamplingParams(max_new_tokens=1), rid="after")
        assert caught.value.retryable


STARTER = """
import sys, time
from pathlib import Path
from gyre_core.config.models import EngineConfig
from gyre_core.engine.sglang import SGLangServer
server = SGLangServer(EngineConfig(), Path(sys.argv[1]), context_length=1024, slots=2, log_path=Path(sys.argv[2]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_parent_killed_while_the_server_boots_leaves_no_process(tmp_path: Path) -> None:
    model, log = save_tiny_model(tmp_path / "model"), tmp_path / "engine.log"
    command = [sys.executable, "-c", STARTER, str(model), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        guard = psutil.Process(int(parent.stdout.readline()))  # type: ignore[union-attr]
        deadline = time.monotonic() + 60
        while not guard.children():  # the launcher runs
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family = [guard, *guard.children(recursive=True)]
        os.kill(parent.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def test_server_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    server = make_server(save_tiny_model(tmp_path / "model"), tmp_path / "engine.log")
    server.start()
    with pytest.raises(EngineError, match=r"not ready after 0\.2 s"):
        server.wait_ready(0.2)
    assert not server.running()
