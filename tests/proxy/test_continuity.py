"""Continuity: a long greedy generation that moves between engines is the one that never moved, token for token.

The fake engines sample what depends only on the ids before and the weights' version, as greedy sampling does. Each is
held after some tokens, so that every move happens where the test says.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gyre_core.engine.fake import FakeCall, FakeEngine
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Json, SamplingParams, VersionSpan
from tests.support.proxies import ADMIN_HEADERS, Harness, ProxyUnderTest, assert_exact, running_proxy, serving
from tests.support.tokenizer import VOCAB_SIZE, encode

NUM_TOKENS = 96
STOPS = encode("<|im_end|><|endoftext|>")
USER = [{"role": "user", "content": "write a long text"}]


class CountingEngine(FakeEngine):
    """Knows how many calls it had at once. Never ends a call by itself before its limit."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, seed=11, stop_token_ids=STOPS, mean_length=2**60, version=version)
        self.peak = 0

    async def run(self, rid: str, input_ids: list[int], params: Json, cache_salt: str) -> tuple[FakeCall, Json]:
        self.peak = max(self.peak, 1 + len(self._running))
        return await super().run(rid, input_ids, params, cache_salt)


def make_engines(number: int) -> dict[str, CountingEngine]:
    return {f"http://e{i}": CountingEngine() for i in range(number)}


async def list_engines(proxy: ProxyUnderTest, engines: dict[str, CountingEngine], *, slots: int = 8) -> None:
    """All take calls, with the versions that they have."""
    rows = [{"url": url, "slots": slots, "version": engine.version} for url, engine in engines.items()]
    body = {"engines": rows, "policy_version": max(engine.version for engine in engines.values())}
    reply = await proxy.client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)
    assert reply.status_code == 200, reply.text


async def drain(proxy: ProxyUnderTest, url: str) -> dict[str, Any]:
    reply = await proxy.client.post("/admin/drain", json={"url": url}, headers=ADMIN_HEADERS)
    assert reply.status_code == 200, reply.text
    assert reply.json()["left"] == reply.json()["given_up"] == 0
    return reply.json()


async def assert_unmoved(trajectory: Trajectory, spans: Sequence[tuple[int, int]]) -> None:
    """The trajectory's only call is what one engine samples whose weights change after `spans`: (version, tokens)."""
    (record,) = trajectory.calls
    path = trajectory.tree.path_tokens(record.node_id).tolist()
    node = trajectory.tree.nodes[record.node_id]
    ids = path[: record.prompt_tokens]
    logprobs: list[float] = []
    expected_spans = []
    for version, num_tokens in spans:
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, stop_token_ids=tuple(STOPS))
        part = await CountingEngine(version).generate(ids, params, rid="unmoved")
        start = len(ids) - record.prompt_tokens
        expected_spans.append(VersionSpan(version=version, start=start, end=start + num_tokens))
        ids = ids + part.output_ids.tolist()
        logprobs += part.logprobs.tolist()
    assert path == ids
    assert len(node.token_ids) == NUM_TOKENS
    assert np.abs(node.logprobs - np.array(logprobs, np.float32)).max() <= 1e-5
    assert node.spans == tuple(expected_spans)


async def move(proxy: ProxyUnderTest, engines: dict[str, CountingEngine], source: str, num_tokens: int) -> None:
    """Take the only call off `source`, where it is held after `num_tokens`."""
    await engines[source].running(tokens=num_tokens)
    report = await drain(proxy, source)
    assert (report["moved"], report["partial_tokens"]) == (1, num_tokens)


@pytest.mark.parametrize("seed", range(3))
async def test_generation_moved_ten_times_equals_the_unmoved_one(model_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engines = make_engines(2)
    sizes = [rng.randint(1, 9) for _ in range(10)]
    async with running_proxy(model_path, dict(engines)) as proxy:
        harness = await proxy.open(sampling={"temperature": 0.0, "max_new_tokens": NUM_TOKENS})
        for engine in engines.values():
            engine.hold(sizes[0])
        call = asyncio.create_task(harness.messages(USER))
        for number, size in enumerate(sizes):
            source, target = [f"http://e{i % 2}" for i in (number, number + 1)]
            following = [*sizes, NUM_TOKENS][number + 1]
            engines[target].hold(following)
            await move(proxy, engines, source, size)
            await list_engines(proxy, engines)
        for engine in engines.values():
            engine.release()
        assert (await call).json()["usage"]["output_tokens"] == NUM_TOKENS
        trajectory = await harness.seal()
        await assert_unmoved(trajectory, [(0, NUM_TOKENS)])
        calls = sorted((c for engine in engines.values() for c in engine.calls), key=lambda c: len(c.input_ids))
        assert [len(c.output_ids) for c in calls] == [*sizes, NUM_TOKENS - sum(sizes)]
        assert [c.cache_salt for c in calls] == ["0"] * 11 and len({c.rid for c in calls}) == 11
        counters = (await proxy.status())["counters"]
        assert counters["calls_moved"] == counters["calls_resumed"] == 10
        # An engine that comes back knows what it had sampled before: on the second visit only the tokens since are new.
        recomputed = len(calls[1].input_ids) + sum(sizes[i - 1] for i in range(2, 11))
        assert counters["tokens_recomputed"] == recomputed


async def test_generation_moved_between_policy_versions_carries_all_of_them(model_path: Path) -> None:
    engines = make_engines(2)
    sizes = [7, 5, 9, 4, 6, 8, 3, 5, 7, 10]
    versions = [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4]  # of the engine that the call is on: published while it was away
    async with running_proxy(model_path, dict(engines)) as proxy:
        harness = await proxy.open(sampling={"temperature": 0.0, "max_new_tokens": NUM_TOKENS})
        engines["http://e0"].hold(sizes[0])
        call = asyncio.create_task(harness.messages(USER))
        for number, size in enumerate(sizes):
            source, target = [f"http://e{i % 2}" for i in (number, number + 1)]
            await engines[source].running(tokens=size)
            await drain(proxy, target)  # nothing runs there
            engines[target].set_version(versions[number + 1])
            engines[target].hold([*sizes, NUM_TOKENS][number + 1])
            await list_engines(proxy, engines)
            await move(proxy, engines, source, size)
            await list_engines(proxy, engines)
        for engine in engines.values():
            engine.release()
        assert (await call).status_code == 200
        rest = NUM_TOKENS - sum(sizes)
        await assert_unmoved(await harness.seal(), [(0, 7 + 5), (1, 9 + 4), (2, 6 + 8 + 3), (3, 5 + 7), (4, 10 + rest)])
        salts = [call.cache_salt for engine in engines.values() for call in engine.calls]
        assert sorted(salts) == [str(version) for version in versions]


@pytest.mark.parametrize("seed", range(3))
async def test_concurrent_generations_moved_at_random_equal_the_unmoved_ones(model_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engines = make_engines(3)
    async with running_proxy(model_path, dict(engines)) as proxy:
        await list_engines(proxy, engines, slots=2)
        harnesses: list[Harness] = []
        calls: list[asyncio.Task[Any]] = []
        for round_number in range(14):
            for engine in engines.values():
                engine.hold(rng.randint(0, 7))
            if round_number < 7:  # new calls come while others move: more than there are slots
                harnesses.append(
                    await proxy.open(f"r{round_number}", sampling={"temperature": 0.0, "max_new_tokens": NUM_TOKENS})
                )
                message = [{"role": "user", "content": f"text {round_number}"}]
                calls.append(asyncio.create_task(harnesses[-1].chat(message)))
                await proxy.until(in_flight=len(calls))
            leaving = rng.sample(sorted(engines), rng.randint(1, 3))
            reports = await asyncio.gather(*(drain(proxy, url) for url in leaving))
            assert all(report["moved"] <= 2 for report in reports)
            await list_engines(proxy, engines, slots=2)
        for engine in engines.values():
            engine.release()
        assert [reply.status_code for reply in await asyncio.gather(*calls)] == [200] * 7
        status = await proxy.status()
        assert status["counters"]["calls_moved"] > 20
        assert [engine.peak for engine in engines.values()] == [2, 2, 2], "slots are hard limits, and were used"
        for harness in harnesses:
            await assert_unmoved(await harness.seal(), [(0, NUM_TOKENS)])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_stream_that_is_open_while_its_call_moves_is_kept_alive_and_ends_whole(
    model_path: Path, path: str
) -> None:
    engines = make_engines(2)
    async with running_proxy(model_path, dict(engines), keepalive_s=0.02) as proxy, serving(proxy) as url:
        harness = await proxy.open(sampling={"temperature": 0.0, "max_new_tokens": NUM_TOKENS})
        for engine in engines.values():
            engine.hold(4)
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            body = {"model": "m", "max_tokens": NUM_TOKENS, "messages": USER, "stream": True}
            stream = asyncio.create_task(client.post(path, json=body, headers={"x-api-key": harness.api_key}))
            seen = 0
            for number in range(10):
                await move(proxy, engines, f"http://e{number % 2}", 4)
                seen += 2
                await proxy.until_at_least(keepalives=seen)
                await list_engines(proxy, engines)
            for engine in engines.values():
                engine.release()
            reply = await stream
        assert reply.status_code == 200
        assert reply.text.count("event: message_stop") + reply.text.count("data: [DONE]") == 1
        trajectory = await harness.seal()
        assert len(trajectory.calls) == 1 and trajectory.counters["replies_opened_early"] == 1
        await assert_unmoved(trajectory, [(0, NUM_TOKENS)])
        assert_exact(trajectory, *engines.values())
