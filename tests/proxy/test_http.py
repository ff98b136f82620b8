"""Connections: heads and leftovers of bodies are bounded in time and size, pipelines keep their order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from gyre_core.proxy.http import MAX_HEAD_BYTES, GuardedProtocol
from tests.support.proxies import Harness, ProxyUnderTest, fake_engine, running_proxy, serving


@asynccontextmanager
async def connected(
    model_path: Path, *texts: str
) -> AsyncIterator[tuple[ProxyUnderTest, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A served proxy and one connection to it."""
    async with running_proxy(model_path, fake_engine(*texts)) as proxy, serving(proxy) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            yield proxy, reader, writer
        finally:
            writer.close()


def post(harness: Harness, content: str) -> bytes:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]})
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def everything(reader: asyncio.StreamReader) -> bytes:
    """All that arrives until the other side closes or cuts."""
    data = b""
    async with asyncio.timeout(10):
        try:
            while part := await reader.read(2**16):
                data += part
        except ConnectionError:
            pass
    return data


@pytest.mark.parametrize("sent", [b"", b"POST /v1/messages HTTP/1.1\r\nhost:", b"\r\n\r\n"])
async def test_head_that_never_ends_is_given_up(model_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.05)
    async with connected(model_path) as (_, reader, writer):
        writer.write(sent)
        assert await everything(reader) == b""


async def test_connection_that_was_used_may_not_idle_in_half_a_head(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.05)
    async with connected(model_path) as (_, reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'{"ok":true}')
        writer.write(b"GET /heal")
        assert await everything(reader) == b""


@pytest.mark.parametrize("line", [b"x-a: " + b"a" * 1000 + b"\r\n", b"x: y\r\n"])
async def test_head_without_end_is_a_400(model_path: Path, line: bytes) -> None:
    async with connected(model_path) as (_, reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + line * (2 * MAX_HEAD_BYTES // len(line)))
        assert (await everything(reader)).startswith(b"HTTP/1.1 400")


async def test_body_of_a_refused_request_may_not_drip_for_ever(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.05)
    async with connected(model_path) as (_, reader, writer):
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert (await everything(reader)).startswith(b"HTTP/1.1 401")


async def test_requests_on_one_connection_are_answered_in_order(model_path: Path) -> None:
    async with connected(model_path, "a", "b", "c") as (proxy, reader, writer):
        harness = await proxy.open()
        writer.write(post(harness, "1") + post(harness, "2"))
        data = await reader.readuntil(b'"text":"b"')
        assert data.index(b'"text":"a"') < data.index(b'"text":"b"')
        writer.write(post(harness, "3"))
        await reader.readuntil(b'"text":"c"')
        assert len((await harness.seal()).calls) == 3


async def test_noise_behind_a_request_ends_its_connection_and_not_its_call(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(model_path, "a") as (proxy, reader, writer):
        proxy.engine.hold()
        harness = await proxy.open()
        writer.write(post(harness, "1"))
        await proxy.engine.running()
        writer.write(b"\x00\x01\x02\r\n\r\n")
        assert (await everything(reader)).startswith(b"HTTP/1.1 400")
        proxy.engine.release()
        await proxy.until(calls=1, in_flight=0, open_requests=0)
        assert "Exception" not in caplog.text


async def test_client_that_leaves_with_a_pipeline_is_noticed(model_path: Path) -> None:
    async with connected(model_path, "a", "b") as (proxy, _, writer):
        proxy.engine.hold()
        harness = await proxy.open()
        writer.write(post(harness, "1") + post(harness, "2"))
        await proxy.engine.running()
        writer.close()
        await writer.wait_closed()
        proxy.engine.release()
        await proxy.until(calls=1, in_flight=0, open_requests=0, open_responses=0)
        reply = await harness.messages([{"role": "user", "content": "1"}], max_tokens=9)
        assert reply.status_code == 200
