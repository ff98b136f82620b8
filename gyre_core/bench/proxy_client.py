"""The harnesses of `gyre bench proxy`: many conversations over keep-alive connections, timed one call at a time.

Enters: an address and the bytes to send. Leaves: seconds from the first byte written to the last byte read, and what
was read. The client does nothing else while a call runs: bodies are made before and replies are read afterwards.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import orjson

from gyre_core.bench.proxy_engine import FixedReply
from gyre_core.bench.proxy_history import Corpus, History
from gyre_core.errors import GyreError

CALL_TIMEOUT_S = 300.0  # of one call, when hundreds wait for one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply as the harness read it."""

    seconds: float
    call_id: str
    text: str
    num_events: int  # 1 when it was not streamed


class Connection(asyncio.Protocol):
    """One keep-alive connection of HTTP/1.1."""

    def __init__(self) -> None:
        self._received: list[bytes] = []
        self._size = 0
        self._needed = -1  # bytes of the response, -1 while its head is not whole, 0 when it is chunked
        self._done: asyncio.Future[float] | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect to a server on this machine."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._needed < 0:
            head, found, _ = b"".join(self._received).partition(b"\r\n\r\n")
            if not found:
                return
            lower = head.lower()
            at = lower.find(b"\r\ncontent-length:")
            self._needed = len(head) + 4 + int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        whole = self._size >= self._needed if self._needed else self._ends_in_last_chunk(data)
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(GyreError(f"the server closed the connection ({exc})"))

    def is_open(self) -> bool:
        """Whether a request can be written; servers close connections that were idle for long."""
        return not self._transport.is_closing()

    async def send(self, parts: list[bytes]) -> tuple[float, bytes]:
        """Write a request, read its response: seconds and bytes."""
        self._received, self._size, self._needed = [], 0, -1
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.writelines(parts)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            ended = await self._done
        return ended - started, b"".join(self._received)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _ends_in_last_chunk(self, data: bytes) -> bool:
        end = b"\r\n0\r\n\r\n"
        return data.endswith(end) or (len(data) < len(end) and b"".join(self._received).endswith(end))


class Conversation:
    """One session's conversation: its history is sent again with each call and grows by a turn."""

    def __init__(self, port: int, key: str, history: History, corpus: Corpus, reply: FixedReply) -> None:
        self.key = key
        self._port = port
        self._connection: Connection | None = None
        self._head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n".encode()
        self._head += b"content-type: application/json\r\ncontent-length: "
        self._history = history
        self._corpus = corpus
        self._reply = reply
        self._turns = b""
        self._number = 0

    async def connect(self) -> None:
        """See to an open connection."""
        if self._connection is None or not self._connection.is_open():
            self._connection = await Connection.open(self._port)

    async def call(self, *, stream: bool) -> Answer:
        """The next call, after `connect`; raises GyreError for a reply that is not the engine's."""
        assert self._connection is not None
        tail = self._history.tail[stream]
        size = len(self._history.head) + len(self._turns) + len(tail)
        head = self._head + str(size).encode() + b"\r\n\r\n"
        seconds, response = await self._connection.send([head, self._history.head, self._turns, tail])
        answer = read_answer(response, seconds, stream=stream)
        if answer.text != self._reply.text:
            raise GyreError(f"another reply than the engine's: {response[:500]!r}")
        self._add_turn(answer.call_id)
        return answer

    def skip_call(self) -> None:
        """Go on as if a call had been made and answered."""
        self._add_turn("call_0")

    def body(self, *, stream: bool) -> bytes:
        """The next call's body."""
        return self._history.body(self._turns, stream=stream)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _add_turn(self, call_id: str) -> None:
        self._turns += self._corpus.turn(self._reply, call_id, self._number)
        self._number += 1


def read_answer(response: bytes, seconds: float, *, stream: bool) -> Answer:
    """What a response says; raises GyreError for an error or a reply without a tool call."""
    head, _, body = response.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise GyreError(f"a call was refused: {response[:500]!r}")
    if not stream:
        message = orjson.loads(body)["choices"][0]["message"]
        call_id, text, num_events = message["tool_calls"][0]["id"], message["content"] or "", 1
    else:
        call_id, text, num_events = "", "", 0
        for line in _dechunked(body).split(b"\n"):
            if not line.startswith(b"data: "):
                continue
            num_events += 1
            if line[6:].strip() == b"[DONE]":
                continue
            for choice in orjson.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    call_id = call_id or call.get("id") or ""
    if not call_id:
        raise GyreError(f"a reply without a tool call: {response[:500]!r}")
    return Answer(seconds=seconds, call_id=call_id, text=text, num_events=num_events)


def _dechunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        size, _, _ = body[at : at + 20].partition(b"\r\n")
        start = at + len(size) + 2
        length = int(size.split(b";")[0], 16)
        parts.append(body[start : start + length])
        at = start + length + 2
    return b"".join(parts)
