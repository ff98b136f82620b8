"""Wrong keys, foreign sessions, broken and enormous bodies: a 4xx in the API's own form, nothing recorded, no crash."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support.proxies import ADMIN_HEADERS, fake_engine, running_proxy, serving

USER = [{"role": "user", "content": "u"}]
PATHS = {"messages": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}


def is_error_of(dialect: str, body: Any) -> bool:
    """Whether an error body has the API's form."""
    if dialect == "messages":
        return body["type"] == "error" and set(body["error"]) == {"type", "message"}
    return set(body) == {"error"} and {"message", "type", "param", "code"} == set(body["error"])


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "not utf-8": b'{"messages": "\xff"}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "not an object": b"[1, 2]",
    "null": b"null",
    "no messages": b"{}",
    "messages null": b'{"messages": null}',
    "messages empty": b'{"messages": []}',
    "messages a string": b'{"messages": "hello"}',
    "messages of strings": b'{"messages": ["hello"]}',
    "role missing": b'{"messages": [{"content": "x"}]}',
    "role unknown": b'{"messages": [{"role": "king", "content": "x"}]}',
    "role a list": b'{"messages": [{"role": [], "content": "x"}]}',
    "content a number": b'{"messages": [{"role": "user", "content": 5}]}',
    "content an object": b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    "assistant content a number": b'{"messages": [{"role": "user"}, {"role": "assistant", "content": 5}]}',
    "tools a string": b'{"messages": [{"role": "user", "content": "x"}], "tools": "bash"}',
    "tools of numbers": b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}',
    "max_tokens zero": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    "max_tokens a string": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}',
    "max_tokens true": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}',
    "temperature a list": b'{"messages": [{"role": "user", "content": "x"}], "temperature": [1]}',
    "deep nesting that parses": b'{"messages": [{"role": "user", "content": [' + deep(600) + b"]}]}",
    "deep nesting that does not": b'{"messages": [{"role": "user", "content": [' + deep(100_000) + b"]}]}",
    "brackets": b"[" * 200_000,
    "many messages": b'{"messages": ['
    + b'{"role":"user","content":"x"},' * 20_001
    + b'{"role":"user","content":"x"}]}',
    "only an assistant": b'{"messages": [{"role": "assistant", "content": "x"}]}',
}


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("name", BODIES)
async def test_unreadable_body_is_a_400_and_records_nothing(model_path: Path, dialect: str, name: str) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        reply = await proxy.client.post(PATHS[dialect], content=BODIES[name], headers={"x-api-key": harness.api_key})
        assert reply.status_code == 400, reply.text
        assert is_error_of(dialect, reply.json())
        assert (await harness.messages(USER)).status_code == 200
        trajectory = await harness.seal()
        assert len(trajectory.calls) == 1 and trajectory.counters["refused_bad_request"] == 1


ODD_BUT_FINE: dict[str, dict[str, Any]] = {
    "unknown fields": {"brand_new": {"a": [1]}, "metadata": {"user_id": "x"}},
    "tool_choice": {"tool_choice": {"type": "any"}},
    "stream false": {"stream": False},
    "no max_tokens": {},
    "no model": {"model": None},
    "odd content blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "wow"}]}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "AAAA"}}]}]},
    "consecutive users": {"messages": USER * 3},
    "a system message in the middle": {"messages": [*USER, {"role": "system", "content": "s"}, *USER]},
    "a tool result nobody asked for": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": None}]}]
    },
    "a null assistant": {"messages": [*USER, {"role": "assistant", "content": []}, *USER]},
}


@pytest.mark.parametrize("name", ODD_BUT_FINE)
async def test_odd_but_readable_request_is_served(model_path: Path, name: str) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        body = {"model": "m", "messages": USER, **ODD_BUT_FINE[name]}
        headers = {"x-api-key": harness.api_key, "anthropic-beta": "one,two", "anthropic-version": "2999-01-01"}
        reply = await proxy.client.post("/v1/messages?beta=true&x=y", json=body, headers=headers)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("dialect", PATHS)
async def test_wrong_and_foreign_keys_reach_nothing(model_path: Path, dialect: str) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        mine, other = await proxy.open("mine"), await proxy.open("other")
        token = mine.api_key.rpartition("-")[2]
        attempts: list[tuple[str, dict[str, str]]] = [
            ("", {}),
            ("", {"x-api-key": "DUMMY"}),
            ("", {"x-api-key": "gyre-"}),
            ("", {"x-api-key": f"gyre-{mine.session_id}"}),
            ("", {"x-api-key": f"gyre-{mine.session_id}-{'0' * 32}"}),
            ("", {"x-api-key": f"gyre-{mine.session_id}-{token}-more"}),
            ("", {"x-api-key": f"gyre-{other.session_id}-{token}"}),
            ("", {"authorization": "Basic abc"}),
            ("", {"authorization": ADMIN_HEADERS["authorization"]}),
            ("/s/unknown", {"x-api-key": "DUMMY"}),
            ("/s/", {"x-api-key": "DUMMY"}),
            (f"/s/{other.session_id}", {"x-api-key": mine.api_key}),
            (f"/s/{other.session_id}", {"authorization": f"Bearer {mine.api_key}"}),
        ]
        for prefix, headers in attempts:
            reply = await proxy.client.post(prefix + PATHS[dialect], json={"messages": USER}, headers=headers)
            assert reply.status_code == 401, (prefix, headers)
            assert is_error_of(dialect, reply.json())
        assert not (await mine.seal()).calls and not (await other.seal()).calls


async def test_admin_verbs_need_the_admin_secret(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": harness.api_key}):
            for method, path in (
                ("POST", "/admin/sessions"),
                ("POST", f"/admin/sessions/{harness.session_id}/seal"),
                ("DELETE", f"/admin/sessions/{harness.session_id}"),
                ("PUT", "/admin/engines"),
                ("GET", "/admin/status"),
                ("GET", "/admin/"),
            ):
                assert (await proxy.client.request(method, path, headers=headers)).status_code == 401
        assert (await harness.messages(USER)).status_code == 200


@pytest.mark.parametrize("dialect", PATHS)
async def test_huge_body_is_a_413_however_it_comes(model_path: Path, dialect: str) -> None:
    async with running_proxy(model_path, fake_engine("a"), max_body_bytes=1000) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        headers = {"x-api-key": harness.api_key}

        async def chunks() -> Any:
            for _ in range(2000):
                yield b"x" * 1000

        async with httpx.AsyncClient(base_url=url) as client:
            declared = await client.post(PATHS[dialect], content=b"x" * 100_000, headers=headers)
            assert declared.status_code == 413 and is_error_of(dialect, declared.json())
            try:
                streamed = await client.post(PATHS[dialect], content=chunks(), headers=headers)
                assert streamed.status_code == 413
            except httpx.TransportError:
                pass  # the proxy closed before the client had sent everything
        assert (await harness.messages(USER)).status_code == 200


async def test_session_may_have_a_smaller_body_limit(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open(limits={"max_body_bytes": 400})
        assert (await harness.messages([{"role": "user", "content": "x" * 400}])).status_code == 413
        assert (await harness.messages(USER)).status_code == 200


async def test_body_that_never_ends_is_given_up(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a"), body_timeout_s=0.05) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.api_key}\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert (await harness.messages(USER)).status_code == 200


async def test_probes_are_answered_without_a_key(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy:
        for method, path in (
            ("HEAD", "/"),
            ("GET", "/"),
            ("HEAD", "/api/hello"),
            ("GET", "/healthz"),
            ("GET", "/v1/models"),
        ):
            assert (await proxy.client.request(method, path)).status_code == 200, path


async def test_raw_noise_does_not_end_the_server(model_path: Path) -> None:
    rng = random.Random(0)
    async with running_proxy(model_path, fake_engine("a")) as proxy, serving(proxy) as url:
        harness = await proxy.open()
        port = int(url.rpartition(":")[2])
        for _ in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rng.randbytes(rng.randrange(1, 400)))
            writer.close()
        assert (await harness.messages(USER)).status_code == 200


async def test_thousand_mutated_requests_leave_the_session_usable(model_path: Path) -> None:
    rng = random.Random(1)
    engine = fake_engine(stop_token_ids=[258], mean_length=3)
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(limits={"max_calls": 5000})
        for number in range(1000):
            body = _mutated(
                rng, {"model": "m", "max_tokens": 3, "messages": [dict(USER[0])], "system": "s", "tools": []}
            )
            path = rng.choice(list(PATHS.values()))
            reply = await proxy.client.post(path, content=body, headers={"x-api-key": harness.api_key})
            assert reply.status_code in (200, 400), (number, body, reply.text)
        assert (await harness.messages(USER, max_tokens=3)).status_code == 200
        trajectory = await harness.seal()
        trajectory.tree.validate()
        assert "refused_internal" not in trajectory.counters


def _mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    odd = '[null, 0, -1, 1e308, true, "", "xxxxxx", [], {}, [[]], {"type": "text"}, {"role": []}, [{"type": 5}]]'
    target: Any = body
    for _ in range(rng.randrange(1, 4)):
        target = body
        while isinstance(target, dict | list) and target and rng.random() < 0.7:
            key = rng.choice(list(target)) if isinstance(target, dict) else rng.randrange(len(target))
            if not isinstance(target[key], dict | list):
                break
            target = target[key]
        if isinstance(target, dict):
            target[rng.choice([*target, "content", "role", "tool_calls", "stream", "stop", "thinking"])] = rng.choice(
                orjson.loads(odd)
            )
        elif isinstance(target, list):
            target.append(rng.choice(orjson.loads(odd)))
    data = bytearray(orjson.dumps(body))
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)
