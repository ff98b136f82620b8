"""The engine of `gyre bench proxy`: one reply for every call, at once, in the forms of two servers.

Enters: HTTP. `/generate` answers as SGLang does (ids in, ids out), `/v1/chat/completions` as OpenAI-compatible servers
do, streamed (a chunk a token) or not. Leaves: the same reply each time, written in one go. Nothing of a request is
parsed but what the reply needs, so that what is measured in front of it is not the engine.

Run as `python -m gyre_core.bench.proxy_engine --port N --reply FILE`; FILE holds a `FixedReply` as JSON.
"""

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import uvloop

from gyre_core.process import end_with_parent

_NO_ANSWER = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_MODEL = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedReply:
    """What the engine says, whatever it is asked."""

    output_ids: list[int]
    stop_token: int
    pieces: list[str]  # the text's tokens, one a streamed chunk
    tool_name: str
    tool_arguments: str  # JSON

    @property
    def text(self) -> str:
        """The reply's text, without its tool call."""
        return "".join(self.pieces)

    def to_json(self) -> bytes:
        """For the command line's FILE."""
        return orjson.dumps(asdict(self))


class Replies:
    """The bytes of every kind of reply, made once."""

    def __init__(self, reply: FixedReply) -> None:
        self._generate = _generate_parts(reply)
        self._chat = _response(orjson.dumps(_chat_body(reply)), b"application/json")
        self._stream = _chunked([b"data: " + event + b"\n\n" for event in _chat_events(reply)])

    def answer(self, path: bytes, request: bytes) -> bytes:
        """The whole response to a request; its head may stand before its body."""
        if path == b"/generate":
            start = request.index(b'"input_ids":') + len(b'"input_ids":')
            num_prompt = request.count(b",", start, request.index(b"]", start)) + 1
            head, tail = self._generate
            return _response(head + str(num_prompt).encode() + tail, b"application/json")
        if path.endswith(b"/chat/completions"):
            tail = request[-2000:]  # the client puts its options after the messages
            return self._stream if b'"stream":true' in tail or b'"stream": true' in tail else self._chat
        if path in (b"/health", b"/model_info"):
            return _response(b'{"weight_version":"0"}', b"application/json")
        return _NO_ANSWER


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with content-length bodies, one request after another."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._received: list[bytes] = []
        self._size = 0
        self._needed = 0  # bytes of head and body, 0 while the head is not whole
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if not self._needed:
            joined = b"".join(self._received)
            self._received = [joined]
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            head = joined[:end]
            self._path = head.split(b" ", 2)[1].partition(b"?")[0]
            self._needed = end + 4 + _content_length(head)
        if self._size >= self._needed:
            received = self._received[0] if len(self._received) == 1 else b"".join(self._received)
            self._received, self._size, self._needed = [], 0, 0
            self._transport.write(self._replies.answer(self._path, received))


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    return int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


def _response(body: bytes, media_type: bytes) -> bytes:
    size = str(len(body)).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: " + media_type + b"\r\ncontent-length: " + size + b"\r\n\r\n" + body


def _chunked(events: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def _generate_parts(reply: FixedReply) -> tuple[bytes, bytes]:
    """SGLang's reply around the number of prompt tokens."""
    num = len(reply.output_ids)
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": reply.stop_token},
        "weight_version": "0",
        "completion_tokens": num,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": num}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5 - (token % 64) / 64, token, None] for token in reply.output_ids],
        "prompt_tokens": -1,
    }
    whole = orjson.dumps({"text": "", "output_ids": reply.output_ids, "meta_info": meta})
    head, _, tail = whole.rpartition(b"-1")
    return head, tail


def _chat_body(reply: FixedReply) -> dict[str, Any]:
    function = {"name": reply.tool_name, "arguments": reply.tool_arguments}
    message = {
        "role": "assistant",
        "content": reply.text,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": _MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": len(reply.output_ids), "total_tokens": 1},
    }


def _chat_events(reply: FixedReply) -> list[bytes]:
    function = {"name": reply.tool_name, "arguments": reply.tool_arguments}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in reply.pieces]
    deltas.append({"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": function}]})
    deltas.append({})
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": _MODEL}
    reasons = [None] * (len(deltas) - 1) + ["tool_calls"]
    choices = [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in zip(deltas, reasons, strict=True)
    ]
    return [*(orjson.dumps({**head, "choices": choice}) for choice in choices), b"[DONE]"]


async def _serve(port: int, reply: FixedReply) -> None:
    replies = Replies(reply)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(replies), "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m gyre_core.bench.proxy_engine")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--reply", type=Path, required=True)
    arguments = parser.parse_args(argv)
    end_with_parent()
    uvloop.run(_serve(arguments.port, FixedReply(**orjson.loads(arguments.reply.read_bytes()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
