"""The OpenAI Chat Completions API, as clients of its official SDKs see it."""

from collections.abc import Iterator, Mapping, Sequence

import orjson

from gyre_core.proxy.conversation import (
    ChatRequest,
    Message,
    Reply,
    ToolCall,
    as_text,
    joined_text,
    parse_arguments,
    require,
)
from gyre_core.proxy.dialects.base import sse
from gyre_core.proxy.dialects.options import CHAT_IGNORED, chat_tool_choice, ignored_options
from gyre_core.proxy.dialects.parsing import (
    function_tool,
    last_user,
    number,
    openai_error,
    positive_int,
    stop_strings,
    tool_list,
)
from gyre_core.proxy.refusal import Refusal, bad_request
from gyre_core.trajectory.roles import RequestFacts
from gyre_core.types import FinishReason, Json

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # compared, not hashed: values are wild


class ChatDialect:
    """POST /v1/chat/completions."""

    name = "chat"
    keepalive_body = b" "

    def parse(self, body: Json, headers: Mapping[str, str]) -> ChatRequest:
        """Read a request body."""
        raw = body.get("messages")
        require(isinstance(raw, list) and bool(raw), "messages: at least one message is required")
        assert isinstance(raw, list)
        for index, message in enumerate(raw):
            require(
                isinstance(message, dict) and message.get("role") in _ROLES,
                f"messages[{index}]: an object with a known role is required",
            )
        num_choices = body.get("n")
        require(num_choices in (None, 1), "n: only one choice a call is served")
        max_tokens = body.get("max_completion_tokens")
        max_tokens = body.get("max_tokens") if max_tokens is None else max_tokens
        options = body.get("stream_options")
        tools = tuple(map(_tool, tool_list(body.get("tools"))))
        tool_choice, tool_name = chat_tool_choice(body.get("tool_choice"))
        form = body.get("response_format")
        output_format = str(form.get("type", "")) if isinstance(form, dict) else ""
        wants_format = output_format not in ("", "text")
        return ChatRequest(
            dialect=self.name,
            model=str(body.get("model", "")),
            raw_messages=raw,
            normalise=_normalise,
            tools=tools,
            max_tokens=positive_int(max_tokens, "max_tokens"),
            stop=stop_strings(body.get("stop"), "stop"),
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            temperature=number(body.get("temperature"), "temperature"),
            tool_choice=tool_choice,
            tool_name=tool_name,
            single_tool_call=body.get("parallel_tool_calls") is False,
            ignored_options=(*ignored_options(body, CHAT_IGNORED), *("output_format",) * wants_format),
            facts=RequestFacts(
                headers=headers,
                system=_system_facts(raw),
                last_user=last_user(raw),
                tool_names=tuple(tool["function"]["name"] for tool in tools),
                output_format=output_format,
            ),
        )

    def mint_tool_call_id(self, unique: str) -> str:
        """As the API names them."""
        return f"call_{unique}"

    def reply_body(self, reply: Reply, request: ChatRequest) -> Json:
        """A `chat.completion` object."""
        message: Json = {"role": "assistant", "content": reply.text if reply.text or not reply.tool_calls else None}
        message["refusal"] = None
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in reply.tool_calls]
        return {
            "id": f"chatcmpl-{reply.call_id}",
            "object": "chat.completion",
            "created": int(reply.created_s),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}],
            "usage": _usage(reply),
        }

    def events(self, request: ChatRequest, reply_id: str, created_s: float, prompt_tokens: int) -> "ChatEvents":
        """Chunks: role, reasoning, content, tool calls, finish reason, usage when asked for, [DONE]."""
        return ChatEvents(request, reply_id, created_s)

    def error(self, refusal: Refusal) -> tuple[int, Json]:
        """`{"error": {...}}`."""
        return openai_error(refusal)

    def error_events(self, refusal: Refusal, request: ChatRequest, reply_id: str, created_s: float) -> bytes:
        """None: status and body tell it."""
        return b""


class ChatEvents:
    """The chunks of one completion."""

    def __init__(self, request: ChatRequest, reply_id: str, created_s: float) -> None:
        self._include_usage = request.include_usage
        self._head: Json = {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion.chunk",
            "created": int(created_s),
            "model": request.model,
        }

    def begin(self) -> bytes:
        """The role."""
        return self._chunk({"role": "assistant", "content": ""})

    def keepalive(self) -> bytes:
        """A chunk without news; clients count chunks, not comments."""
        return self._chunk({})

    def finish(self, reply: Reply) -> Iterator[bytes]:
        """All the rest."""
        if reply.reasoning:
            yield self._chunk({"reasoning_content": reply.reasoning})
        if reply.text:
            yield self._chunk({"content": reply.text})
        for index, call in enumerate(reply.tool_calls):
            whole = _tool_call(call)
            arguments = whole["function"]["arguments"]
            first = {**whole, "index": index, "function": {"name": call.name, "arguments": ""}}
            yield self._chunk({"tool_calls": [first]})
            yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield self._chunk({}, _finish_reason(reply))
        if self._include_usage:
            yield sse(orjson.dumps({**self._head, "choices": [], "usage": _usage(reply)}))
        yield sse(b"[DONE]")

    def _chunk(self, delta: Json, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse(orjson.dumps({**self._head, "choices": [choice]}))


def _normalise(raw: Json) -> tuple[Message, ...]:
    role = raw["role"]
    content = raw.get("content")
    require(content is None or isinstance(content, str | list), "messages: content must be a string or a list of parts")
    text = content if isinstance(content, str) else joined_text([as_text(part) for part in content or ()])
    if role in {"system", "developer"}:
        return (Message(role="system", text=text),)
    if role == "user":
        return (Message(role="user", text=text),)
    if role in {"tool", "function"}:
        return (Message(role="tool", text=text, tool_call_id=str(raw.get("tool_call_id", ""))),)
    calls = raw.get("tool_calls") or []
    require(
        isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls),
        "messages: tool_calls must be a list of function calls",
    )
    reasoning = raw.get("reasoning_content") or raw.get("reasoning") or ""
    return (
        Message(
            role="assistant",
            text=text,
            reasoning=reasoning if isinstance(reasoning, str) else "",
            tool_calls=tuple(_parsed_call(call) for call in calls),
        ),
    )


def _parsed_call(call: Json) -> ToolCall:
    arguments = call["function"].get("arguments", "")
    return ToolCall(
        call_id=str(call.get("id", "")),
        name=str(call["function"].get("name", "")),
        arguments=parse_arguments(arguments) if isinstance(arguments, str) else arguments,
    )


def _tool_call(call: ToolCall) -> Json:
    arguments = orjson.dumps(call.arguments).decode()
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _system_facts(messages: Sequence[Json]) -> str:
    texts = []
    for message in messages:
        if message["role"] not in {"system", "developer"}:
            break
        texts.append(_normalise(message)[0].text)
    return "\n".join(texts)


def _tool(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request("tools: functions with a name are required")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _finish_reason(reply: Reply) -> str:
    if reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }
