"""Replies that take long: the response is opened, kept alive in each API's way, and always ends with the whole reply.

Nothing here waits for time: engines are held until a client has seen enough keep-alives.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import orjson
import pytest

from gyre_core.proxy.dialects.anthropic import KEEPALIVE_SIGNATURE
from gyre_core.types import VersionSpan
from tests.support.proxies import (
    BASH,
    Harness,
    ProxyUnderTest,
    assert_exact,
    call_text,
    fake_engine,
    outputs,
    running_proxy,
    serving,
)

KEEPALIVE_S = 0.02
USER: list[Any] = [{"role": "user", "content": "u"}]
TOOL: Any = BASH
CHAT_BASH: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nhm\n</think>\n\n"
TOOL_CALL = call_text("bash", '{"command": "ls"}')
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def silent_proxy(model_path: Path, **settings: Any) -> AsyncIterator[tuple[ProxyUnderTest, str]]:
    """A served proxy whose engine holds every call; gives its url."""
    engine = fake_engine()
    engine.hold()
    async with (
        running_proxy(model_path, engine, **{"keepalive_s": KEEPALIVE_S, **settings}) as proxy,
        serving(proxy) as url,
    ):
        yield proxy, url


async def raw_events(url: str, harness: Harness, *, stream: bool = True) -> tuple[asyncio.StreamReader, Any]:
    """A Messages request on a connection of its own."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    body = orjson.dumps({"model": "m", "max_tokens": 100, "messages": USER, "stream": stream})
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer


async def seen(reader: asyncio.StreamReader, end: bytes) -> bytes:
    """What arrives up to `end`."""
    async with asyncio.timeout(10):
        return await reader.readuntil(end)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("text", ["hi", THOUGHT + "hi", "look\n" + TOOL_CALL, THOUGHT + TOOL_CALL])
async def test_anthropic_sdk_reads_a_stream_that_begins_with_keepalives(
    model_path: Path, thinking: bool, text: str
) -> None:
    async with silent_proxy(model_path) as (proxy, url), AsyncExitStack() as stack:
        proxy.engine.add_outputs(outputs(text, "done"))
        harness = await proxy.open()
        client = await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=url, api_key=harness.api_key))
        arguments: Any = {"model": "m", "max_tokens": 2000, "tools": [BASH]}
        if thinking:
            arguments["thinking"] = THINKING
        num_alive = 0
        async with client.messages.stream(messages=USER, **arguments) as stream:
            async for event in stream:
                if event.type == "content_block_delta" and event.delta.type == "thinking_delta":
                    num_alive += not event.delta.thinking
                    if num_alive == 3:
                        proxy.engine.release()
            reply = await stream.get_final_message()
        assert num_alive >= 3
        shown = thinking and text.startswith("<think>")
        kinds = ["thinking"] + ["text"] * ("look" in text or text.endswith("hi")) + ["tool_use"] * ("tool_call" in text)
        assert [block.type for block in reply.content] == kinds
        block = reply.content[0]
        assert block.type == "thinking" and block.thinking == ("hm" if shown else "")
        assert (block.signature == KEEPALIVE_SIGNATURE) is not shown
        assert reply.usage.output_tokens == len(proxy.engine.calls[0].output_ids)
        # The harness sends the keep-alive's block back with the rest: it means nothing.
        use = reply.content[-1]
        answer: Any = (
            [{"type": "tool_result", "tool_use_id": use.id, "content": "x"}] if use.type == "tool_use" else "more"
        )
        history: Any = [*USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": answer}]
        await client.messages.create(messages=history, **arguments)
        trajectory = await harness.seal()
        assert_exact(trajectory, proxy.engine)
        assert trajectory.counters["substitution_clean"] == 2
        assert len(trajectory.tree.leaves()) == 1


async def test_anthropic_sdk_reads_a_whole_reply_after_keepalives(model_path: Path) -> None:
    async with silent_proxy(model_path) as (proxy, url), AsyncExitStack() as stack:
        proxy.engine.add_outputs(outputs(THOUGHT + "look\n" + TOOL_CALL, "done"))
        harness = await proxy.open()
        client = await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=url, api_key=harness.api_key))
        call = asyncio.create_task(client.messages.create(model="m", max_tokens=2000, messages=USER, tools=[TOOL]))
        await proxy.until_at_least(keepalives=3)
        proxy.engine.release()
        reply = await call
        assert [block.type for block in reply.content] == ["text", "tool_use"]
        result = [{"type": "tool_result", "tool_use_id": reply.content[1].id, "content": "x"}]  # pyright: ignore
        history: Any = [*USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": result}]
        await client.messages.create(model="m", max_tokens=2000, messages=history, tools=[TOOL])
        trajectory = await harness.seal()
        assert trajectory.counters["substitution_clean"] == 2
        assert trajectory.counters["replies_opened_early"] == 1


@pytest.mark.parametrize("text", ["hi", THOUGHT + "hi", THOUGHT + TOOL_CALL])
async def test_openai_sdk_reads_a_stream_that_begins_with_keepalives(model_path: Path, text: str) -> None:
    async with silent_proxy(model_path) as (proxy, url), AsyncExitStack() as stack:
        proxy.engine.add_outputs(outputs(text))
        harness = await proxy.open()
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url + "/v1", api_key=harness.api_key))
        stream = await client.chat.completions.create(
            model="m", messages=USER, tools=[CHAT_BASH], stream=True, stream_options={"include_usage": True}
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 4:
                proxy.engine.release()
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant" and {chunk.id for chunk in chunks} == {chunks[0].id}
        alive = [delta for delta in deltas[1:-1] if not delta.model_dump(exclude_unset=True)]
        assert len(alive) >= 3
        assert "".join(delta.content or "" for delta in deltas) == ("" if "tool_call" in text else "hi")
        assert any(delta.tool_calls for delta in deltas) is ("tool_call" in text)
        assert chunks[-1].usage and chunks[-1].usage.prompt_tokens == len(proxy.engine.calls[0].input_ids)


async def test_openai_sdk_reads_a_whole_reply_after_keepalives(model_path: Path) -> None:
    async with silent_proxy(model_path) as (proxy, url), AsyncExitStack() as stack:
        proxy.engine.add_outputs(outputs(THOUGHT + TOOL_CALL, "done"))
        harness = await proxy.open()
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url + "/v1", api_key=harness.api_key))
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=USER, tools=[CHAT_BASH]))
        await proxy.until_at_least(keepalives=3)
        proxy.engine.release()
        message = (await call).choices[0].message
        assert message.tool_calls
        history: Any = [
            *USER,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x"},
        ]
        await client.chat.completions.create(model="m", messages=history, tools=[CHAT_BASH])
        assert (await harness.seal()).counters["substitution_clean"] == 2


async def test_whole_reply_after_keepalives_is_json_behind_spaces(model_path: Path) -> None:
    async with silent_proxy(model_path) as (proxy, url):
        proxy.engine.add_outputs(outputs("hi"))
        harness = await proxy.open()
        async with httpx.AsyncClient(headers={"x-api-key": harness.api_key}) as client:
            body = {"model": "m", "max_tokens": 9, "messages": USER}
            async with client.stream("POST", f"{url}/v1/messages", json=body) as response:
                assert response.status_code == 200
                data = b""
                async for part in response.aiter_raw():
                    data += part
                    if len(data) == 4:
                        proxy.engine.release()
        assert data.startswith(b"    ") and orjson.loads(data)["content"][0]["text"] == "hi"


async def test_engine_that_dies_after_the_response_began_is_tried_until_it_returns(model_path: Path) -> None:
    async with silent_proxy(model_path, engine_attempts=1) as (proxy, url):
        engine = proxy.engine
        harness = await proxy.open()
        reader, writer = await raw_events(url, harness)
        await seen(reader, b'"thinking":""}}\n')
        engine.fail_next(503, 400)  # one that passes and one that no retry mends
        engine.abort_calls()
        for num_errors in (1, 2):
            await proxy.engines("http://engine")  # its rest is forgiven
            await proxy.until(engine_errors=num_errors)
        engine.add_outputs(outputs("back"))
        engine.release()
        await proxy.engines("http://engine")
        data = await seen(reader, b"message_stop")
        assert b'"text":"back"' in data
        writer.close()
        assert len((await harness.seal()).calls) == 1


async def test_call_that_changes_engines_in_silence_keeps_its_tokens_and_spans(model_path: Path) -> None:
    first, second = fake_engine("abcdef"), fake_engine()
    second.version = 1
    first.hold(after=3)
    async with (
        running_proxy(
            model_path, {"http://one": first, "http://two": second}, keepalive_s=KEEPALIVE_S, engine_attempts=1
        ) as proxy,
        serving(proxy) as url,
    ):
        await proxy.engines("http://one")
        harness = await proxy.open()
        reader, writer = await raw_events(url, harness)
        await first.running(tokens=3)
        await proxy.until_at_least(keepalives=2)
        await proxy.engines()
        first.abort_calls()
        await proxy.until(calls_resumed=1, waiting=1)
        await proxy.until_at_least(keepalives=4)
        second.add_outputs(outputs("def"))
        await proxy.engines("http://two", version=1)
        assert b'"text":"abcdef"' in await seen(reader, b"message_stop")
        writer.close()
        trajectory = await harness.seal()
        (record,) = trajectory.calls
        assert trajectory.tree.nodes[record.node_id].spans == (
            VersionSpan(version=0, start=0, end=3),
            VersionSpan(version=1, start=3, end=7),
        )
        assert_exact(trajectory, second)


async def test_refusal_in_time_is_a_status_code(model_path: Path) -> None:
    async with silent_proxy(model_path, keepalive_s=10, engine_attempts=1) as (proxy, _):
        harness = await proxy.open()
        proxy.engine.fail_next(503)
        assert (await harness.messages(USER, stream=True)).status_code == 529


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_an_open_response_finds_its_reply_later(model_path: Path, stream: bool) -> None:
    async with silent_proxy(model_path) as (proxy, url):
        proxy.engine.add_outputs(outputs("a", "b"))
        harness = await proxy.open()
        reader, writer = await raw_events(url, harness, stream=stream)
        await seen(reader, b"HTTP/1.1 200")
        await proxy.until_at_least(keepalives=1)
        writer.close()
        await proxy.until(open_responses=0, in_flight=1)
        proxy.engine.release()
        await proxy.until(calls=1, in_flight=0, open_requests=0)
        reader, writer = await raw_events(url, harness, stream=stream)
        assert await seen(reader, b'"text":"a"')
        writer.close()
        trajectory = await harness.seal()
        assert trajectory.counters["retries_replayed"] == 1 and len(trajectory.calls) == 1


async def test_retry_of_an_open_response_joins_its_call(model_path: Path) -> None:
    async with silent_proxy(model_path) as (proxy, url):
        proxy.engine.add_outputs(outputs("a"))
        harness = await proxy.open()
        first, first_writer = await raw_events(url, harness)
        await proxy.until_at_least(keepalives=1)
        second, second_writer = await raw_events(url, harness)
        await proxy.until_at_least(replies_opened_early=2)
        proxy.engine.release()
        for reader in (first, second):
            assert b'"text":"a"' in await seen(reader, b"message_stop")
        first_writer.close()
        second_writer.close()
        assert len((await harness.seal()).calls) == 1 and len(proxy.engine.calls) == 1


@pytest.mark.parametrize("how", ["seal", "drop"])
async def test_end_of_a_session_cuts_its_open_responses(model_path: Path, how: str) -> None:
    async with silent_proxy(model_path) as (proxy, url):
        harness = await proxy.open()
        reader, writer = await raw_events(url, harness)
        await proxy.until_at_least(keepalives=1)
        if how == "seal":
            assert (await harness.seal()).counters["calls_aborted_at_seal"] == 1
        else:
            await proxy.drop(harness)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await seen(reader, b"\r\n0\r\n\r\n")
        writer.close()
        await proxy.until(open_requests=0, in_flight=0)


async def test_session_that_runs_out_of_time_cuts_its_open_responses_and_refuses(model_path: Path) -> None:
    async with silent_proxy(model_path) as (proxy, url):
        harness = await proxy.open(limits={"max_time_s": 0.3})
        reader, writer = await raw_events(url, harness)
        await proxy.until_at_least(keepalives=1)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await seen(reader, b"\r\n0\r\n\r\n")
        writer.close()
        reply = await harness.messages(USER)
        assert reply.status_code == 403 and "0.3 s" in reply.text
        assert not (await harness.seal()).calls


async def test_journal_that_fails_after_the_response_began_is_tried_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_core.proxy.session.JOURNAL_RETRY_S", 0.001)
    async with silent_proxy(model_path, journal_dir=tmp_path, journal_sync="call") as (proxy, url):
        proxy.engine.add_outputs(outputs("a"))
        harness = await proxy.open()
        session = proxy.proxy.sessions[harness.session_id][0]
        reader, writer = await raw_events(url, harness)
        await proxy.until_at_least(keepalives=1)
        journal = session._journal
        assert journal is not None
        handle, journal._handle = journal._handle, -1  # as if it were closed
        proxy.engine.release()
        await proxy.until_at_least(journal_retries=3)
        journal._handle = handle
        assert b'"text":"a"' in await seen(reader, b"message_stop")
        writer.close()
        assert len((await harness.seal()).calls) == 1
