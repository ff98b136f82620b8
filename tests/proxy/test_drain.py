"""Drains: calls in flight leave an engine with what they sampled and go on elsewhere, and nothing overtakes them."""

import asyncio
from pathlib import Path
from typing import Any

from gyre_core.types import VersionSpan
from tests.support.proxies import ADMIN_HEADERS, ProxyUnderTest, assert_exact, fake_engine, outputs, running_proxy

ONE, TWO = "http://one", "http://two"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def drain(proxy: ProxyUnderTest, url: str, **fields: Any) -> dict[str, Any]:
    reply = await proxy.client.post("/admin/drain", json={"url": url, **fields}, headers=ADMIN_HEADERS)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_drain_moves_a_call_with_its_tokens_and_says_how_many(model_path: Path) -> None:
    first, second = fake_engine("abcdef"), fake_engine()
    second.add_outputs(outputs("def"))
    second.version = 4
    first.hold(after=3)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), max_tokens=6))
        await first.running(tokens=3)
        report = await drain(proxy, ONE)
        assert {**report, "seconds": 0} == {"moved": 1, "partial_tokens": 3, "left": 0, "given_up": 0, "seconds": 0}
        assert (await call).json()["content"][0]["text"] == "abcdef"
        status = await proxy.status()
        assert status["counters"]["calls_moved"] == status["counters"]["calls_resumed"] == 1
        assert status["counters"]["tokens_recomputed"] == len(second.calls[0].input_ids), "nothing was cached there"
        assert [(engine["slots"], engine["busy"], engine["residents"]) for engine in status["engines"]] == [
            (0, 0, 0),
            (8, 0, 1),
        ]
        trajectory = await harness.seal()
        assert trajectory.tree.nodes[trajectory.calls[0].node_id].spans == (
            VersionSpan(version=0, start=0, end=3),
            VersionSpan(version=4, start=3, end=6),
        )
        assert_exact(trajectory, second)
        # The drained engine gets no call until it is listed; a second drain finds nothing new and says the same.
        assert await drain(proxy, ONE) == report
        other = await proxy.open("r2")
        second.add_outputs(outputs("x"))
        await other.messages(user("v"))
        assert len(first.calls) == 1
        await proxy.engines(ONE)
        first.release()
        await other.messages(user("w"), max_tokens=1)
        assert len(first.calls) == 2
        assert (await drain(proxy, "http://nobody"))["moved"] == 0
