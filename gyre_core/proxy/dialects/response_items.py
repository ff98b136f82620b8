"""Items of the Responses API as messages and tools of a conversation.

Enters: the input items and tools of a request. Leaves: raw messages (one for each reply of the model, however many
items it was) with the function that normalises them, and tools as renderers take them.

Invariants:
- the items of one reply form one raw message, also when a harness puts tool outputs between them; the items of two
  replies never share one: every item id that the proxy mints names its reply;
- the name of a tool that the policy reads maps back to exactly one (namespace, name) of the harness.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre_core.proxy.conversation import Message, ToolCall, as_text, joined_text, parse_arguments, require
from gyre_core.proxy.dialects.parsing import function_tool
from gyre_core.proxy.refusal import bad_request
from gyre_core.types import Json

SIGNATURE_PREFIX = "gyre-"  # of reasoning signatures, before the part that names the reply (see turn.py)
_MINTED = re.compile(r"(?:rs_|msg_|call_|gyre-)([0-9a-f]{24})(?:\d{2,})?")  # ids of items that the proxy wrote
_REPLY = "gyre.reply"  # type of the raw message that holds the items of one reply
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """What a name that the policy reads stands for.

    Example: OfferedTool(namespace="multi_agent_v1", name="spawn_agent")
    """

    name: str
    namespace: str = ""
    is_custom: bool = False  # takes free text, which the policy gives as the argument `input`


def policy_name(namespace: str, name: str) -> str:
    """The name under which the policy reads a tool."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def offered_tools(tools: list[Json]) -> tuple[tuple[Json, ...], dict[str, OfferedTool]]:
    """Tools for the renderer, and what their names stand for. Hosted tools have no machine here and are not offered."""
    rendered: list[Json] = []
    offered: dict[str, OfferedTool] = {}
    known: set[tuple[str, str]] = set()
    for namespace, tool, note in _flat(tools):
        is_custom = tool.get("type") == "custom"
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool  # chat's form is understood
        name = function.get("name")
        require(isinstance(name, str) and bool(name), "tools: functions with a name are required")
        assert isinstance(name, str)
        if (namespace, name) in known:
            continue
        known.add((namespace, name))
        unique = policy_name(namespace, name)
        while unique in offered:
            unique += "_"
        offered[unique] = OfferedTool(name=name, namespace=namespace, is_custom=is_custom)
        description = joined_text([str(function.get("description") or ""), note])
        parameters = function.get("parameters")
        if is_custom:
            description = joined_text([description, _grammar(tool.get("format"))])
            parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        rendered.append(function_tool(unique, description, parameters))
    return tuple(rendered), offered


def grouped_items(items: list[Any], offered: Mapping[str, OfferedTool]) -> list[Json]:
    """Raw messages of input items: the items of one reply of the model become one assistant message."""
    renamed = {
        (tool.namespace, tool.name): unique
        for unique, tool in offered.items()
        if unique != policy_name(tool.namespace, tool.name)
    }
    messages: list[Json] = []
    group: Json | None = None  # the reply that may still grow: tool outputs do not end it, other messages do
    reply = ""  # which reply that is, "" when the ids do not tell
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise bad_request(f"input[{index}]: an object is required")
        kind = item.get("type") or "message"
        if kind != "reasoning" and kind not in _CALLS and not (kind == "message" and item.get("role") == "assistant"):
            if kind not in _OUTPUTS:
                _check_kind(kind, index)
                group = None
            messages.append(item)
            continue
        if renamed and (unique := renamed.get((str(item.get("namespace") or ""), str(item.get("name"))))) is not None:
            item = {**item, "name": unique, "namespace": None}
        own = _reply_of(item, kind)
        if group is None or not _belongs(kind, own, group["items"], reply, is_next=messages[-1] is group):
            group, reply = {"type": _REPLY, "role": "assistant", "items": []}, ""
            messages.append(group)
        group["items"].append(item)
        reply = reply or own
    return messages


def _check_kind(kind: Any, index: int) -> None:
    if kind == "item_reference":
        raise bad_request(
            f"input[{index}]: items are not stored here, so they cannot be referenced; send the item itself "
            "(with store=false clients do)"
        )
    if kind == _REPLY:
        raise bad_request(f"input[{index}]: no such type")


def normalise(raw: Json) -> tuple[Message, ...]:
    """The messages of a raw message."""
    kind = raw.get("type") or "message"
    if kind == _REPLY:
        return (_assistant(raw["items"]),)
    if kind in _OUTPUTS:
        call_id = raw.get("call_id") or raw.get("id") or ""
        return (Message(role="tool", text=_text(raw.get("output")), tool_call_id=str(call_id)),)
    if kind == "message":
        text = _text(raw.get("content"))
        if raw.get("role") in ("system", "developer"):
            return (Message(role="system", text=text),) if text else ()
        return (Message(role="user", text=text),)
    return (Message(role="user", text=as_text({key: value for key, value in raw.items() if key != "id"})),)


def _assistant(items: list[Json]) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    signatures: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning.append(_text(item.get("content")) or _text(item.get("summary")))
            signatures.append(_reply_of(item, kind))
        elif kind == "message":
            texts.append(_text(item.get("content")))
            signatures.append(_reply_of(item, kind))
        else:
            calls.append(_call(item, kind))
    return Message(
        role="assistant",
        text=joined_text(texts),
        reasoning=joined_text(reasoning),
        tool_calls=tuple(calls),
        signatures=tuple(SIGNATURE_PREFIX + reply for reply in dict.fromkeys(signatures) if reply),
    )


def _call(item: Json, kind: str) -> ToolCall:
    name = policy_name(str(item.get("namespace") or ""), str(item.get("name") or ""))
    if kind == "custom_tool_call":
        arguments: Any = {"input": item.get("input", "")}
    elif kind == "local_shell_call":
        name, arguments = "local_shell", item.get("action") or {}
    else:
        arguments = item.get("arguments", "")
        arguments = parse_arguments(arguments) if isinstance(arguments, str) else arguments
    return ToolCall(call_id=str(item.get("call_id") or item.get("id") or ""), name=name, arguments=arguments)


def _belongs(kind: str, own: str, group: list[Json], reply: str, *, is_next: bool) -> bool:
    """Whether an item is a part of the reply that `group` holds; `is_next`: nothing stands between them."""
    if own and reply:  # the usual case
        return own == reply
    if kind == "reasoning":  # it begins a reply
        return is_next and all(other.get("type") == "reasoning" for other in group)
    return is_next and (kind != "message" or all((other.get("type") or "message") != "message" for other in group))


def _reply_of(item: Json, kind: str) -> str:
    """What an item's id tells of the reply it came in, "" when the proxy did not mint it."""
    ids = (item.get("call_id"),) if kind in _CALLS else (item.get("encrypted_content"), item.get("id"))
    for value in ids:
        if isinstance(value, str) and (found := _MINTED.fullmatch(value)) is not None:
            return found[1]
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else as_text(content)
    return joined_text(
        [
            part["refusal"] if isinstance(part, dict) and isinstance(part.get("refusal"), str) else as_text(part)
            for part in content
        ]
    )


def _flat(tools: list[Json]) -> list[tuple[str, Json, str]]:
    """Functions and custom tools: namespace, tool, a note for its description (on the first tool of a namespace)."""
    flat: list[tuple[str, Json, str]] = []
    for tool in tools:
        kind = tool.get("type") or "function"
        if kind in ("function", "custom"):
            flat.append(("", tool, ""))
        elif kind == "namespace":
            namespace, nested = str(tool.get("name") or ""), tool.get("tools") or []
            require(
                isinstance(nested, list) and all(isinstance(inner, dict) for inner in nested),
                "tools: a namespace needs a list of tools",
            )
            note = f"{namespace}: {tool['description']}" if tool.get("description") else ""
            for inner in nested:
                if (inner.get("type") or "function") in ("function", "custom"):
                    flat.append((namespace, inner, note))
                    note = ""
    return flat


def _grammar(form: Any) -> str:
    if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
        return ""
    return f"The input follows this grammar ({form.get('syntax', 'unknown')} syntax):\n{form['definition']}"
