"""Recorded calls of a real harness, played through the proxy app as that harness would.

Enters: one run's recorded calls (what was asked, what the model emitted, when, which connection broke) in the form
that `infra/recordings.py` describes. Leaves: the sealed trajectory and what became of each call. The engine emits
exactly the recorded blocks as tokens, in the renderer's own format; calls overlap as they did; a connection that broke
is a client that went away; ids that the proxy minted stand in later requests for the recorded ones. No time passes,
nothing is random: the same run gives the same tree.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gyre_core.engine.fake_model import FakeCall, FakeEngine, fake_logprob
from gyre_core.proxy.dialects.response_items import policy_name
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan
from tests.support.proxies import ADMIN_HEADERS, Harness, ProxyUnderTest, assert_exact, running_proxy
from tests.support.tokenizer import VOCAB_SIZE, encode

ID_FIELDS = ("id", "tool_use_id", "tool_call_id", "call_id", "signature", "encrypted_content")
TEXT_ID = re.compile(r"\b(?:call|toolu)_lab\d+\b")  # some harnesses write ids into texts
LOST = ("cut", "ended", "sse_error", "client closed", "http", "stalled")  # outcomes that the harness did not get whole
CONTEXT_LENGTH = 1_000_000  # the recorded harnesses believe in windows that byte tokens must not fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a run's calls became.

    Example: result = await replay(proxy, rows, harness="codex", version="0.171.0")
    """

    trajectory: Trajectory
    requests: Counter[str]  # answered | lost (the client went away) | probes | counts (count_tokens)
    refusals: list[str] = field(default_factory=list)  # "n: status body"
    engine: FakeEngine

    def summary(self) -> dict[str, Any]:
        """What the golden files hold."""
        tree, calls = self.trajectory.tree, self.trajectory.calls
        role_of = {call.call_id: call.role.value for call in calls}
        leaves = Counter(role_of.get(tree.nodes[leaf].call_id, "none") for leaf in tree.leaves())
        return {
            "requests": dict(sorted(self.requests.items())),
            "refused": len(self.refusals),
            "sampled_calls": len(calls),
            "roles": dict(sorted(Counter(call.role.value for call in calls).items())),
            "substitutions": "".join(call.substitution.value[0] for call in calls),
            "branches": dict(sorted(leaves.items())),
            "counters": {
                name: value
                for name, value in self.trajectory.counters.items()
                if value and name.startswith(("splice_", "retries_", "malformed_", "empty_"))
            },
        }


class ReplayEngine(FakeEngine):
    """Emits what the driver set for the call that it launches next, once the driver lets it end."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.arrived = asyncio.Event()
        self.next: tuple[list[int], FinishReason, asyncio.Event] | None = None

    async def generate(
        self, input_ids: Sequence[int] | TokenIds, params: SamplingParams, *, rid: str, cache_salt: str = ""
    ) -> Generation:
        """The planned output of the call that was launched last."""
        assert self.next is not None, "the proxy sampled a call that the driver did not launch"
        (output, reason, gate), self.next = self.next, None
        call = FakeCall(rid=rid, input_ids=np.asarray(input_ids).tolist(), sampling_params={}, cache_salt=cache_salt)
        call.output_ids = output
        self.calls.append(call)
        self.arrived.set()
        await gate.wait()
        return Generation(
            output_ids=np.array(output, np.int32),
            logprobs=np.array([fake_logprob(token) for token in output], np.float32),
            finish_reason=reason,
            spans=(VersionSpan(version=0, start=0, end=len(output)),),
            prompt_tokens=len(call.input_ids),
        )


def emitted_text(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Recorded blocks as the policy writes them."""
    parts: list[str] = []
    for block in blocks:
        match block["type"]:
            case "thinking":
                parts.append(f"<think>\n{block['text']}\n</think>\n\n")
            case "text":
                parts.append(block["text"])
            case "tool":
                name = policy_name(block.get("namespace") or "", block["name"])
                parts.append(f'\n<tool_call>\n{{"name": "{name}", "arguments": {block["raw"]}}}\n</tool_call>')
    return "".join(parts)


def planned(row: Mapping[str, Any]) -> tuple[list[int], FinishReason]:
    """The tokens that a recorded call's model emits, and why it ends."""
    response = row["response"]
    stop = response.get("stop") or ""
    cut = "max_tokens" in stop or "length" in stop
    text = emitted_text(response.get("emitted_blocks") or [])
    if cut and text:
        closing = "\n</think>\n\n" if text.endswith("</think>\n\n") else "}\n</tool_call>"
        return encode(text.removesuffix(closing)), FinishReason.LENGTH
    return encode(text + "<|im_end|>"), FinishReason.STOP


@dataclass(slots=True)
class _Reply:
    """What the proxy answered: the ids that it minted, by what they are of."""

    status: int
    body: bytes
    tools: list[str] = field(default_factory=list)  # ids, in order
    reasoning: list[str] = field(default_factory=list)  # signatures or item ids, in order


@dataclass(slots=True)
class _Running:
    task: "asyncio.Task[_Reply]"
    gate: asyncio.Event
    gone: asyncio.Event
    row: Mapping[str, Any]


class Player:
    """Plays one run against one session."""

    def __init__(self, proxy: ProxyUnderTest, engine: ReplayEngine, api_key: str) -> None:
        self.proxy = proxy
        self._engine = engine
        self._api_key = api_key
        self._ids: dict[str, str] = {}  # recorded id -> minted id
        self._replies: list[tuple[Mapping[str, Any], _Reply]] = []
        self.requests: Counter[str] = Counter()
        self.refusals: list[str] = []

    async def play(
        self, rows: Sequence[Mapping[str, Any]], restart: Callable[[], Awaitable[ProxyUnderTest]] | None
    ) -> None:
        """Begin and end the calls in the recorded order, with a new proxy process whenever none runs."""
        running: dict[int, _Running] = {}
        for _, starts, row in sorted(_moments(rows), key=lambda moment: (*moment[:2], moment[2]["n"])):
            if starts and not running and restart is not None:
                self.proxy = await restart()
            if not starts:
                await self._end(running.pop(row["n"]))
            elif row["method"] != "POST":
                response = await self.proxy.client.request(row["method"], row["path"])
                self.requests["probes"] += 1
                assert response.status_code == 200, row["path"]
            elif row["api"] == "count_tokens":
                reply = await self._send(row, self._body(row), asyncio.Event())
                self.requests["counts"] += 1
                self._check(row, reply)
            else:
                running[row["n"]] = await self._begin(row)
        assert not running

    async def _begin(self, row: Mapping[str, Any]) -> _Running:
        gate, gone = asyncio.Event(), asyncio.Event()
        self._engine.next = (*planned(row), gate)
        self._engine.arrived.clear()
        outcome = row["response"].get("outcome") or ""
        midway = outcome.startswith(LOST) and bool(row["response"].get("events_sent"))
        if outcome.startswith(LOST) and not midway:
            gone.set()  # nothing of the reply reached it
        task = asyncio.create_task(self._send(row, self._body(row), gone, leaves_midway=midway))
        arrival = asyncio.create_task(self._engine.arrived.wait())
        await asyncio.wait({task, arrival}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        arrival.cancel()
        return _Running(task, gate, gone, row)

    async def _end(self, call: _Running) -> None:
        outcome = call.row["response"].get("outcome") or ""
        lost = outcome.startswith(LOST)
        call.gate.set()
        reply = await call.task
        self.requests["lost" if lost else "answered"] += 1
        if not lost or reply.status:
            self._check(call.row, reply)
        if reply.status == 200:
            self._replies.append((call.row, reply))
            recorded = [block["id"] for block in call.row["response"]["emitted_blocks"] if block["type"] == "tool"]
            for old, new in zip(recorded, reply.tools, strict=False):  # fewer were minted when some could not be read
                self._ids.setdefault(old, new)

    def _check(self, row: Mapping[str, Any], reply: _Reply) -> None:
        if reply.status != 200:
            self.refusals.append(f"{row['run']} {row['n']}: {reply.status} {reply.body[:300].decode()}")

    def _body(self, row: Mapping[str, Any]) -> bytes:
        body = dict(row["request"])
        tools = body.pop("tools", None)
        if tools:
            body["tools"] = [_tool(row["api"], tool) for tool in tools]
        self._learn_reasoning_ids(body.get("messages") or body.get("input") or [])
        return orjson.dumps(self._translate(body))

    def _learn_reasoning_ids(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Recorded signatures show only when they are sent back: match them with replies by the reasoning's text."""
        for message in messages:
            content = message.get("content")
            for block in content if isinstance(content, list) else ():
                if block.get("type") == "thinking" and block.get("signature"):
                    self._learn(block["signature"], block["thinking"])
            if message.get("type") == "reasoning" and message.get("id"):
                self._learn(message["id"], "".join(part["text"] for part in content or ()))

    def _learn(self, recorded: str, text: str) -> None:
        if recorded in self._ids:
            return
        used = set(self._ids.values())
        for row, reply in self._replies:
            blocks = row["response"]["emitted_blocks"]
            texts = [block["text"] for block in blocks if block["type"] == "thinking"]
            for old, new in zip(texts, reply.reasoning, strict=False):
                if old.strip() == text.strip() and new not in used:
                    self._ids[recorded] = new
                    return

    def _translate(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: self._ids.get(item, item) if key in ID_FIELDS and isinstance(item, str) else self._translate(item)
                for key, item in value.items()
            }
        if isinstance(value, str):
            return TEXT_ID.sub(lambda found: self._ids.get(found[0], found[0]), value)
        return [self._translate(item) for item in value] if isinstance(value, list) else value

    async def _send(
        self, row: Mapping[str, Any], body: bytes, gone: asyncio.Event, *, leaves_midway: bool = False
    ) -> _Reply:
        """POST through ASGI itself, whose client can go away: before the reply, or once its first bytes are there."""
        headers = {name: value for name, value in row["headers"].items() if name.startswith("x-") or "-id" in name}
        headers |= {"content-type": "application/json", "authorization": f"Bearer {self._api_key}"}
        headers.pop("x-api-key", None)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": row["path"],
            "raw_path": row["path"].encode(),
            "query_string": row["query"].encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("proxy", 80),
            "client": ("harness", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        reply = _Reply(0, b"")

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
            else:
                reply.body += message.get("body", b"")
                if leaves_midway:
                    gone.set()
                    await asyncio.sleep(0)  # the server learns of it now

        await self.proxy.app(scope, receive, send)  # pyright: ignore[reportArgumentType]
        if reply.status == 200 and row["api"] != "count_tokens":
            _read_ids(reply)
        return reply


async def replay(
    model_path: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    harness: str,
    version: str,
    journal_dir: Path | None = None,
    proxy_fields: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Replayed:
    """Play one run on a proxy of its own; checks the tree's invariants and that each sampled token is there once.

    With a `journal_dir` the proxy is restarted from its journal before each call that overlaps no other.
    """
    engine = ReplayEngine()
    async with AsyncExitStack() as stack:

        async def start() -> ProxyUnderTest:
            await stack.aclose()
            fields = {"context_length": CONTEXT_LENGTH, "journal_dir": journal_dir, **(proxy_fields or {})}
            return await stack.enter_async_context(running_proxy(model_path, engine, **fields))

        proxy = await start()
        body = {
            "rollout_id": rows[0]["run"],
            "harness": {"name": harness, "version": version},
            "sampling": {"max_new_tokens": CONTEXT_LENGTH},
            **settings,
        }
        response = await proxy.client.post("/admin/sessions", json=body, headers=ADMIN_HEADERS)
        names = response.raise_for_status().json()
        player = Player(proxy, engine, names["api_key"])
        await player.play(rows, start if journal_dir is not None else None)
        trajectory = await Harness(player.proxy.client, **names).seal()
    assert_exact(trajectory, engine)
    assert len(trajectory.calls) == len(engine.calls)
    return Replayed(trajectory=trajectory, requests=player.requests, refusals=player.refusals, engine=engine)


def _moments(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, bool, Mapping[str, Any]]]:
    """(time, begins, row); at one time ends come before beginnings."""
    for row in rows:
        yield row["t"], True, row
        if row["method"] == "POST" and row["api"] != "count_tokens":
            yield max(row["response"]["t"], row["t"] + 1e-4), False, row


def _tool(api: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded tool (its name and parameter names) as the API writes it."""
    schema = {"type": "object", "properties": {name: {} for name in tool["params"]}}
    rest = {key: value for key, value in tool.items() if key not in ("name", "params", "tools")}
    if api == "anthropic":
        return {"name": tool["name"], "input_schema": schema, **rest}
    if api == "chat":
        return {"type": "function", "function": {"name": tool["name"], "parameters": schema}}
    if tool["name"] is None:
        return rest
    if "tools" in tool:
        inner = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in tool["tools"]]
        return {**rest, "name": tool["name"], "tools": inner}
    return {**rest, "name": tool["name"], "parameters": schema}


def _read_ids(reply: _Reply) -> None:
    """The minted ids in a reply of any API, streamed or not."""
    if reply.body.lstrip().startswith(b"{"):
        parts = [orjson.loads(reply.body)]
    else:
        lines = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
        parts = [orjson.loads(line) for line in lines if line != b"[DONE]"]
    for part in parts:
        if isinstance(part.get("response"), dict):
            if part["type"] in ("response.completed", "response.incomplete"):
                _read_items(part["response"]["output"], reply)
        elif "output" in part:
            _read_items(part["output"], reply)
        elif part.get("type") == "message":
            for block in part["content"]:
                _read_block(block, reply)
        elif part.get("type") == "content_block_start":
            _read_block(part["content_block"], reply)
        elif part.get("type") == "content_block_delta" and part["delta"]["type"] == "signature_delta":
            reply.reasoning.append(part["delta"]["signature"])
        for choice in part.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            reply.tools += [call["id"] for call in message.get("tool_calls") or () if call.get("id")]


def _read_block(block: Mapping[str, Any], reply: _Reply) -> None:
    if block["type"] == "tool_use":
        reply.tools.append(block["id"])
    elif block["type"] == "thinking" and block.get("signature"):
        reply.reasoning.append(block["signature"])


def _read_items(items: Sequence[Mapping[str, Any]], reply: _Reply) -> None:
    reply.tools += [item["call_id"] for item in items if item["type"] == "function_call"]
    reply.reasoning += [item["id"] for item in items if item["type"] == "reasoning"]
