"""The OpenAI Responses API, as clients of its official SDKs and Codex see it. Nothing is stored between calls."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gyre_core.proxy.conversation import ChatRequest, Reply, require
from gyre_core.proxy.dialects.options import ToolChoice, ignored_options
from gyre_core.proxy.dialects.parsing import (
    last_user,
    number,
    openai_error,
    positive_int,
    system_text,
    tool_list,
)
from gyre_core.proxy.dialects.response_events import ResponsesEvents
from gyre_core.proxy.dialects.response_items import (
    SIGNATURE_PREFIX,
    OfferedTool,
    grouped_items,
    normalise,
    offered_tools,
)
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request
from gyre_core.trajectory.roles import RequestFacts
from gyre_core.types import FinishReason, Json

_ENCRYPTED = "reasoning.encrypted_content"
_NOT_SERVED = {  # field -> what to do instead
    "previous_response_id": "replies are not stored here: send the whole conversation in `input`",
    "conversation": "conversations are not stored here: send the whole conversation in `input`",
    "background": "replies are not stored here: leave `background` out and wait for the reply, streamed or not",
    "prompt": "prompt templates are not stored here: send their text in `instructions` or `input`",
}
_ECHOED: Json = {  # fields of a request that its response repeats, with the API's defaults
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}

_IGNORED: Mapping[str, tuple[Any, ...]] = {  # as in options.py
    "top_p": (1,),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "truncation": ("disabled",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """A request with what its reply needs to know of it."""

    echo: Json = field(default_factory=dict)  # fields that the response object repeats
    offered: Mapping[str, OfferedTool] = field(default_factory=dict)  # by the name that the policy reads
    summarises: bool = False  # reasoning goes out as its summary, which clients show, not as reasoning text
    includes_encrypted: bool = False  # reasoning items carry `encrypted_content`


class ResponsesDialect:
    """POST /v1/responses."""

    name = "responses"
    keepalive_body = b" "

    def parse(self, body: Json, headers: Mapping[str, str]) -> ResponsesRequest:
        """Read a request body."""
        for name, advice in _NOT_SERVED.items():
            require(not body.get(name), f"{name}: {advice}")
        items = body.get("input")
        if isinstance(items, str):
            items = [{"type": "message", "role": "user", "content": items}]
        require(isinstance(items, list) and bool(items), "input: a text or at least one item is required")
        assert isinstance(items, list)
        raw_tools = tool_list(body.get("tools"))
        tools, offered = offered_tools(raw_tools)
        tool_choice, tool_name = _tool_choice(body.get("tool_choice"), offered)
        output_format = _output_format(body.get("text"))
        messages = grouped_items(items, offered)
        if instructions := body.get("instructions"):
            content = grouped_items(instructions, {}) if isinstance(instructions, list) else [_system(instructions)]
            messages = content + messages
        reasoning = body.get("reasoning")
        reasoning = reasoning if isinstance(reasoning, dict) else {}
        include = body.get("include")
        return ResponsesRequest(
            dialect=self.name,
            model=str(body.get("model", "")),
            raw_messages=messages,
            normalise=normalise,
            tools=tools,
            max_tokens=positive_int(body.get("max_output_tokens"), "max_output_tokens"),
            stream=body.get("stream") is True,
            temperature=number(body.get("temperature"), "temperature"),
            tool_choice=tool_choice,
            tool_name=tool_name,
            single_tool_call=body.get("parallel_tool_calls") is False,
            ignored_options=_ignored(body, raw_tools, reasoning, output_format),
            facts=RequestFacts(
                headers=headers,
                system=_system_facts(messages),
                last_user=last_user(messages),
                tool_names=tuple(tool["function"]["name"] for tool in tools),
                output_format=output_format,
            ),
            echo=_echo(body, reasoning),
            offered=offered,
            summarises=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
            includes_encrypted=(isinstance(include, list) and _ENCRYPTED in include) or body.get("store") is False,
        )

    def mint_tool_call_id(self, unique: str) -> str:
        """As the API names them."""
        return f"call_{unique}"

    def reply_body(self, reply: Reply, request: ChatRequest) -> Json:
        """A `response` object."""
        assert isinstance(request, ResponsesRequest)
        return finished_response(reply, request, reply.call_id, reply.created_s)

    def events(self, request: ChatRequest, reply_id: str, created_s: float, prompt_tokens: int) -> ResponsesEvents:
        """response.created, response.in_progress, the items piece by piece, response.completed."""
        assert isinstance(request, ResponsesRequest)
        return ResponsesEvents(
            started=response_object(request, reply_id, created_s, status="in_progress"),
            finished=lambda reply: finished_response(reply, request, reply_id, created_s),
        )

    def error(self, refusal: Refusal) -> tuple[int, Json]:
        """`{"error": {...}}`."""
        return openai_error(refusal)

    def error_events(self, refusal: Refusal, request: ChatRequest, reply_id: str, created_s: float) -> bytes:
        """A prompt that is too long fails inside the stream: Codex trims or compacts on that, and gives up on a 400."""
        if refusal.kind is not RefusalKind.CONTEXT_LENGTH:
            return b""
        events = self.events(request, reply_id, created_s, 0)
        return events.begin() + events.refuse(refusal)


def response_object(request: ResponsesRequest, reply_id: str, created_s: float, **fields: Any) -> Json:
    """A response with `fields` of its state."""
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(created_s),
        "status": None,
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "previous_response_id": None,
        "usage": None,
        **request.echo,
        **fields,
    }


def finished_response(reply: Reply, request: ResponsesRequest, reply_id: str, created_s: float) -> Json:
    """The response object of a whole reply."""
    cut = reply.finish_reason is FinishReason.LENGTH
    return response_object(
        request,
        reply_id,
        created_s,
        status="incomplete" if cut else "completed",
        completed_at=None if cut else int(reply.created_s),
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=_output(reply, request, "incomplete" if cut else "completed"),
        usage={
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        },
    )


def _output(reply: Reply, request: ResponsesRequest, status: str) -> list[Json]:
    """The items of a reply. Their ids name the reply, so that `grouped_items` knows them again."""
    unique = _unique(reply)
    items: list[Json] = []
    if reply.signature:
        reasoning: Json = {"id": f"rs_{unique}", "type": "reasoning", "summary": []}
        if request.summarises:
            reasoning["summary"] = [{"type": "summary_text", "text": reply.reasoning}]
        else:
            reasoning["content"] = [{"type": "reasoning_text", "text": reply.reasoning}]
        if request.includes_encrypted:
            reasoning["encrypted_content"] = reply.signature
        items.append(reasoning)
    if reply.text or not reply.tool_calls:  # an empty reply has an empty message: clients look for one
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{unique}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    for position, call in enumerate(reply.tool_calls):
        tool = request.offered.get(call.name, OfferedTool(name=call.name))
        item: Json = {"type": "function_call", "call_id": call.call_id, "name": tool.name, "status": "completed"}
        if tool.is_custom:
            item |= {"id": f"ctc_{unique}{position:02d}", "type": "custom_tool_call", "input": _text(call.arguments)}
        else:
            item |= {"id": f"fc_{unique}{position:02d}", "arguments": orjson.dumps(call.arguments).decode()}
        items.append({**item, "namespace": tool.namespace} if tool.namespace else item)
    return items


def _unique(reply: Reply) -> str:
    """What names a reply in the ids of its items: a part of its signature and call ids too."""
    if reply.signature:
        return reply.signature.removeprefix(SIGNATURE_PREFIX)
    if reply.tool_calls:
        return reply.tool_calls[0].call_id.removeprefix("call_")[:24]
    return hashlib.blake2b(reply.call_id.encode(), digest_size=12).hexdigest()


def _text(arguments: Any) -> str:
    """Free text of a custom tool: the argument `input`, else all that the policy wrote."""
    if isinstance(arguments, dict) and list(arguments) == ["input"] and isinstance(arguments["input"], str):
        return arguments["input"]
    return orjson.dumps(arguments).decode()


def _system(text: Any) -> Json:
    return {"type": "message", "role": "system", "content": text}


def _system_facts(messages: list[Json]) -> str:
    contents = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        contents.append(message.get("content"))
    return system_text(contents)


def _output_format(text: Any) -> str:
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else None
    return str(kind) if kind and kind != "text" else ""


def _tool_choice(choice: Any, offered: Mapping[str, OfferedTool]) -> tuple[ToolChoice, str]:
    """How far the policy is free, and the policy's name of the tool that must be called, "" for any."""
    form = choice if isinstance(choice, dict) else {}
    if form.get("type") in ("function", "custom"):
        wanted = (str(form.get("namespace") or ""), form.get("name"))
        names = [unique for unique, tool in offered.items() if (tool.namespace, tool.name) == wanted]
        return "required", names[0] if names else str(form.get("name"))
    mode = form.get("mode") if form.get("type") == "allowed_tools" else choice
    return ("none", "") if mode == "none" else ("required", "") if mode == "required" else ("auto", "")


def _ignored(body: Json, tools: list[Json], reasoning: Json, output_format: str) -> tuple[str, ...]:
    hosted = any((tool.get("type") or "function") not in ("function", "custom", "namespace") for tool in tools)
    return (
        *ignored_options(body, _IGNORED),
        *("hosted_tools",) * hosted,
        *("reasoning_effort",) * (reasoning.get("effort") is not None),
        *("output_format",) * bool(output_format),
    )


def _echo(body: Json, reasoning: Json) -> Json:
    """The fields that the response repeats; raises Refusal for values that cannot be written back."""
    echo = {key: default if body.get(key) is None else body[key] for key, default in _ECHOED.items()}
    echo["reasoning"] = {"effort": None, "summary": None, **reasoning}
    try:
        orjson.dumps(echo)
    except TypeError as error:
        raise bad_request(f"the request cannot be read ({error})") from error
    return echo
