"""Bounds of a session and of the process: what is beyond them is told to come back or to go, and nothing piles up."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gyre_core.clock import ManualClock
from gyre_core.proxy.conversation import ChatRequest
from gyre_core.proxy.pressure import Pressure
from gyre_core.proxy.refusal import Refusal, RefusalKind
from gyre_core.proxy.server import Proxy
from gyre_core.proxy.settings import LimitSettings, ProxySettings, SessionSettings
from tests.support.proxies import ADMIN_SECRET, fake_engine, running_proxy, serving

USER: list[Any] = [{"role": "user", "content": "u"}]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_calls_in_flight_are_bounded_and_joining_one_is_free(model_path: Path) -> None:
    engine = fake_engine("a", "b", "c")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(limits={"max_in_flight": 2})
        calls = [asyncio.create_task(harness.messages(user(name))) for name in ("a", "b", "b")]
        await proxy.until(in_flight=2, retries_joined=1)
        for send, status in ((harness.messages, 529), (harness.chat, 503)):
            reply = await send(user("c"))
            assert reply.status_code == status and int(reply.headers["retry-after"]) > 0
        engine.release()
        assert {response.status_code for response in await asyncio.gather(*calls)} == {200}
        assert (await harness.messages(user("c"))).status_code == 200
        assert (await harness.seal()).counters["limited_in_flight"] == 2


async def test_time_of_a_session_counts_from_its_creation_over_restarts(model_path: Path, tmp_path: Path) -> None:
    clock = ManualClock(1_000_000.0)
    settings = ProxySettings(
        admin_secret=ADMIN_SECRET, model_path=model_path, context_length=4096, journal_dir=tmp_path
    )
    first = Proxy(settings, clock=clock)
    limits = LimitSettings(max_time_s=100)
    made = first.create_session(SessionSettings(rollout_id="r", limits=limits))
    await first.aclose()
    clock.advance(60)
    second = Proxy(settings, clock=clock)
    session = second.find_session(made["session_id"], "")
    assert session.time_left_s() == 40
    clock.advance(40)
    with pytest.raises(Refusal, match="used up its 100 s") as caught:
        session.check_time()
    assert caught.value.kind is RefusalKind.FORBIDDEN
    await second.aclose()


async def test_call_in_flight_ends_with_its_sessions_time(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.hold(after=1)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(limits={"max_time_s": 0.2})
        reply = await harness.messages(USER)
        assert reply.status_code == 403 and "0.2 s" in reply.text
        assert engine.calls[0].finished  # nobody waits for it, and the engine knows
        assert (await harness.messages(USER)).status_code == 403
        await proxy.until(in_flight=0, open_requests=0)


def test_pressure_counts_requests_and_bytes_until_all_holders_have_dropped_them() -> None:
    pressure = Pressure(max_requests=2, max_bytes=100)
    first, second = pressure.enter(), pressure.enter()
    with pytest.raises(Refusal, match="2 requests"):
        pressure.enter()
    first.grow(60)
    first.grow(50)  # less than it said: nothing to add
    with pytest.raises(Refusal, match="60 bytes"):
        second.grow(41)
    second.grow(40)
    first.hold()
    first.drop()
    assert (pressure.requests, pressure.bytes) == (2, 100)
    first.drop()
    second.drop()
    assert (pressure.requests, pressure.bytes) == (0, 0)
    assert pressure.counters == {"full_requests": 1, "full_bytes": 1}


@pytest.mark.parametrize(("dialect", "status"), [("/v1/messages", 529), ("/v1/chat/completions", 503)])
async def test_full_process_tells_clients_to_come_back_before_it_reads_a_body(
    model_path: Path, dialect: str, status: int
) -> None:
    engine = fake_engine("a", "b")
    engine.hold()
    async with running_proxy(model_path, engine, max_open_calls=1) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(USER))
        await proxy.until(open_requests=1, in_flight=1)
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {dialect} HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.api_key}\r\ncontent-length: 1000\r\n\r\n"
        writer.write(head.encode())  # the body never comes
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(f"HTTP/1.1 {status}".encode()) and b"\r\nretry-after: 5\r\n" in answer
        writer.close()
        engine.release()
        assert (await call).status_code == 200
        await proxy.until(open_requests=0, pending_bytes=0)
        assert (await proxy.status())["counters"]["full_requests"] == 1
        assert (await harness.messages(user("b"))).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_bytes_of_open_bodies_are_bounded(model_path: Path, declared: bool) -> None:
    engine = fake_engine("a", "b")
    engine.hold()
    async with running_proxy(model_path, engine, max_pending_bytes=3000) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(user("x" * 2000)))
        await proxy.until(in_flight=1)
        body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": user("y" * 2000)})

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        async with httpx.AsyncClient(headers={"x-api-key": harness.api_key}) as client:
            reply = await client.post(f"{url}/v1/messages", content=body if declared else pieces())
            assert reply.status_code == 529
            assert 2000 < (await proxy.status())["pending_bytes"] < 3000
            engine.release()
            assert (await call).status_code == 200
            await proxy.until(open_requests=0, pending_bytes=0)
            reply = await client.post(f"{url}/v1/messages", content=body if declared else pieces())
            assert reply.status_code == 200


async def test_refused_requests_leave_nothing_open(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open(limits={"max_calls": 1, "max_body_bytes": 1000})
        assert (await harness.messages(USER)).status_code == 200
        assert (await harness.messages(USER)).status_code == 403
        assert (await harness.messages([])).status_code == 400
        assert (await harness.messages(user("x" * 2000))).status_code == 413
        await proxy.until(open_requests=0, pending_bytes=0, open_responses=0)


async def test_slow_reader_is_sent_one_piece_at_a_time_and_a_seal_ends_it(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("z" * 90_000), context_length=200_000) as proxy:
        harness = await proxy.open(sampling={"temperature": 1.0, "max_new_tokens": 100_000})
        body = orjson.dumps({"model": "m", "max_tokens": 100_000, "messages": USER, "stream": True})
        sent: list[Any] = []
        read_one = asyncio.Semaphore(2)  # the head and one piece; then the client reads no more
        blocked, cut = asyncio.Event(), asyncio.Event()
        arrived = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in arrived:
                return message
            await cut.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if read_one.locked():
                blocked.set()
            await read_one.acquire()
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/messages",
            "raw_path": b"/v1/messages",
            "query_string": b"",
            "headers": [(b"x-api-key", harness.api_key.encode())],
            "extensions": {"gyre.abort": cut.set},
        }
        app = asyncio.create_task(proxy.app(scope, receive, send))
        await blocked.wait()
        assert len(sent) == 2 and len(sent[1]["body"]) < 64 * 1024 and sent[1]["more_body"]
        trajectory = await harness.seal()
        await app
        assert cut.is_set() and len(sent) == 2 and len(trajectory.calls) == 1
        await proxy.until(open_requests=0, pending_bytes=0, open_responses=0)


@pytest.mark.parametrize("dialect", ["messages", "chat"])
async def test_requests_leave_no_cycles_behind(
    model_path: Path, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine("a", "b")
    async with (
        running_proxy(model_path, engine, engine_attempts=1, context_length=2000) as proxy,
        serving(proxy) as url,
    ):
        harness = await proxy.open(limits={"max_calls": 3})
        path = {"messages": "/v1/messages", "chat": "/v1/chat/completions"}[dialect]
        engine.fail_next(503)
        # Captured records hold errors, and these the frames that raised them. A test before may have set a level.
        caplog.set_level("ERROR")
        caplog.set_level("ERROR", logger="gyre_core")
        gc.collect()
        gc.disable()
        try:
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": harness.api_key}) as client:
                seen = []
                for content, stream in (
                    ("u", True),
                    ("u", True),
                    ("v", False),
                    ("x" * 2000, False),
                    ("x" * 10**6, True),
                ):
                    body = {"model": "m", "max_tokens": 9, "messages": user(content), "stream": stream}
                    seen.append((await client.post(path, json=body)).status_code)
                assert seen[1:] == [200, 200, 400, 400] and seen[0] in (503, 529)
            await proxy.until(open_requests=0, open_responses=0)
            assert not [item for item in gc.get_objects() if type(item) is ChatRequest]
        finally:
            gc.enable()
