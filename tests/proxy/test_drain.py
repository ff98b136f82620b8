"""Drains: calls in flight leave an engine with what they sampled and go on elsewhere, and nothing overtakes them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gyre_core.clock import ManualClock
from gyre_core.engine.fake import FakeEngine, FakeEngineServer
from gyre_core.engine.router import Router
from gyre_core.errors import EngineError
from gyre_core.proxy import drains
from gyre_core.proxy.sampling import Sampler
from gyre_core.proxy.server import create_app
from gyre_core.proxy.settings import EngineEntry, ProxySettings
from gyre_core.types import SamplingParams, VersionSpan
from tests.support.proxies import (
    ADMIN_HEADERS,
    ADMIN_SECRET,
    ProxyUnderTest,
    assert_exact,
    fake_engine,
    outputs,
    running_proxy,
)
from tests.support.tokenizer import VOCAB_SIZE, encode

PARAMS = SamplingParams(max_new_tokens=64)
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


class DeafEngine(FakeEngine):
    """Does not end calls that it is told to end, in one of three ways, until `hear`."""

    def __init__(self, *texts: str, manner: str = "ignores") -> None:
        super().__init__(outputs(*texts), vocab_size=VOCAB_SIZE)
        self.manner = manner
        self.aborts: list[str] = []

    async def abort(self, rid: str) -> None:
        self.aborts.append(rid)
        if self.manner == "ignores":
            return
        if self.manner == "refuses":
            raise EngineError("the engine is broken", retryable=True)
        if self.manner == "hangs":
            await asyncio.Event().wait()
        self.abort_calls(rid)

    def hear(self) -> None:
        self.manner = "hears"


@pytest.mark.parametrize("manner", ["ignores", "refuses"])
async def test_abort_is_repeated_and_new_calls_wait_behind_the_moved_one(model_path: Path, manner: str) -> None:
    first, second = DeafEngine("abcdef", manner=manner), fake_engine()
    first.hold(after=2)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        await proxy.engines(ONE, TWO, slots=1)
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), max_tokens=6))
        await first.running(tokens=2)
        report = await drain(proxy, ONE, timeout_s=0)
        assert (report["moved"], report["left"]) == (0, 1)
        other = await proxy.open("r2")
        new = asyncio.create_task(other.messages(user("v"), max_tokens=1))
        await proxy.until(waiting=1)  # the second engine is idle, and its slot is held for the call that comes
        assert not second.calls and (await proxy.status())["engines"][1]["busy"] == 1
        second.add_outputs(outputs("cdef", "n"))
        first.hear()
        report = await drain(proxy, ONE, begin=False)
        assert (report["moved"], report["partial_tokens"], report["left"], report["given_up"]) == (1, 2, 0, 0)
        assert (await call).json()["content"][0]["text"] == "abcdef"
        assert (await new).json()["content"][0]["text"] == "n"
        assert len(first.aborts) > 1 and len(set(first.aborts)) == 1
        assert [len(seen.output_ids) for seen in second.calls] == [4, 1], "the moved call came first"


@pytest.mark.parametrize("manner", ["ignores", "hangs"])
async def test_engine_that_answers_no_abort_is_given_up_and_the_call_goes_on(
    model_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "ABORT_GRACE_S", 0.05)
    first, second = DeafEngine("abcdef", manner=manner), fake_engine("abcdef")
    first.hold(after=2)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), max_tokens=6))
        await first.running(tokens=2)
        report = await drain(proxy, ONE)
        assert (report["moved"], report["partial_tokens"], report["left"], report["given_up"]) == (1, 0, 0, 1)
        assert (await call).json()["content"][0]["text"] == "abcdef"
        assert_exact(await harness.seal(), second)


async def test_call_that_ends_by_itself_during_the_drain_is_not_moved(model_path: Path) -> None:
    first, second = DeafEngine("abc"), fake_engine()
    first.hold(after=2)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u")))
        await first.running(tokens=2)
        assert (await drain(proxy, ONE, timeout_s=0))["left"] == 1
        first.release()
        assert (await call).json()["content"][0]["text"] == "abc"
        report = await drain(proxy, ONE)
        assert (report["moved"], report["left"]) == (0, 0)
        status = await proxy.status()
        assert status["counters"]["calls_moved"] == 0 and not second.calls
        assert [engine["busy"] for engine in status["engines"]] == [0, 0], "the slot that was held is free again"


async def test_drain_of_the_only_engine_keeps_calls_waiting_with_their_part(model_path: Path) -> None:
    engine = fake_engine("abcdef")
    engine.hold(after=4)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), max_tokens=6))
        await engine.running(tokens=4)
        assert (await drain(proxy, "http://engine"))["moved"] == 1
        await proxy.until(waiting=1, in_flight=1)
        other = await proxy.open("r2")
        new = asyncio.create_task(other.messages(user("v"), max_tokens=1))
        await proxy.until(waiting=2)
        engine.set_version(1)
        engine.release()
        await proxy.engines("http://engine", version=1, slots=1)
        assert (await call).json()["content"][0]["text"] == "abcdef"
        await new
        (first, second, third) = engine.calls
        assert second.input_ids == first.input_ids + first.output_ids
        assert (second.cache_salt, third.cache_salt) == ("1", "1") and third.input_ids[-1] != second.input_ids[-1]


async def test_engine_that_is_listed_again_ends_its_drain_and_its_calls_still_move(model_path: Path) -> None:
    first, second = DeafEngine("abcdef"), fake_engine()
    first.hold(after=2)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), max_tokens=6))
        await first.running(tokens=2)
        waiter = asyncio.create_task(drain(proxy, ONE))
        await until(lambda: bool(first.aborts))
        await proxy.engines(ONE, TWO)
        report = await waiter
        assert (report["moved"], report["left"]) == (0, 1)
        await drain(proxy, TWO, timeout_s=0)  # nothing runs there: the held slot moves to the first engine
        first.hear()
        await proxy.until(calls_moved=1)
        first.release()
        assert (await call).json()["content"][0]["text"] == "abcdef"
        assert [len(seen.output_ids) for seen in first.calls] == [2, 4] and not second.calls


async def test_seal_ends_a_call_that_is_being_moved(model_path: Path) -> None:
    first, second = DeafEngine("abcdef"), fake_engine()
    first.hold(after=2)
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u")))
        await first.running(tokens=2)
        assert (await drain(proxy, ONE, timeout_s=0))["left"] == 1
        assert not (await harness.seal()).calls
        assert (await call).status_code == 403
        assert (await drain(proxy, ONE))["left"] == 0
        state = proxy.proxy.router.state
        assert not state.running and not state.waiting and not state.reserved
        assert all(engine.busy == 0 for engine in state.engines.values())


async def test_engine_that_dies_while_it_is_drained_costs_no_call(model_path: Path) -> None:
    """Real connections: the engine is gone before it can end its calls."""
    with FakeEngineServer(fake_engine(seed=3)) as first, FakeEngineServer(fake_engine(seed=3)) as second:
        first.engine.hold(after=2)
        app = create_app(ProxySettings(admin_secret=ADMIN_SECRET, model_path=model_path, context_length=8192))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy", timeout=30) as client:
            proxy = ProxyUnderTest(app, app.state.proxy, first.engine, client)
            await proxy.engines(first.url, second.url)
            harness = await proxy.open()
            calls = [asyncio.create_task(harness.messages(user(f"{i}"), max_tokens=8)) for i in range(2)]
            await until(lambda: len(first.engine.calls) + len(second.engine.calls) == 2)
            await asyncio.to_thread(first.engine.wait_running, 1, tokens=2)
            waiter = asyncio.create_task(drain(proxy, first.url))
            await asyncio.to_thread(first.stop)
            assert (await waiter)["left"] == 0
            replies = [(await call).json() for call in calls]
            assert [reply["usage"]["output_tokens"] for reply in replies] == [8, 8]
            await app.state.proxy.aclose()


async def test_call_that_is_granted_but_not_sent_goes_elsewhere(model_path: Path) -> None:
    first, second = fake_engine(), fake_engine("ab")
    sampler = Sampler(Router(), lambda url, _: {ONE: first, TWO: second}[url], attempts=1)
    call = asyncio.create_task(
        sampler.sample(np.array([5], np.int32), PARAMS, session_id="s", call_id="r-c0", seed=None)
    )
    await asyncio.sleep(0)
    await sampler.set_engines([EngineEntry(url=ONE, slots=1)], 0)  # wakes the call, which has not gone on yet
    assert sampler.router.state.engines[ONE].busy == 1
    report = await sampler.drain(ONE, 10.0)
    assert (report.moved, report.left) == (1, 0)
    await sampler.set_engines([EngineEntry(url=TWO, slots=1)], 0)
    assert (await call).output_ids.tolist() == outputs("ab")[0]
    assert not first.calls and sampler.counters["tokens_recomputed"] == 0


async def test_moved_call_waits_on_its_slot_until_its_keys_are_written(model_path: Path) -> None:
    first, second = fake_engine("abcd"), fake_engine()
    first.hold(after=2)
    clock = ManualClock()
    sampler = Sampler(Router(clock), lambda url, _: {ONE: first, TWO: second}[url], attempts=1, clock=clock)
    await sampler.set_engines([EngineEntry(url=url, slots=1, kv_write_s=0.02) for url in (ONE, TWO)], 0)
    call = asyncio.create_task(
        sampler.sample(np.array([5], np.int32), PARAMS, session_id="s", call_id="r-c0", seed=None)
    )
    await first.running(tokens=2)
    second.add_outputs(outputs("cd"))
    before_s = asyncio.get_running_loop().time()
    report = await sampler.drain(ONE, 10.0)
    assert (report.moved, report.left) == (1, 0)
    assert (await call).output_ids.tolist() == outputs("abcd")[0]
    assert asyncio.get_running_loop().time() - before_s >= 0.02


async def test_stop_string_across_a_move_ends_the_output_where_one_engine_would(model_path: Path) -> None:
    first, second = fake_engine("say STOP and more"), fake_engine("OP and more")
    first.hold(after=len(encode("say ST")))
    async with running_proxy(model_path, {ONE: first, TWO: second}) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("u"), stop_sequences=["STOP"]))
        await first.running(tokens=len(encode("say ST")))
        await drain(proxy, ONE)
        reply = (await call).json()
        assert (reply["content"][0]["text"], reply["stop_reason"]) == ("say", "stop_sequence")
        assert reply["stop_sequence"] == "STOP"
        assert reply["usage"]["output_tokens"] == len(encode("say STOP"))
        trajectory = await harness.seal()
        assert trajectory.tree.sampled_tokens == len(encode("say STOP"))


@pytest.mark.parametrize("body", [{}, {"url": 5}, {"url": ONE, "timeout_s": -1}, {"url": ONE, "other": 1}])
async def test_bad_drain_is_refused_and_changes_nothing(model_path: Path, body: dict[str, Any]) -> None:
    async with running_proxy(model_path, {ONE: fake_engine()}) as proxy:
        reply = await proxy.client.post("/admin/drain", json=body, headers=ADMIN_HEADERS)
        assert reply.status_code == 400
        assert (await proxy.status())["engines"][0]["slots"] == 8
        assert (await proxy.client.post("/admin/drain", json={"url": ONE})).status_code == 401


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_call_that_two_tries_gave_nothing_lets_the_others_go_first(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    engine.fail_next(503, 503)
    async with running_proxy(model_path, {ONE: engine}) as proxy:
        await proxy.engines(ONE, slots=1)
        harness = await proxy.open()
        unlucky = asyncio.create_task(harness.messages(user("unlucky")))
        await proxy.until(in_flight=1)
        other = asyncio.create_task(harness.messages(user("other")))
        assert [(await call).json()["content"][0]["text"] for call in (other, unlucky)] == ["a", "b"]
