"""Items and tools of the Responses API as the proxy reads them."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.proxy.conversation import KeyCache, Message, Reply, ToolCall
from gyre_core.proxy.dialects.response_items import grouped_items, normalise, offered_tools
from gyre_core.proxy.dialects.responses import ResponsesDialect, ResponsesRequest
from gyre_core.proxy.refusal import Refusal
from gyre_core.types import FinishReason

FIRST, SECOND = "a" * 24, "b" * 24  # what names two replies in the ids of their items
DIALECT = ResponsesDialect()


def reasoning(reply: str, text: str = "hm") -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{reply}", "summary": [{"type": "summary_text", "text": text}]}


def message(reply: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{reply}", "role": "assistant", "content": content}


def call(reply: str, position: int = 0, **fields: Any) -> dict[str, Any]:
    call_id = f"call_{reply}{position:02d}"
    return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": '{"n": 1.0}', **fields}


def output(of: dict[str, Any], text: Any = "x") -> dict[str, Any]:
    return {"type": of["type"] + "_output", "call_id": of["call_id"], "output": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def messages(*items: Any) -> list[Message]:
    return [message for raw in grouped_items(list(items), {}) for message in normalise(raw)]


def request(**fields: Any) -> ResponsesRequest:
    return DIALECT.parse({"model": "m", "input": "u", **fields}, {})


def roles(*items: Any) -> str:
    """`user assistant(hm|look|bash) tool`: reasoning, text and calls of each assistant message."""
    shown = []
    for item in messages(*items):
        names = ",".join(c.name for c in item.tool_calls)
        shown.append(f"assistant({item.reasoning}|{item.text}|{names})" if item.role == "assistant" else item.role)
    return " ".join(shown)


def test_items_of_one_reply_are_one_message() -> None:
    first, second = call(FIRST), call(FIRST, 1)
    items = [user("u"), reasoning(FIRST), message(FIRST, "look"), first, second, output(first), output(second)]
    assert roles(*items) == "user assistant(hm|look|bash,bash) tool tool"
    assistant = messages(*items)[1]
    assert assistant.signatures == (f"gyre-{FIRST}",)
    assert [c.call_id for c in assistant.tool_calls] == [f"call_{FIRST}00", f"call_{FIRST}01"]
    assert assistant.tool_calls[0].arguments == {"n": 1.0}


def test_outputs_between_the_calls_of_one_reply_come_after_it() -> None:
    first, second = call(FIRST), call(FIRST, 1)
    assert roles(first, output(first), second, output(second)) == "assistant(||bash,bash) tool tool"


def test_items_of_two_replies_are_two_messages_though_nothing_stands_between() -> None:
    # A cut stream: the harness keeps the items that were complete and asks again.
    items = [user("u"), reasoning(FIRST), message(FIRST, "one"), reasoning(SECOND), message(SECOND, "two")]
    assert roles(*items) == "user assistant(hm|one|) assistant(hm|two|)"
    assert roles(call(FIRST), call(SECOND)) == "assistant(||bash) assistant(||bash)"


def test_items_of_others_are_grouped_by_their_order() -> None:
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"role": "assistant", "content": "a"}
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "no json"}
    assert roles(foreign, said, called, foreign, called) == "assistant(t|a|f) assistant(t||f)"
    assert roles(said, said) == "assistant(|a|) assistant(|a|)"
    assert roles(called, output(called), called) == "assistant(||f) tool assistant(||f)"
    assert messages(called)[0].tool_calls[0].arguments == "no json"
    assert messages(foreign)[0].signatures == ()


def test_message_without_its_id_stays_with_the_reply_around_it() -> None:
    bare = {"role": "assistant", "content": [{"type": "output_text", "text": "look"}]}
    assert roles(reasoning(FIRST), bare, call(FIRST)) == "assistant(hm|look|bash)"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (user("a"), ("user", "a")),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"text": "b"}]}, ("user", "a\nb")),
        ({"type": "message", "role": "developer", "content": "a"}, ("system", "a")),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, ("user", "[input_image not s")),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ("assistant", "no")),
        ({"role": "critic", "content": "a"}, ("user", "a")),
        ({"role": "user", "content": None}, ("user", "")),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, ("user", '{"status":"completed","type":"w')),
        ({"type": "computer_call_output", "output": 1}, ("user", '{"output":1,"type":"computer_call_output"}')),
        ({"type": {"a": 1}, "role": []}, ("user", '{"role":[],"type":{"a":1}}')),
        (output(call(FIRST), [{"type": "input_text", "text": "a"}]), ("tool", "a")),
        (output(call(FIRST), {"content": "a"}), ("tool", '{"content":"a"}')),
        (output({"type": "custom_tool_call", "call_id": "1"}), ("tool", "x")),
        ({"type": "local_shell_call_output", "id": "sh_1", "output": "x"}, ("tool", "x")),
    ],
)
def test_item_of_any_type_becomes_a_message(item: Any, expected: tuple[str, str]) -> None:
    (read,) = messages(item)
    assert read.role == expected[0] and read.text.startswith(expected[1])


def test_local_shell_call_is_a_tool_call() -> None:
    action = {"type": "exec", "command": ["ls"]}
    (read,) = messages({"type": "local_shell_call", "call_id": "c", "id": "sh", "action": action})
    assert read.tool_calls == (ToolCall(call_id="c", name="local_shell", arguments=action),)


def test_tools_of_namespaces_and_free_text_become_functions_that_map_back() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    nested = [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}, {"type": "custom", "name": "js"}]
    tools, offered = offered_tools(
        [
            {"type": "function", "name": "agents__spawn", "description": None},
            {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": nested},
            {"type": "namespace", "name": "mcp__db__", "tools": [{"name": "query"}, {"type": "file_search"}]},
            {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar},
            {"type": "web_search"},
            {"type": "function", "function": {"name": "chat_form"}},
            {"type": "custom", "name": "patch"},
        ]
    )
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["agents__spawn", "agents__spawn_", "agents__js", "mcp__db__query", "patch", "chat_form"]
    assert [(offered[n].namespace, offered[n].name, offered[n].is_custom) for n in names] == [
        ("", "agents__spawn", False),
        ("agents", "spawn", False),
        ("agents", "js", True),
        ("mcp__db__", "query", False),
        ("", "patch", True),
        ("", "chat_form", False),
    ]
    assert tools[0]["function"]["description"] == ""
    assert tools[1]["function"]["description"] == "agents: Helpers."
    assert tools[4]["function"]["description"] == ("Edits.\nThe input follows this grammar (lark syntax):\nstart: /x/")
    assert tools[4]["function"]["parameters"]["required"] == ["input"]
    # A call in the history gets the name that the policy reads.
    (raw,) = grouped_items([call(FIRST, name="spawn", namespace="agents")], offered)
    assert normalise(raw)[0].tool_calls[0].name == "agents__spawn_"


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, ("auto", "")),
        ("auto", ("auto", "")),
        ("none", ("none", "")),
        ("required", ("required", "")),
        ({"type": "function", "name": "bash"}, ("required", "bash")),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ("required", "agents__spawn")),
        ({"type": "custom", "name": "unknown"}, ("required", "unknown")),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, ("required", "")),
        ({"type": "web_search"}, ("auto", "")),
        (["none"], ("auto", "")),
    ],
)
def test_tool_choice_is_read(choice: Any, read: tuple[str, str]) -> None:
    nested = [{"type": "function", "name": "spawn"}]
    tools = [{"type": "function", "name": "bash"}, {"type": "namespace", "name": "agents", "tools": nested}]
    chosen = request(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert (chosen.tool_choice, chosen.tool_name) == read
    assert len(chosen.tools) == 2 and chosen.single_tool_call


def test_what_has_no_machine_here_is_told_to_the_counters() -> None:
    form = {"format": {"type": "json_object"}}
    assert request(tools=[{"type": "web_search"}], text=form).ignored_options == ("hosted_tools", "output_format")
    assert request(tools=[{"type": "custom", "name": "js"}], top_p=1.0).ignored_options == ()
    assert request(reasoning={"effort": "high"}, top_p=0.5).ignored_options == ("top_p", "reasoning_effort")


def test_facts_hold_what_role_tables_ask_for() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        user("u"),
        {"role": "user", "content": [{"type": "input_text", "text": "v"}, {"type": "input_text", "text": "w"}]},
        message(FIRST, "a"),
        {"role": "developer", "content": "later"},
    ]
    form = {"format": {"type": "json_schema", "schema": {}}}
    tools = [{"type": "function", "name": "bash"}, {"type": "web_search"}]
    facts = request(instructions="s", input=items, text=form, tools=tools).facts
    assert (facts.system, facts.last_user) == ("s\nd", ("v", "w"))
    assert (facts.tool_names, facts.output_format) == (("bash",), "json_schema")
    assert request(text={"format": {"type": "text"}}).facts.output_format == ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation in `input`"),
        ({"conversation": "conv_1"}, "send the whole conversation in `input`"),
        ({"background": True}, "leave `background` out"),
        ({"prompt": {"id": "pmpt_1"}}, "send their text in `instructions`"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "send the item itself"),
        ({"input": []}, "input: a text or at least one item"),
        ({"input": {}}, "input: a text or at least one item"),
        ({"input": ["u"]}, "input[0]: an object"),
        ({"input": [{"type": "gyre.reply", "items": 5}]}, "input[0]: no such type"),
        ({"max_output_tokens": 0}, "max_output_tokens: a positive integer"),
        ({"temperature": "hot"}, "temperature: a number"),
        ({"tools": [{"type": "function"}]}, "functions with a name"),
        ({"tools": {"a": 1}}, "tools: a list"),
        ({"tools": [{"type": "namespace", "tools": [1]}]}, "a namespace needs a list of tools"),
    ],
)
def test_request_that_cannot_be_served_is_told_what_to_change(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(Refusal) as caught:
        request(**fields)
    assert told in caught.value.message


def test_request_that_cannot_be_repeated_is_refused_before_it_is_sampled() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"deeper": deep}
    with pytest.raises(Refusal):
        request(metadata=deep)


TYPES = [
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call_output",
    "local_shell_call",
    "gyre.reply",
    "namespace",
]
KEYS = ["type", "role", "content", "id", "call_id", "name", "arguments", "input", "output", "summary", "text", "tools"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from([*TYPES, "", "user", "assistant", f"rs_{FIRST}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
ITEMS = st.fixed_dictionaries({"type": st.sampled_from(TYPES)}, optional={key: VALUES for key in KEYS[1:]})


@given(items=st.lists(ITEMS, min_size=1, max_size=5), tools=st.lists(ITEMS, max_size=3), choice=VALUES)
def test_items_of_any_shape_are_read_or_refused(items: list[Any], tools: list[Any], choice: Any) -> None:
    try:
        read = request(input=items, tools=tools, tool_choice=choice)
        keys, starts = KeyCache().keys(read)
    except Refusal:
        return
    assert len(starts) == len(read.raw_messages) and len(keys) == len(read.messages())
    orjson.dumps([message.to_renderer() for message in read.messages()])


def test_keepalives_are_numbered_events_between_begin_and_the_items() -> None:
    events = DIALECT.events(request(), "c0", 12.5, 0)
    reply = Reply(
        call_id="c0",
        text="hi",
        reasoning="",
        signature="",
        tool_calls=(),
        finish_reason=FinishReason.STOP,
        stop_sequence="",
        prompt_tokens=3,
        output_tokens=2,
        cached_tokens=1,
        reasoning_tokens=0,
        created_s=20.0,
    )
    stream = b"".join([events.begin(), events.keepalive(), events.keepalive(), *events.finish(reply)]).decode()
    names = [line.removeprefix("event: response.") for line in stream.splitlines() if line.startswith("event: ")]
    assert names == [
        "created",
        "in_progress",
        "in_progress",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for number in range(len(names)):
        assert f'"sequence_number":{number},' in stream
