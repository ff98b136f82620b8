"""What a dialect is: how one public API reads requests and writes replies, streams and errors. A module each."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from gyre_core.proxy.conversation import ChatRequest, Reply
from gyre_core.proxy.refusal import Refusal
from gyre_core.types import Json


class EventStream(Protocol):
    """One reply as server-sent events. `begin` and `keepalive` may go out before anything of the reply is known."""

    def begin(self) -> bytes:
        """The head events; called once, first."""
        ...

    def keepalive(self) -> bytes:
        """What the API's clients count as progress and what changes nothing; any number of times after `begin`."""
        ...

    def finish(self, reply: Reply) -> Iterator[bytes]:
        """All the rest, event by event; called once, after `begin`."""
        ...


class Dialect(Protocol):
    """One API. Pure: JSON in, records and JSON out."""

    name: str  # in call records: messages | chat | responses
    keepalive_body: bytes  # before a reply that is not streamed: whitespace, which JSON allows and read time-outs see

    def parse(self, body: Json, headers: Mapping[str, str]) -> ChatRequest:
        """Read a request; raises Refusal for what the API would answer with a 400. Unknown fields are ignored."""
        ...

    def mint_tool_call_id(self, unique: str) -> str:
        """A tool-call id in the API's form from a string that is unique in the world."""
        ...

    def reply_body(self, reply: Reply, request: ChatRequest) -> Json:
        """The body of a reply that is not streamed."""
        ...

    def events(self, request: ChatRequest, reply_id: str, created_s: float, prompt_tokens: int) -> EventStream:
        """The events of one reply; `prompt_tokens` is 0 while it is not known."""
        ...

    def error(self, refusal: Refusal) -> tuple[int, Json]:
        """Status code and body of a refusal."""
        ...

    def error_events(self, refusal: Refusal, request: ChatRequest, reply_id: str, created_s: float) -> bytes:
        """The whole stream of a refused request that streams, empty where the API tells it by status and body."""
        ...


def sse(data: bytes, event: str = "") -> bytes:
    """One server-sent event."""
    return (b"event: " + event.encode() + b"\n" if event else b"") + b"data: " + data + b"\n\n"
