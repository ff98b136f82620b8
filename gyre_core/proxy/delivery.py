"""Sends a call's reply over one connection, and keeps the connection alive until there is one.

Enters: a call, done or running. Leaves: bytes.

Invariants:
- a response that has begun ends with the whole reply or is cut off; never an error after content;
- `delivered` is called only when the last byte was handed to a client that was still there;
- a client that goes away ends the response, not the call;
- a slow reader holds its reply and nothing else: each piece waits for the one before it.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, MutableSet

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gyre_core.proxy.call import RunningCall
from gyre_core.proxy.conversation import ChatRequest, Reply
from gyre_core.proxy.dialects.base import Dialect

logger = logging.getLogger(__name__)

ABORT_EXTENSION = "gyre.abort"  # in the scope's extensions: cuts the connection at once
PIECE_BYTES = 32 * 1024  # events go out together up to this size: below the 64 KiB at which a transport pauses writing


class ReplyResponse(Response):
    """The response to one harness request that is answered with a reply."""

    def __init__(
        self,
        call: RunningCall,
        request: ChatRequest,
        dialect: Dialect,
        *,
        keepalive_s: float,
        connections: MutableSet[asyncio.Task],
        delivered: Callable[[Reply], None],
        count: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        """`connections` holds this connection's task while it is open: cancelling that task cuts the connection."""
        self._call = call
        self._request = request
        self._dialect = dialect
        self._keepalive_s = keepalive_s
        self._connections = connections
        self._delivered = delivered
        self._count = count
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(receive())  # after the body, the only message is the disconnect
        self._connections.add(task)
        try:
            await asyncio.sleep(0)  # a disconnect that is known already shows now
            reply = await self._send(send, watch)
            if reply is None and not watch.done():
                await self._cut(scope, watch)
            elif reply is not None and not watch.done():
                self._delivered(reply)
        except asyncio.CancelledError:
            if task in self._connections:
                raise  # not the session's doing
            task.uncancel()
            await self._cut(scope, watch)
        finally:
            self._connections.discard(task)
            watch.cancel()
            self._ended()

    async def _send(self, send: Send, watch: asyncio.Future) -> Reply | None:
        """Send the reply; returns None when the client left or there will be no reply."""
        call, pending = self._call, self._call.reply
        if watch.done():
            return None
        if pending.done():
            reply = call.result()
            if self._request.stream:
                events = self._dialect.events(self._request, call.call_id, reply.created_s, reply.prompt_tokens)
                await self._start(send)
                await _send_pieces(send, _with_head(events.begin(), events.finish(reply)))
            else:
                body = orjson.dumps(self._dialect.reply_body(reply, self._request))
                await self._start(send, len(body))
                await _send_pieces(send, (body,))
            return reply
        await self._start(send)
        self._count("replies_opened_early")
        events = self._dialect.events(self._request, call.call_id, call.created_s, call.prompt_tokens)
        await _send_piece(send, events.begin() if self._request.stream else self._dialect.keepalive_body)
        while not pending.done():
            await asyncio.wait((pending, watch), timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                return None
            if not pending.done():
                self._count("keepalives")
                await _send_piece(send, events.keepalive() if self._request.stream else self._dialect.keepalive_body)
        if pending.cancelled() or pending.exception() is not None:
            return None
        reply = pending.result()
        if self._request.stream:
            await _send_pieces(send, events.finish(reply))
        else:
            await _send_pieces(send, (orjson.dumps(self._dialect.reply_body(reply, self._request)),))
        return reply

    async def _start(self, send: Send, length: int | None = None) -> None:
        media_type = b"text/event-stream; charset=utf-8" if self._request.stream else b"application/json"
        request_id = f"req_{secrets.token_hex(8)}".encode()
        headers = [
            (b"content-type", media_type),
            (b"cache-control", b"no-cache"),
            (b"request-id", request_id),  # Anthropic's name
            (b"x-request-id", request_id),  # OpenAI's
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _cut(self, scope: Scope, watch: asyncio.Future) -> None:
        """Cut the connection: the client sees that the reply is not whole."""
        self._count("connections_cut")
        abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
        if abort is None:
            raise ConnectionAbortedError("a call ended without a reply after its response had begun")
        abort()
        await watch


def _with_head(head: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


async def _send_piece(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _send_pieces(send: Send, parts: Iterable[bytes]) -> None:
    """Send the last part of a response, in pieces."""
    buffer = bytearray()
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            buffer += part[start : start + PIECE_BYTES]
            if len(buffer) >= PIECE_BYTES:
                await _send_piece(send, bytes(buffer))
                buffer.clear()
    await _send_piece(send, bytes(buffer), more=False)
