"""Continuity on real engines: calls that move between two servers equal those that never moved, token for token."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gyre_core.engine.sglang import SGLangServer
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import SamplingParams
from tests.support.proxies import ADMIN_HEADERS, Harness, ProxyUnderTest, running_proxy, serving
from tests.support.sglang import RunningEngine, make_server
from tests.support.tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.integration

NUM_TOKENS = 500  # the tiny model's greedy outputs below end by themselves later
NUM_MOVES = 10
TICK_TOKENS = 8  # sampled beside the moved calls before each move: calls on an engine run in step with each other


@pytest.fixture(scope="module")
def second_server(sglang_server: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with make_server(sglang_server.model_path, tmp_path_factory.mktemp("second") / "engine.log") as server:
        yield server


@asynccontextmanager
async def proxied(
    first: RunningEngine, second: SGLangServer, **settings: Any
) -> AsyncIterator[tuple[ProxyUnderTest, dict[str, SGLangClient]]]:
    """A proxy in front of both servers; control clients of them. Both serve version 0 again in the end."""
    async with first.server.client(timeout_s=120) as one, second.client(timeout_s=120) as two:
        control = {first.url: one, second.url: two}
        calls: Any = {first.url: first.server.client(timeout_s=120), second.url: second.client(timeout_s=120)}
        try:
            async with running_proxy(first.model_path, calls, context_length=CONTEXT_LENGTH, **settings) as proxy:
                yield proxy, control
        finally:
            for client in control.values():
                await client.update_weight_version(0)


async def greedy_session(proxy: ProxyUnderTest, rollout_id: str) -> Harness:
    return await proxy.open(rollout_id, sampling={"temperature": 0.0, "max_new_tokens": NUM_TOKENS})


async def ask(harness: Harness, text: str, max_tokens: int = NUM_TOKENS, **fields: Any) -> Any:
    return await harness.chat([{"role": "user", "content": text}], max_tokens=max_tokens, **fields)


async def list_engines(proxy: ProxyUnderTest, versions: dict[str, int]) -> None:
    rows = [{"url": url, "slots": 8, "version": version} for url, version in versions.items()]
    body = {"engines": rows, "policy_version": max(versions.values(), default=0)}
    assert (await proxy.client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)).status_code == 200


async def drain(proxy: ProxyUnderTest, url: str) -> dict[str, Any]:
    reply = (await proxy.client.post("/admin/drain", json={"url": url}, headers=ADMIN_HEADERS)).json()
    assert (reply["left"], reply["given_up"]) == (0, 0)
    return reply


async def tick(control: dict[str, SGLangClient], url: str, name: str) -> None:
    """Come back when the calls on an engine have gone on by about `TICK_TOKENS`."""
    params = SamplingParams(max_new_tokens=TICK_TOKENS, temperature=0.0)
    await control[url].generate([9, 8, 7], params, rid=f"tick-{name}", cache_salt="tick")


async def busiest(proxy: ProxyUnderTest) -> str:
    rows = (await proxy.status())["engines"]
    return max(rows, key=lambda row: row["busy"])["url"]


async def unmoved(proxy: ProxyUnderTest, url: str, text: str, num_tokens: int = NUM_TOKENS) -> Trajectory:
    """The same request on one engine."""
    await list_engines(proxy, {url: 0})
    harness = await greedy_session(proxy, "unmoved")
    assert (await ask(harness, text, num_tokens)).status_code == 200
    return await harness.seal()


def check_equal(moved: Trajectory, reference: Trajectory, num_tokens: int = NUM_TOKENS) -> None:
    nodes = [trajectory.tree.nodes[trajectory.calls[0].node_id] for trajectory in (moved, reference)]
    assert len(nodes[1].token_ids) == num_tokens
    assert nodes[0].token_ids.tolist() == nodes[1].token_ids.tolist()
    assert np.abs(nodes[0].logprobs - nodes[1].logprobs).max() <= 1e-5


async def test_call_moved_ten_times_between_servers_equals_the_unmoved_one_through_new_versions(
    sglang_server: RunningEngine, second_server: SGLangServer
) -> None:
    """With its stream open. Versions are given new names between moves, so that the spans tell who sampled what."""
    urls = [sglang_server.url, second_server.url]
    async with (
        proxied(sglang_server, second_server, keepalive_s=0.05) as (proxy, control),
        serving(proxy),
    ):
        reference = await unmoved(proxy, urls[0], "go on and on")
        harness = await greedy_session(proxy, "moved")
        versions = {urls[0]: 0}
        parts = []
        await list_engines(proxy, versions)
        call = asyncio.create_task(ask(harness, "go on and on", stream=True))
        await proxy.until(in_flight=1, waiting=0)
        for number in range(NUM_MOVES):
            source, target = urls[number % 2], urls[(number + 1) % 2]
            version = number // 3
            await tick(control, source, f"{number}")
            await control[target].update_weight_version(version)
            await list_engines(proxy, {**versions, target: version})
            report = await drain(proxy, source)
            assert report["moved"] == 1, "the call was to last for all moves"
            parts.append(report["partial_tokens"])
            versions = {target: version}
        assert (await call).status_code == 200
        moved = await harness.seal()
        check_equal(moved, reference)
        assert all(parts)
        starts = np.cumsum([0, *parts]).tolist()
        spans = [(span.version, span.start) for span in moved.tree.nodes[moved.calls[0].node_id].spans]
        assert spans == [(0, 0), (1, starts[4]), (2, starts[7]), (3, starts[10])]
        counters = (await proxy.status())["counters"]
        assert (counters["calls_moved"], counters["calls_resumed"], counters["engine_errors"]) == (10, 10, 0)
        assert counters["tokens_recomputed"] > 0


async def test_calls_moved_together_equal_the_unmoved_ones(
    sglang_server: RunningEngine, second_server: SGLangServer
) -> None:
    urls = [sglang_server.url, second_server.url]
    texts, num_tokens = ["go on and on", "write a poem", "count to a thousand"], 350
    async with proxied(sglang_server, second_server) as (proxy, control):
        references = [await unmoved(proxy, urls[1], text, num_tokens) for text in texts]
        harnesses = [await greedy_session(proxy, f"r{index}") for index in range(len(texts))]
        await list_engines(proxy, dict.fromkeys(urls, 0))
        calls = [
            asyncio.create_task(ask(harness, text, num_tokens)) for harness, text in zip(harnesses, texts, strict=True)
        ]
        await proxy.until(in_flight=3, waiting=0)
        moved = 0
        for number in range(NUM_MOVES):
            source = await busiest(proxy)
            await tick(control, source, f"{number}")
            moved += (await drain(proxy, source))["moved"]
            await list_engines(proxy, dict.fromkeys(urls, 0))
        assert [reply.status_code for reply in await asyncio.gather(*calls)] == [200] * 3
        assert moved >= NUM_MOVES
        for harness, reference in zip(harnesses, references, strict=True):
            check_equal(await harness.seal(), reference, num_tokens)
