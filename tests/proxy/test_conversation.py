"""What counts as the same message, in both dialects."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.proxy.conversation import Message, ToolCall, canonical_json, parse_arguments
from gyre_core.proxy.dialects.anthropic import MessagesDialect
from gyre_core.proxy.dialects.chat import ChatDialect
from gyre_core.proxy.refusal import Refusal


def only(messages: list[Any], dialect: Any = None) -> list[Message]:
    """The normalised messages of a request."""
    return (dialect or MessagesDialect()).parse({"messages": messages}, {}).messages()


def assistant(**fields: Any) -> Message:
    return Message(role="assistant", **{"text": "", **fields})


def call(arguments: Any, name: str = "bash", call_id: str = "toolu_1") -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (assistant(text="a"), assistant(text="  a \n")),
        (assistant(text="a\nb"), assistant(text="a  \nb\t")),
        (assistant(text="a", reasoning="hm"), assistant(text="a")),
        (assistant(tool_calls=(call({"a": 1, "b": 2}),)), assistant(tool_calls=(call({"b": 2.0, "a": 1}),))),
        (assistant(tool_calls=(call({"a": "x \ny"}),)), assistant(tool_calls=(call({"a": "x\ny"}),))),
        (assistant(tool_calls=(call({}),)), assistant(tool_calls=(call({}, call_id="other"),))),
    ],
)
def test_messages_of_one_meaning_have_one_form_but_differ_exactly(left: Message, right: Message) -> None:
    assert left.key().form == right.key().form
    assert left.key().exact != right.key().exact or left.reasoning == right.reasoning == ""


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (assistant(text="a"), assistant(text="b")),
        (assistant(text="a b"), assistant(text="a  b")),
        (assistant(tool_calls=(call({"a": 1}),)), assistant(tool_calls=(call({"a": 2}),))),
        (assistant(tool_calls=(call({"a": 1}),)), assistant(tool_calls=(call({"a": True}),))),
        (assistant(tool_calls=(call({"a": 1}),)), assistant(tool_calls=(call({"a": "1"}),))),
        (assistant(tool_calls=(call({}),)), assistant(tool_calls=(call({}, name="sh"),))),
        (assistant(tool_calls=(call({}),)), assistant(tool_calls=(call({}), call({})))),
        (Message(role="user", text="a"), Message(role="system", text="a")),
        (Message(role="tool", text="a", tool_call_id="x"), Message(role="tool", text="a", tool_call_id="y")),
    ],
)
def test_messages_of_other_meaning_have_another_form(left: Message, right: Message) -> None:
    assert left.key().form != right.key().form


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(JSON)
def test_canonical_json_is_canonical_already(value: Any) -> None:
    once = canonical_json(value)
    assert canonical_json(once) == once


@settings(max_examples=60)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_key_order_never_matters(value: dict[str, Any]) -> None:
    reordered = dict(reversed(value.items()))
    left, right = (assistant(tool_calls=(call(arguments),)).key().form for arguments in (value, reordered))
    assert left == right


def test_arguments_nested_too_deep_are_compared_as_text() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert canonical_json(value) == "[" * 200 + "1" + "]" * 200
    assert parse_arguments("[" * 3000 + "]" * 3000) == "[" * 3000 + "]" * 3000
    assert parse_arguments('{"a": 1}') == {"a": 1}
    assert parse_arguments("not json") == "not json"


def test_tool_results_and_text_of_one_user_message_become_messages_in_order() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "so"},
    ]
    assert only([{"role": "user", "content": blocks}]) == [
        Message(role="tool", text="one", tool_call_id="t1"),
        Message(role="tool", text="two", tool_call_id="t2"),
        Message(role="user", text="and\nso"),
    ]


def test_assistant_blocks_become_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "gyre-1"},
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t1", "name": "bash", "input": {"c": 1}},
    ]
    (user, message) = only([{"role": "user", "content": "u"}, {"role": "assistant", "content": blocks}])
    assert user == Message(role="user", text="u")
    assert message == assistant(
        text="a", reasoning="hm", signatures=("gyre-1",), tool_calls=(call({"c": 1}, call_id="t1"),)
    )
    assert message.key().joins == ("t1", "gyre-1")


def test_chat_messages_of_every_role_are_read() -> None:
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
    ]
    assert only(messages, ChatDialect()) == [
        Message(role="system", text="s"),
        Message(role="user", text="a\nb"),
        assistant(reasoning="hm", tool_calls=(call({"x": 1}, call_id="c1"),)),
        Message(role="tool", text="out", tool_call_id="c1"),
    ]


def test_system_prompt_without_text_is_left_out() -> None:
    billing = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}]
    request = MessagesDialect().parse({"system": billing, "messages": [{"role": "user", "content": "u"}]}, {})
    assert request.messages() == [Message(role="user", text="u")]
    assert "cc_version" in request.facts.system


def test_facts_name_system_last_user_tools_and_format() -> None:
    body = {
        "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "a"},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "x"}, {"type": "text", "text": "last"}],
            },
        ],
        "tools": [{"name": "bash"}],
        "output_config": {"format": {"type": "json_schema"}},
    }
    facts = MessagesDialect().parse(body, {"x-a": "b"}).facts
    assert (facts.system, facts.last_user, facts.tool_names) == ("one\ntwo", ("last",), ("bash",))
    assert (facts.output_format, facts.headers) == ("json_schema", {"x-a": "b"})


def test_several_choices_are_refused() -> None:
    with pytest.raises(Refusal, match="one choice"):
        ChatDialect().parse({"messages": [{"role": "user", "content": "u"}], "n": 2}, {})


REPLY_1, REPLY_2 = "0123456789abcdef01234567", "f" * 24


def results(*ids: str) -> list[Any]:
    return [{"type": "tool_result", "tool_use_id": call_id, "content": f"of {call_id[-2:]}"} for call_id in ids]


def test_tool_results_that_came_as_the_tools_ended_are_read_in_the_order_of_the_calls() -> None:
    ids = [f"toolu_{REPLY_1}{number:02d}" for number in (2, 0, 1)]
    (raw,) = [{"role": "user", "content": [*results(*ids), {"type": "text", "text": "go on"}]}]
    assert [message.text for message in only([raw])] == ["of 00", "of 01", "of 02", "go on"]
    chat = [
        {"role": "tool", "tool_call_id": call_id.replace("toolu", "call"), "content": call_id[-2:]} for call_id in ids
    ]
    assert [message.text for message in only([*chat, {"role": "user", "content": "u"}], ChatDialect())] == [
        "00",
        "01",
        "02",
        "u",
    ]


@pytest.mark.parametrize(
    "ids",
    [
        (f"toolu_{REPLY_2}01", f"toolu_{REPLY_1}00"),  # of two replies
        ("toolu_b", "toolu_a"),  # not of the proxy
        (f"toolu_{REPLY_1}01", "toolu_a"),
    ],
)
def test_tool_results_of_unknown_order_stay_as_they_came(ids: tuple[str, str]) -> None:
    content = results(*ids)
    texts = [message.text for message in only([{"role": "user", "content": content}])]
    assert texts == [block["content"] for block in content]
