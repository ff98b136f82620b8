"""Calls that move between real SGLang servers: what the KV store saves, and that old keys meet no new weights.

Two servers share a store; a third (the session's) has none and gives the reference of calls that never moved.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from gyre_core.config.models import EngineConfig, TransferConfig
from gyre_core.engine.kv_store import KvStore
from gyre_core.engine.sglang import SGLangServer
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.transfer.weights import WeightPublisher
from gyre_core.types import FinishReason, Generation, SamplingParams
from tests.support.sglang import SLOTS, RunningEngine
from tests.support.tiny_model import CONTEXT_LENGTH, save_tiny_model, tiny_model, tiny_weights

pytestmark = pytest.mark.integration

PAGE_TOKENS = 16
CONFIG = EngineConfig(
    max_total_tokens=16384, kv_store="mooncake", kv_store_bytes=64 * 2**20, kv_page_tokens=PAGE_TOKENS
)


@dataclass(frozen=True)
class Pair:
    """Two servers of one model on one store."""

    store: KvStore
    first: SGLangServer
    second: SGLangServer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kv")
    model = save_tiny_model(folder / "model")
    with KvStore(CONFIG, log_path=folder / "kv.log") as store:
        servers = [
            SGLangServer(
                CONFIG,
                model,
                context_length=CONTEXT_LENGTH,
                slots=SLOTS,
                log_path=folder / f"engine{index}.log",
                kv_store=store.address,
            )
            for index in range(2)
        ]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_ready()
            yield Pair(store, *servers)
        finally:
            for server in servers:
                server.stop()


@pytest.fixture
async def clients(pair: Pair) -> AsyncIterator[tuple[SGLangClient, SGLangClient]]:
    async with pair.first.client(timeout_s=60) as first, pair.second.client(timeout_s=60) as second:
        yield first, second


def prompt(number: int, length: int = 200) -> list[int]:
    """Different from its first token on for each number."""
    return [(13 * i + 17 * number) % 250 for i in range(length)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def unmoved(engine: RunningEngine, ids: list[int], num_tokens: int) -> list[int]:
    async with engine.server.client(timeout_s=60) as client:
        return (await client.generate(ids, greedy(num_tokens), rid="unmoved")).output_ids.tolist()


async def abort_half_way(client: SGLangClient, ids: list[int], rid: str) -> Generation:
    """A long greedy call, aborted while it samples. One that was still waiting for the store's pages gets more time."""
    for attempt in range(1, 40):
        call = asyncio.create_task(client.generate(ids, greedy(700), rid=f"{rid}-{attempt}.", cache_salt="0"))
        # Short calls that started later and are over: the first one has sampled as many tokens by then, once its
        # prompt's pages were looked for. They leave no whole page.
        for tick in range(attempt):
            await client.generate([5], greedy(PAGE_TOKENS - 2), rid=f"tick-{rid}-{attempt}-{tick}.", cache_salt="0")
        await client.abort(f"{rid}-{attempt}.")
        generation = await call
        if len(generation.output_ids):
            return generation
    raise AssertionError("the call was never sampling when it was aborted")


async def test_call_moved_after_write_through_recomputes_at_most_one_page(
    pair: Pair, clients: tuple[SGLangClient, SGLangClient], sglang_server: RunningEngine
) -> None:
    first, second = clients
    ids = prompt(1)
    before = pair.store.contents().num_objects
    partial = await abort_half_way(first, ids, "move")
    assert partial.finish_reason is FinishReason.ABORT
    so_far = [*ids, *partial.output_ids.tolist()]
    assert len(so_far) > len(ids)
    whole_pages = (len(so_far) - 1) // PAGE_TOKENS  # the last sampled token has no keys and values yet
    await until(lambda: pair.store.contents().num_objects >= before + 2 * whole_pages)
    rest = await second.generate(so_far, greedy(12), rid="moved", cache_salt="0")
    assert rest.cached_tokens == whole_pages * PAGE_TOKENS
    assert 0 < rest.prompt_tokens - rest.cached_tokens <= PAGE_TOKENS
    moved = partial.output_ids.tolist() + rest.output_ids.tolist()
    assert moved == await unmoved(sglang_server, ids, len(moved))


async def test_call_moved_without_the_store_recomputes_all(
    clients: tuple[SGLangClient, SGLangClient], sglang_server: RunningEngine
) -> None:
    ids = prompt(2)
    partial = await abort_half_way(clients[0], ids, "bare")
    so_far = [*ids, *partial.output_ids.tolist()]
    async with sglang_server.server.client(timeout_s=60) as bare:
        rest = await bare.generate(so_far, greedy(12), rid="bare-moved", cache_salt="0")
    assert rest.cached_tokens == 0
    moved = partial.output_ids.tolist() + rest.output_ids.tolist()
    assert moved == await unmoved(sglang_server, ids, len(moved))


async def test_new_weights_never_meet_old_keys(
    pair: Pair, clients: tuple[SGLangClient, SGLangClient], tmp_path: Path
) -> None:
    """Version 1 on the second server, whose store is full of version 0's keys for the same ids."""
    first, second = clients
    ids = prompt(3, 320)
    before = pair.store.contents().num_objects
    await first.generate(ids, greedy(1), rid="old", cache_salt="0")
    await until(lambda: pair.store.contents().num_objects >= before + 2 * (320 // PAGE_TOKENS))
    publisher = WeightPublisher(pair.second, TransferConfig(backend="local"), tmp_path)
    await publisher.publish(tiny_weights(1).items(), 1)
    try:
        fresh = await second.generate(ids, greedy(4), rid="new", cache_salt="1")
        assert fresh.cached_tokens == 0
        logits = torch.tensor([ids + fresh.output_ids.tolist()[:-1]])
        with torch.no_grad():
            expected = tiny_model(1)(logits).logits[0, len(ids) - 1 :].argmax(-1)
        assert fresh.output_ids.tolist() == expected.tolist()
        # Without the salt the engine would take the old keys, flush or not: this is what the salt is for.
        assert (await second.generate(ids, greedy(4), rid="unsalted", cache_salt="0")).cached_tokens > 0
    finally:
        await publisher.publish(tiny_weights(0).items(), 0)
        await asyncio.to_thread(publisher.close)


async def test_dead_master_costs_recomputation_only_and_a_new_one_serves_again(
    pair: Pair, clients: tuple[SGLangClient, SGLangClient], sglang_server: RunningEngine
) -> None:
    first, second = clients
    ids, restarts = prompt(4), pair.store.restarts
    long_call = asyncio.create_task(first.generate(ids, greedy(300), rid="through", cache_salt="0"))
    await first.generate([5], greedy(5), rid="tick", cache_salt="0")
    os.kill(psutil.Process(pair.store.pid).children()[0].pid, signal.SIGKILL)
    through = await long_call  # the call in flight does not notice
    so_far = [*ids, *through.output_ids.tolist()[:40]]
    moved = await second.generate(so_far, greedy(8), rid="after-death", cache_salt="0")
    assert moved.output_ids.tolist() == await unmoved(sglang_server, so_far, 8)
    assert pair.store.restarts == restarts + 1
    # Both engines join the new master by themselves, and calls move cheaply again.
    await until(lambda: pair.store.contents().num_engines == 2)
    before = pair.store.contents().num_objects
    again = prompt(5)
    await first.generate(again, greedy(1), rid="refill", cache_salt="0")
    await until(lambda: pair.store.contents().num_objects >= before + 2 * (200 // PAGE_TOKENS))
    result = await second.generate([*again, 7], greedy(1), rid="hit", cache_salt="0")
    assert result.cached_tokens == 192  # twelve pages of 200 tokens
