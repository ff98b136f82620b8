"""A real SGLang server of two ranks, on one machine and on two: each gets its part of the weights, verified."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.config.models import EngineConfig, TransferConfig
from gyre_core.engine.sglang import SGLangServer
from gyre_core.nodes import NodeHub
from gyre_core.transfer.weights import WeightPublisher
from gyre_core.types import SamplingParams
from tests.support.nodes import running_agent
from tests.support.tiny_model import CONTEXT_LENGTH, greedy_tokens, save_tiny_model, tiny_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

PROMPT = [(5 * i) % 250 for i in range(30)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one machine", marks=pytest.mark.slow), pytest.param(2, id="two machines")],
)
def split_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.ExitStack() as stack:
        nodes = None
        if request.param == 2:
            nodes = stack.enter_context(NodeHub("127.0.0.1", 0, "key-of-the-cell", count=2))
            stack.enter_context(running_agent(nodes, folder, key="key-of-the-cell"))
        yield stack.enter_context(
            SGLangServer(
                EngineConfig(max_total_tokens=4096, tensor_parallel=2, nodes=request.param),
                save_tiny_model(folder / "model"),
                context_length=CONTEXT_LENGTH,
                slots=4,
                log_path=folder / "engine.log",
                nodes=nodes,
            )
        )


async def greedy(server: SGLangServer) -> list[int]:
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    async with server.client() as client:
        return (await client.generate(PROMPT, params, rid=os.urandom(4).hex())).output_ids.tolist()


@pytest.mark.parametrize("backend", ["local", "mooncake"])
async def test_publish_reaches_every_rank(split_server: SGLangServer, tmp_path: Path, backend: str) -> None:
    publisher = WeightPublisher(split_server, TransferConfig(backend=backend), tmp_path)  # type: ignore[arg-type]
    for version, seed in ((1, 11), (2, 12)):
        report = await publisher.publish(tiny_weights(seed).items(), version)
        assert (report.backend, report.version) == (backend, version)
        tokens = await greedy(split_server)
        assert tokens == greedy_tokens(seed, PROMPT, 4)[: len(tokens)]
        async with split_server.client() as client:
            assert await client.weight_version() == version
            assert len(await client.checksums()) == 2
    publisher.close()
