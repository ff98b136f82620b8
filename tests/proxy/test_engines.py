"""Engines come, go, fail and change their weights; calls wait, go on elsewhere, and say who sampled what."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_core.engine.fake import FakeEngineServer
from gyre_core.proxy.server import create_app
from gyre_core.proxy.settings import ProxySettings
from gyre_core.types import VersionSpan
from tests.support.proxies import (
    ADMIN_HEADERS,
    ADMIN_SECRET,
    ProxyUnderTest,
    assert_exact,
    fake_engine,
    outputs,
    running_proxy,
)

USER = [{"role": "user", "content": "u"}]


async def test_calls_wait_while_no_engine_takes_calls(model_path: Path) -> None:
    engine = fake_engine("a")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await proxy.engines()
        call = asyncio.create_task(harness.messages(USER))
        await proxy.until(waiting=1)
        assert not engine.calls
        await proxy.engines("http://engine", version=4)
        assert (await call).status_code == 200
        assert engine.calls[0].cache_salt == "4"


async def test_slots_are_hard_limits(model_path: Path) -> None:
    engine = fake_engine("a", "b", "c")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy:
        await proxy.engines("http://engine", slots=2)
        harness = await proxy.open()
        calls = [asyncio.create_task(harness.messages([{"role": "user", "content": str(i)}])) for i in range(3)]
        await engine.running(2)
        await proxy.until(waiting=1, in_flight=3)
        engine.release()
        assert [response.status_code for response in await asyncio.gather(*calls)] == [200] * 3


async def test_call_of_an_engine_that_is_drained_goes_on_elsewhere_with_its_tokens(model_path: Path) -> None:
    first, second = fake_engine("abcdef"), fake_engine()
    second.version = 1
    first.hold(after=3)
    async with running_proxy(model_path, {"http://one": first, "http://two": second}) as proxy:
        await proxy.engines("http://one")
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(USER, max_tokens=6))
        await first.running(tokens=3)
        await proxy.engines()  # the cell changes its role: no more calls, and its engine ends what it runs
        first.abort_calls()
        await proxy.until(calls_resumed=1, waiting=1)
        second.add_outputs(outputs("def"))
        await proxy.engines("http://two", version=1)
        reply = (await call).json()
        assert reply["content"][0]["text"] == "abcdef"[:6]
        assert reply["usage"]["output_tokens"] == 6
        trajectory = await harness.seal()
        (record,) = trajectory.calls
        assert trajectory.tree.nodes[record.node_id].spans == (
            VersionSpan(version=0, start=0, end=3),
            VersionSpan(version=1, start=3, end=6),
        )
        assert second.calls[0].input_ids == first.calls[0].input_ids + first.calls[0].output_ids
        assert second.calls[0].sampling_params["max_new_tokens"] == 3
        assert second.calls[0].cache_salt == "1"
        assert_exact(trajectory, second)


async def test_weights_that_change_under_a_call_show_in_its_spans(model_path: Path) -> None:
    engine = fake_engine("abcdef")
    engine.hold(after=2)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(USER))
        await engine.running(tokens=2)
        engine.set_version(3)
        engine.release()
        await call
        trajectory = await harness.seal()
        spans = trajectory.tree.nodes[trajectory.calls[0].node_id].spans
        assert [(span.version, span.start, span.end) for span in spans] == [(0, 0, 2), (3, 2, 7)]


async def test_failed_engine_is_replaced_by_another(model_path: Path) -> None:
    broken, good = fake_engine(), fake_engine("a")
    broken.fail_next(503, 500, 0)
    async with running_proxy(model_path, {"http://broken": broken, "http://good": good}) as proxy:
        harness = await proxy.open()
        reply = await harness.messages(USER)
        assert reply.json()["content"][0]["text"] == "a"
        assert (await proxy.status())["counters"]["engine_errors"] >= 1


async def test_engine_that_recovers_serves_the_call_after_its_rest(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.fail_next(503)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        assert (await harness.messages(USER)).json()["content"][0]["text"] == "a"


@pytest.mark.parametrize(("dialect", "status"), [("messages", 529), ("chat", 503)])
async def test_engines_that_keep_failing_give_a_retryable_error_before_headers(
    model_path: Path, dialect: str, status: int
) -> None:
    engine = fake_engine("a")
    engine.fail_next(503, 503)
    async with running_proxy(model_path, engine, engine_attempts=2) as proxy:
        harness = await proxy.open()
        send = harness.messages if dialect == "messages" else harness.chat
        reply = await send(USER, stream=True)
        assert reply.status_code == status
        assert int(reply.headers["retry-after"]) > 0
        error = reply.json()["error"]
        assert error["type"] == ("overloaded_error" if dialect == "messages" else "server_error")
        # Nothing is recorded; the retry is served.
        assert (await send(USER)).status_code == 200
        trajectory = await harness.seal()
        assert len(trajectory.calls) == 1
        assert trajectory.counters["refused_unavailable"] == 1


async def test_answer_that_no_retry_mends_is_an_error_of_the_engine(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.fail_next(400)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        assert (await harness.messages(USER)).status_code == 529
        assert len((await harness.seal()).calls) == 0


async def test_session_stays_on_the_engine_that_has_its_prefix(model_path: Path) -> None:
    engines = {f"http://e{i}": fake_engine(stop_token_ids=[2], mean_length=4, seed=i) for i in range(3)}
    async with running_proxy(model_path, engines) as proxy:
        harness = await proxy.open()
        for turn in range(4):
            await harness.messages([{"role": "user", "content": f"turn {turn}"}])
        assert sorted(len(engine.calls) for engine in engines.values()) == [0, 0, 4]


async def test_prompt_that_fills_the_context_is_refused_in_the_words_that_trigger_compaction(model_path: Path) -> None:
    engine = fake_engine("a")
    async with running_proxy(model_path, engine, context_length=1100) as proxy:
        harness = await proxy.open()
        long = [{"role": "user", "content": "x" * 1100}]
        reply = await harness.messages(long)
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("prompt is too long")
        reply = await harness.chat(long)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        # A prompt that leaves some room is sampled as far as the context reaches.
        await harness.messages([{"role": "user", "content": "x" * 1000}])
        (call,) = engine.calls
        assert len(call.input_ids) + call.sampling_params["max_new_tokens"] == 1100


async def test_token_budget_of_a_session_bounds_its_last_call_and_then_refuses(model_path: Path) -> None:
    engine = fake_engine("abcdefgh", "abcdefgh")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(limits={"max_tokens": 12, "max_calls": 10})
        assert (await harness.messages(USER)).json()["usage"]["output_tokens"] == 9
        assert (await harness.messages(USER)).json()["usage"]["output_tokens"] == 3
        assert (await harness.messages(USER)).status_code == 403


async def test_number_of_calls_is_bounded(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a", "b")) as proxy:
        harness = await proxy.open(limits={"max_calls": 1})
        assert (await harness.messages(USER)).status_code == 200
        reply = await harness.chat(USER)
        assert reply.status_code == 403
        assert reply.json()["error"]["message"] == "this session used up its 1 calls"


async def test_engines_are_called_with_their_own_keys_and_a_new_key_takes_hold(model_path: Path, caplog: Any) -> None:
    engine = fake_engine("a", "b", "c")
    with FakeEngineServer(engine, api_key="key-1") as server:
        app = create_app(ProxySettings(admin_secret=ADMIN_SECRET, model_path=model_path, context_length=4096))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            proxy = ProxyUnderTest(app, app.state.proxy, engine, client)
            harness = await proxy.open()
            for key, status in ((None, 529), ("key-2", 529), ("key-1", 200)):
                entry = {"url": server.url, "slots": 1, "api_key": key}
                body = {"engines": [entry], "policy_version": 0}
                assert (await client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)).status_code == 200
                assert (await harness.messages(USER)).status_code == status
            assert "key-" not in (await client.get("/admin/status", headers=ADMIN_HEADERS)).text
            assert len(app.state.proxy.sampler._clients) == 1, "clients with old keys are closed"
        await app.state.proxy.aclose()
    assert "key-" not in caplog.text


@pytest.mark.parametrize("api_key", ["", "with space", "line\nbreak", 5])
async def test_bad_engine_key_is_refused_and_not_repeated(model_path: Path, api_key: object) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy:
        body = {"engines": [{"url": "http://e", "slots": 0, "api_key": api_key}], "policy_version": 0}
        reply = await proxy.client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)
        assert reply.status_code == 400
        assert "input" not in reply.json()["error"].replace("input should", "") and "with space" not in reply.text
