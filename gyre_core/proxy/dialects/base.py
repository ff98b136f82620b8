"""What a dialect is: how one public API reads requests and writes replies, streams and errors. A module each."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from gyre_core.proxy.conversation import ChatRequest, Reply
from gyre_core.proxy.refusal import Refusal
from gyre_core.types import Json


class Dialect(Protocol):
    """One API. Pure: JSON in, records and JSON out."""

    name: str  # in call records: messages | chat

    def parse(self, body: Json, headers: Mapping[str, str]) -> ChatRequest:
        """Read a request; raises Refusal for what the API would answer with a 400. Unknown fields are ignored."""
        ...

    def mint_tool_call_id(self, unique: str) -> str:
        """A tool-call id in the API's form from a string that is unique in the world."""
        ...

    def reply_body(self, reply: Reply, request: ChatRequest) -> Json:
        """The body of a reply that is not streamed."""
        ...

    def reply_events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        """The reply as server-sent events, in the API's order."""
        ...

    def error(self, refusal: Refusal) -> tuple[int, Json]:
        """Status code and body of a refusal."""
        ...


def sse(data: bytes, event: str = "") -> bytes:
    """One server-sent event."""
    return (b"event: " + event.encode() + b"\n" if event else b"") + b"data: " + data + b"\n\n"
