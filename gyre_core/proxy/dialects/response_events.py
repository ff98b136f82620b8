"""A response as server-sent events, in the order and with the fields of the Responses API.

Enters: the response object as it starts, and a function that gives it as it ends. Leaves: numbered events. What the
events tell is what the finished object holds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from gyre_core.proxy.conversation import Reply
from gyre_core.proxy.dialects.base import sse
from gyre_core.proxy.dialects.parsing import openai_error
from gyre_core.proxy.refusal import Refusal
from gyre_core.types import Json


class ResponsesEvents:
    """The events of one response."""

    def __init__(self, *, started: Json, finished: Callable[[Reply], Json]) -> None:
        self._started = started
        self._finished = finished
        self._number = 0

    def begin(self) -> bytes:
        """response.created and response.in_progress."""
        return self._event("created", response=self._started) + self.keepalive()

    def keepalive(self) -> bytes:
        """response.in_progress, which Codex counts as progress (it ignores comments)."""
        return self._event("in_progress", response=self._started)

    def finish(self, reply: Reply) -> Iterator[bytes]:
        """Each item from its beginning to its end, then the finished response."""
        response = self._finished(reply)
        for index, item in enumerate(response["output"]):
            empty, pieces = _pieces(item)
            yield self._event("output_item.added", output_index=index, item=empty)
            for kind, fields in pieces:
                yield self._event(kind, item_id=item["id"], output_index=index, **fields)
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(response["status"], response=response)

    def refuse(self, refusal: Refusal) -> bytes:
        """response.failed, after `begin`: how the API tells a client that streams of a prompt that is too long."""
        error = openai_error(refusal)[1]["error"]
        failed = {"code": error["code"] or "server_error", "message": error["message"]}
        return self._event("failed", response={**self._started, "status": "failed", "error": failed})

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return sse(data, name)


def _pieces(item: Json) -> tuple[Json, Iterator[tuple[str, Json]]]:
    """An item as it begins, and the events (kind, fields) that fill it."""
    if item["type"] == "function_call":
        empty = {**item, "status": "in_progress", "arguments": ""}
        return empty, _whole("function_call_arguments", "arguments", item["arguments"])
    if item["type"] == "custom_tool_call":
        return {**item, "status": "in_progress", "input": ""}, _whole("custom_tool_call_input", "input", item["input"])
    if item["type"] == "message":
        return {**item, "status": "in_progress", "content": []}, _parts("output_text", item["content"])
    if "content" in item:
        return {**item, "content": []}, _parts("reasoning_text", item["content"])
    return {**item, "summary": []}, _summary(item["summary"])


def _whole(kind: str, name: str, text: str) -> Iterator[tuple[str, Json]]:
    yield f"{kind}.delta", {"delta": text}
    yield f"{kind}.done", {name: text}


def _parts(kind: str, parts: list[Json]) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        where = {"content_index": index}
        more = {"logprobs": []} if kind == "output_text" else {}
        yield "content_part.added", {**where, "part": {**part, "text": ""}}
        if part["text"]:
            yield f"{kind}.delta", {**where, "delta": part["text"], **more}
        yield f"{kind}.done", {**where, "text": part["text"], **more}
        yield "content_part.done", {**where, "part": part}


def _summary(parts: list[Json]) -> Iterator[tuple[str, Json]]:
    for index, part in enumerate(parts):
        where = {"summary_index": index}
        yield "reasoning_summary_part.added", {**where, "part": {**part, "text": ""}}
        if part["text"]:
            yield "reasoning_summary_text.delta", {**where, "delta": part["text"]}
        yield "reasoning_summary_text.done", {**where, "text": part["text"]}
        yield "reasoning_summary_part.done", {**where, "part": part}
