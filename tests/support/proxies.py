"""A proxy inside the test's process, in front of a fake engine, and harnesses that talk to it."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from gyre_core.engine.fake import FakeEngine
from gyre_core.proxy.http import server_config
from gyre_core.proxy.server import Proxy, create_app
from gyre_core.proxy.settings import ProxySettings
from gyre_core.trajectory.arrow import trajectory_from_ipc
from gyre_core.trajectory.text import golden
from gyre_core.trajectory.tree import Trajectory
from tests.support.tokenizer import VOCAB_SIZE, decode, encode

ADMIN_SECRET = "test-secret-of-the-admin"
ADMIN_HEADERS = {"authorization": f"Bearer {ADMIN_SECRET}"}
BASH = {"name": "bash", "description": "run it", "input_schema": {"type": "object"}}

_SHORT = (
    ("<|im_start|>system\n", "<sys> "),
    ("<|im_start|>user\n", "<usr> "),
    ("<|im_start|>assistant\n", "<ast> "),
    ("<tool_response>\n", "<res> "),
    ("\n</tool_response>", " </res>"),
    ("<|im_end|>", " </>"),
)


def short(ids: Sequence[int]) -> str:
    """Text of ids in which templates are easy to read: `<sys> s </> <usr> u </> <ast> [a </>]`."""
    text = decode(ids)
    for long, replacement in _SHORT:
        text = text.replace(long, replacement)
    return re.sub(r"\s+", " ", text)


def call_text(name: str, arguments: str) -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def outputs(*texts: str) -> list[list[int]]:
    """Scripted outputs: each text and the end of the turn, unless it ends in "…" (cut)."""
    return [encode(text[:-1]) if text.endswith("…") else encode(text + "<|im_end|>") for text in texts]


@dataclass
class Harness:
    """One session as its harness uses it."""

    client: httpx.AsyncClient
    session_id: str
    api_key: str

    async def messages(self, messages: list[Any], *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """POST /v1/messages; returns the response."""
        body = {"model": "any-name", "max_tokens": 1000, "messages": messages, **fields}
        return await self.client.post(
            "/v1/messages?beta=true", json=body, headers={"x-api-key": self.api_key, **(headers or {})}
        )

    async def chat(self, messages: list[Any], *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """POST /v1/chat/completions; returns the response."""
        body = {"model": "any-name", "messages": messages, **fields}
        return await self.client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {self.api_key}", **(headers or {})}
        )

    async def responses(self, items: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """POST /v1/responses; returns the response."""
        body = {"model": "any-name", "input": items, **fields}
        return await self.client.post(
            "/v1/responses", json=body, headers={"authorization": f"Bearer {self.api_key}", **(headers or {})}
        )

    async def seal(self) -> Trajectory:
        """End the session and fetch its trajectory."""
        response = await self.client.post(f"/admin/sessions/{self.session_id}/seal", headers=ADMIN_HEADERS)
        assert response.status_code == 200, response.text
        return trajectory_from_ipc(response.content)

    async def tree(self) -> str:
        """The session's tree as a golden string, roots and branches on lines of their own. Ends the session."""
        return golden((await self.seal()).tree, short)


@dataclass
class ProxyUnderTest:
    """The proxy, its engine and an HTTP client of it."""

    app: Starlette
    proxy: Proxy
    engine: FakeEngine
    client: httpx.AsyncClient

    async def open(self, rollout_id: str = "r1", harness: str = "quickstart-agent", **settings: Any) -> Harness:
        """Open a session."""
        body = {
            "rollout_id": rollout_id,
            "sampling": {"temperature": 1.0, "max_new_tokens": 1000, "seed": 7},
            "harness": {"name": harness, "version": "1"},
            **settings,
        }
        response = await self.client.post("/admin/sessions", json=body, headers=ADMIN_HEADERS)
        assert response.status_code == 200, response.text
        return Harness(self.client, **response.json())

    async def drop(self, harness: Harness) -> None:
        """Forget a session."""
        response = await self.client.delete(f"/admin/sessions/{harness.session_id}", headers=ADMIN_HEADERS)
        assert response.status_code == 200, response.text

    async def engines(self, *urls: str, version: int = 0, slots: int = 8) -> None:
        """Say which engines take calls."""
        body = {"engines": [{"url": url, "slots": slots} for url in urls], "policy_version": version}
        response = await self.client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)
        assert response.status_code == 200, response.text

    async def status(self) -> dict[str, Any]:
        """The proxy's counters."""
        return (await self.client.get("/admin/status", headers=ADMIN_HEADERS)).json()

    async def until(self, **wanted: int) -> None:
        """Wait until the proxy's status or counters have these values."""
        await self._until(lambda values: all(values.get(key, 0) == value for key, value in wanted.items()))

    async def until_at_least(self, **wanted: int) -> None:
        """Wait until the proxy's status or counters have these values, or greater ones."""
        await self._until(lambda values: all(values.get(key, 0) >= value for key, value in wanted.items()))

    async def _until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(10):
            while True:
                status = await self.status()
                if holds({**status, **status["counters"]}):
                    return
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running_proxy(
    model_path: Path, engine: FakeEngine | dict[str, FakeEngine], **settings: Any
) -> AsyncIterator[ProxyUnderTest]:
    """A proxy whose engines are `engine` (at http://engine) or a url -> engine mapping; all take calls."""
    engines = engine if isinstance(engine, dict) else {"http://engine": engine}
    fields: dict[str, Any] = {
        "admin_secret": ADMIN_SECRET,
        "model_path": model_path,
        "context_length": 8192,
        "journal_sync": "session",
        **settings,
    }
    app = create_app(ProxySettings(**fields), connect=lambda url, _: engines[url])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=30) as client:
        under_test = ProxyUnderTest(app, app.state.proxy, next(iter(engines.values())), client)
        await under_test.engines(*engines)
        try:
            yield under_test
        finally:
            await under_test.proxy.aclose()


@asynccontextmanager
async def serving(proxy: ProxyUnderTest) -> AsyncIterator[str]:
    """The proxy on a real port in this event loop; gives its url."""
    listener = socket.socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(proxy.app, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task
        listener.close()


def fake_engine(*texts: str, **fields: Any) -> FakeEngine:
    """A fake engine with the test tokenizer's vocabulary and scripted texts."""
    return FakeEngine(outputs(*texts), vocab_size=VOCAB_SIZE, **fields)


def assert_exact(trajectory: Trajectory, *engines: FakeEngine) -> None:
    """Every call's path is what an engine saw and sampled, and every sampled token is in the tree once."""
    trajectory.tree.validate()
    seen = {tuple(call.input_ids + call.output_ids) for engine in engines for call in engine.calls}
    for call in trajectory.calls:
        path = trajectory.tree.path_tokens(call.node_id).tolist()
        assert tuple(path) in seen, short(path)
        assert len(path) == call.prompt_tokens + call.output_tokens
        own = sum(len(node.token_ids) for node in trajectory.tree.nodes if node.call_id == call.call_id)
        assert own == call.output_tokens
    assert trajectory.tree.sampled_tokens == sum(call.output_tokens for call in trajectory.calls)
