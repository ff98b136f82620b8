"""The same body again: joined while it runs, replayed while undelivered, sampled anew after a delivery."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from tests.support.proxies import Harness, assert_exact, fake_engine, running_proxy, serving

BODY = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "u"}]}


async def start_and_leave(url: str, harness: Harness, body: dict) -> asyncio.StreamWriter:
    """Send a request on a raw connection; the caller closes it when it pleases."""
    target = urlsplit(url)
    _, writer = await asyncio.open_connection(target.hostname, target.port)
    data = orjson.dumps(body)
    head = (
        f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return writer


async def test_same_body_while_the_call_runs_joins_it(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first = asyncio.create_task(harness.messages(BODY["messages"]))
        await engine.running()
        second = asyncio.create_task(harness.messages(BODY["messages"]))
        await proxy.until(retries_joined=1)
        engine.release()
        replies = [response.json() for response in await asyncio.gather(first, second)]
        assert replies[0] == replies[1]
        trajectory = await harness.seal()
        assert len(trajectory.calls) == 1 and len(engine.calls) == 1
        assert trajectory.counters["retries_joined"] == 1


async def test_same_body_after_delivery_is_sampled_anew(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        replies = [(await harness.messages(BODY["messages"])).json() for _ in range(2)]
        assert [reply["content"][0]["text"] for reply in replies] == ["a", "b"]
        assert replies[0]["id"] != replies[1]["id"]
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 2


async def test_client_that_leaves_finds_its_reply_when_it_comes_back(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        writer = await start_and_leave(url, harness, BODY)
        await engine.running()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0)
        engine.release()
        await proxy.until(calls=1, in_flight=0)
        assert not engine.calls[0].aborted
        # The same body on another connection: the recorded reply, then (delivered now) a new sample.
        headers = {"x-api-key": harness.api_key, "content-type": "application/json"}
        texts = []
        for _ in range(2):
            reply = await proxy.client.post(f"{url}/v1/messages", content=orjson.dumps(BODY), headers=headers)
            texts.append(reply.json()["content"][0]["text"])
        assert texts == ["a", "b"]
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert trajectory.counters["retries_replayed"] == 1
        assert len(trajectory.calls) == 2


async def test_client_that_leaves_and_retries_joins_its_running_call(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        writer = await start_and_leave(url, harness, BODY)
        await engine.running()
        writer.close()
        retry = await start_and_leave(url, harness, BODY)
        await proxy.until(retries_joined=1)
        engine.release()
        await proxy.until(calls=1, in_flight=0)
        retry.close()
        assert len(engine.calls) == 1


async def test_retry_of_a_streamed_body_replays_the_same_events(model_path: Path) -> None:
    engine = fake_engine("a")
    engine.hold()
    async with running_proxy(model_path, engine) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        body = {**BODY, "stream": True}
        writer = await start_and_leave(url, harness, body)
        await engine.running()
        writer.close()
        await writer.wait_closed()
        engine.release()
        await proxy.until(calls=1, in_flight=0)
        headers = {"x-api-key": harness.api_key, "content-type": "application/json"}
        reply = await proxy.client.post(f"{url}/v1/messages", content=orjson.dumps(body), headers=headers)
        assert '"text":"a"' in reply.text and reply.text.rstrip().endswith('{"type":"message_stop"}')
        assert len(engine.calls) == 1


async def test_parallel_calls_of_one_session_do_not_mix(model_path: Path) -> None:
    engine = fake_engine("from a", "from b")
    engine.hold(after=3)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        tasks = [
            asyncio.create_task(harness.messages([{"role": "user", "content": name}], system="shared"))
            for name in ("a", "b")
        ]
        await engine.running(2, tokens=3)
        engine.release()
        await asyncio.gather(*tasks)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 2
