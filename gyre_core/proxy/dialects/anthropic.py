"""The Anthropic Messages API (2023-06-01), as clients of its official SDKs see it."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from gyre_core.proxy.conversation import ChatRequest, Message, Reply, ToolCall, as_text, joined_text, require
from gyre_core.proxy.dialects.base import sse
from gyre_core.proxy.dialects.options import MESSAGES_IGNORED, ignored_options, messages_tool_choice
from gyre_core.proxy.dialects.parsing import (
    function_tool,
    last_user,
    number,
    positive_int,
    stop_strings,
    system_text,
    tool_list,
)
from gyre_core.proxy.refusal import Refusal, RefusalKind
from gyre_core.trajectory.roles import RequestFacts
from gyre_core.types import FinishReason, Json

BILLING_PREFIX = "x-anthropic-billing-header:"  # varies between calls that mean the same; not for the policy
KEEPALIVE_SIGNATURE = "gyre-keepalive"  # of a thinking block that holds no thinking

_EMPTY_THINKING: Json = {"type": "thinking", "thinking": "", "signature": ""}

_ERRORS = {
    RefusalKind.BAD_REQUEST: (400, "invalid_request_error"),
    RefusalKind.CONTEXT_LENGTH: (400, "invalid_request_error"),
    RefusalKind.AUTHENTICATION: (401, "authentication_error"),
    RefusalKind.FORBIDDEN: (403, "permission_error"),
    RefusalKind.NOT_FOUND: (404, "not_found_error"),
    RefusalKind.TOO_LARGE: (413, "request_too_large"),
    RefusalKind.UNAVAILABLE: (529, "overloaded_error"),
    RefusalKind.INTERNAL: (500, "api_error"),
}


class MessagesDialect:
    """POST /v1/messages and /v1/messages/count_tokens."""

    name = "messages"
    keepalive_body = b" "

    def parse(self, body: Json, headers: Mapping[str, str]) -> ChatRequest:
        """Read a request body; `max_tokens` may be missing (count_tokens)."""
        raw = body.get("messages")
        require(isinstance(raw, list) and bool(raw), "messages: at least one message is required")
        assert isinstance(raw, list)
        for index, message in enumerate(raw):
            require(
                isinstance(message, dict) and message.get("role") in ("user", "assistant", "system"),
                f"messages.{index}: an object with role user or assistant is required",
            )
        system = body.get("system")
        thinking = body.get("thinking")
        tools = tuple(
            function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))
            for tool in tool_list(body.get("tools"))
        )
        messages = ([{"role": "system", "content": system}] if system else []) + raw
        tool_choice, tool_name, single_tool_call = messages_tool_choice(body.get("tool_choice"))
        return ChatRequest(
            dialect=self.name,
            model=str(body.get("model", "")),
            raw_messages=messages,
            normalise=_normalise,
            tools=tools,
            max_tokens=positive_int(body.get("max_tokens"), "max_tokens"),
            stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
            stream=body.get("stream") is True,
            shows_reasoning=isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"),
            omits_reasoning_text=isinstance(thinking, dict) and thinking.get("display") == "omitted",
            temperature=number(body.get("temperature"), "temperature"),
            tool_choice=tool_choice,
            tool_name=tool_name,
            single_tool_call=single_tool_call,
            ignored_options=_ignored_options(body),
            facts=RequestFacts(
                headers=headers,
                system=system_text([system]),
                last_user=last_user(raw),
                tool_names=tuple(tool["function"]["name"] for tool in tools),
                output_format=_output_format(body),
            ),
        )

    def mint_tool_call_id(self, unique: str) -> str:
        """As the API names them."""
        return f"toolu_{unique}"

    def reply_body(self, reply: Reply, request: ChatRequest) -> Json:
        """A `message` object."""
        return {
            **_head(request, reply.call_id),
            "content": _blocks(reply),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence or None,
            "usage": _usage(reply.prompt_tokens, reply.cached_tokens, reply.output_tokens),
        }

    def events(self, request: ChatRequest, reply_id: str, created_s: float, prompt_tokens: int) -> "MessagesEvents":
        """message_start, blocks, message_delta, message_stop."""
        return MessagesEvents(request, reply_id, prompt_tokens)

    def error(self, refusal: Refusal) -> tuple[int, Json]:
        """`{"type": "error", ...}`."""
        status, kind = _ERRORS[refusal.kind]
        return status, {"type": "error", "error": {"type": kind, "message": refusal.message}}

    def error_events(self, refusal: Refusal, request: ChatRequest, reply_id: str, created_s: float) -> bytes:
        """None: status and body tell it."""
        return b""


class MessagesEvents:
    """The events of one message.

    Clients do not count pings as progress, but deltas: a reply that takes long opens a thinking block and sends empty
    deltas in it. The reply's own reasoning goes into that block; without any it is closed with KEEPALIVE_SIGNATURE,
    by which `parse` leaves it out when the harness sends it back.
    """

    def __init__(self, request: ChatRequest, reply_id: str, prompt_tokens: int) -> None:
        self._request = request
        self._reply_id = reply_id
        self._prompt_tokens = prompt_tokens
        self._thinking = False  # whether the block of the keep-alives is open

    def begin(self) -> bytes:
        """message_start and a ping."""
        message = {
            **_head(self._request, self._reply_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._prompt_tokens, 0, 1),
        }
        return _event("message_start", message=message) + _event("ping")

    def keepalive(self) -> bytes:
        """An empty piece of thinking."""
        delta = _event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": ""})
        if self._thinking:
            return delta
        self._thinking = True
        return _event("content_block_start", index=0, content_block=_EMPTY_THINKING) + delta

    def finish(self, reply: Reply) -> Iterator[bytes]:
        """The blocks and the end."""
        blocks = _blocks(reply)
        if self._thinking and not reply.signature:
            blocks.insert(0, {"type": "thinking", "thinking": "", "signature": KEEPALIVE_SIGNATURE})
        for index, block in enumerate(blocks):
            empty, deltas = _deltas(block)
            if index or not self._thinking:
                yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event(
            "message_delta",
            delta={"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence or None},
            usage=_usage(reply.prompt_tokens, reply.cached_tokens, reply.output_tokens),
        )
        yield _event("message_stop")


def _normalise(raw: Json) -> tuple[Message, ...]:
    role, content = raw["role"], raw.get("content")
    if role == "assistant":
        return (_assistant(content),)
    if role == "system":
        text = joined_text(_system_texts(content))
        return (Message(role="system", text=text),) if text else ()
    if isinstance(content, str):
        return (Message(role="user", text=content),)
    require(isinstance(content, list), "messages: content must be a string or a list of blocks")
    assert isinstance(content, list)
    messages: list[Message] = []
    texts: list[str] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                messages.append(Message(role="user", text=joined_text(texts)))
                texts = []
            result = block.get("content", "")
            parts = result if isinstance(result, list) else [result] if result is not None else []
            messages.append(
                Message(
                    role="tool",
                    text=joined_text([as_text(part) for part in parts]),
                    tool_call_id=str(block.get("tool_use_id", "")),
                )
            )
        else:
            texts.append(as_text(block))
    if texts or not messages:
        messages.append(Message(role="user", text=joined_text(texts)))
    return tuple(messages)


def _assistant(content: Any) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", text=content)
    require(isinstance(content, list), "messages: content must be a string or a list of blocks")
    texts: list[str] = []
    reasoning: list[str] = []
    signatures: list[str] = []
    calls: list[ToolCall] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            if block.get("signature") == KEEPALIVE_SIGNATURE:
                continue
            reasoning.append(as_text(block.get("thinking", "")))
            if isinstance(block.get("signature"), str) and block["signature"]:
                signatures.append(block["signature"])
        elif kind == "tool_use":
            calls.append(
                ToolCall(
                    call_id=str(block.get("id", "")),
                    name=str(block.get("name", "")),
                    arguments=block.get("input", {}),
                )
            )
        elif kind != "redacted_thinking":
            texts.append(as_text(block))
    return Message(
        role="assistant",
        text=joined_text(texts),
        reasoning=joined_text(reasoning),
        tool_calls=tuple(calls),
        signatures=tuple(signatures),
    )


def _system_texts(system: Any) -> list[str]:
    blocks = system if isinstance(system, list) else [system]
    return [text for text in map(as_text, blocks) if not text.startswith(BILLING_PREFIX)]


def _ignored_options(body: Json) -> tuple[str, ...]:
    thinking, config = body.get("thinking"), body.get("output_config")
    budget = isinstance(thinking, dict) and thinking.get("budget_tokens") is not None
    effort = isinstance(config, dict) and config.get("effort") is not None
    return (
        *ignored_options(body, MESSAGES_IGNORED),
        *("thinking_budget",) * budget,
        *("reasoning_effort",) * effort,
        *("output_format",) * bool(_output_format(body)),
    )


def _output_format(body: Json) -> str:
    config = body.get("output_config")
    form = (config.get("format") if isinstance(config, dict) else None) or body.get("output_format")
    return str(form.get("type", "")) if isinstance(form, dict) else ""


def _blocks(reply: Reply) -> list[Json]:
    blocks: list[Json] = []
    if reply.signature:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.signature})
    if reply.text or not reply.tool_calls:  # an empty reply has one empty text block: clients read content[0]
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments})
    return blocks


def _deltas(block: Json) -> tuple[Json, list[Json]]:
    if block["type"] == "thinking":
        thought = [{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []
        return _EMPTY_THINKING, [*thought, {"type": "signature_delta", "signature": block["signature"]}]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()},
        ]
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []


def _stop_reason(reply: Reply) -> str:
    if reply.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if reply.stop_sequence:
        return "stop_sequence"
    return "tool_use" if reply.tool_calls else "end_turn"


def _head(request: ChatRequest, reply_id: str) -> Json:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": request.model}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse(orjson.dumps({"type": kind, **fields}), kind)
