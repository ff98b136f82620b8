"""The official SDKs talk to the proxy over a real port: replies, streams, errors, tokens."""

from typing import Any

import anthropic
import openai
import pytest

from tests.support.clients import Stage
from tests.support.proxies import BASH, assert_exact, call_text, outputs

CHAT_BASH: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nhm\n</think>\n\n"


async def test_anthropic_sdk_runs_a_tool_loop(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(THOUGHT + "I look\n" + call_text("bash", '{"command": "ls"}'), "done"))
    client = await stage.anthropic()
    messages: list[Any] = [{"role": "user", "content": "u"}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    first = await client.messages.create(
        model="claude-any", max_tokens=2000, messages=messages, tools=[BASH], system="s", thinking=thinking
    )
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use" and first.model == "claude-any"
    call = proxy.engine.calls[0]
    assert first.usage.input_tokens == len(call.input_ids)
    assert first.usage.output_tokens == len(call.output_ids)
    messages.append({"role": "assistant", "content": first.content})
    use = first.content[2]
    assert use.type == "tool_use" and use.input == {"command": "ls"}
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "x"}]})
    second = await client.messages.create(
        model="claude-any", max_tokens=2000, messages=messages, tools=[BASH], system="s", thinking=thinking
    )
    assert second.stop_reason == "end_turn"
    usage = second.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(proxy.engine.calls[1].input_ids)
    assert usage.cache_read_input_tokens == len(call.input_ids + call.output_ids)
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 2


async def test_anthropic_sdk_streams_what_it_would_have_got_whole(stage: Stage) -> None:
    proxy, harness = stage
    text = THOUGHT + "I look\n" + call_text("bash", '{"command": "ls", "n": 1}')
    proxy.engine.add_outputs(outputs(text, text))
    client = await stage.anthropic(f"/s/{harness.session_id}", api_key="any")
    arguments: Any = {
        "model": "m",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "u"}],
        "tools": [BASH],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    kinds = []
    async with client.messages.stream(**arguments) as stream:
        async for event in stream:
            kinds.append(event.type)
        streamed = await stream.get_final_message()
    whole = await client.messages.create(**arguments)
    assert [block.model_dump(exclude={"id", "signature"}) for block in streamed.content] == [
        block.model_dump(exclude={"id", "signature"}) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


async def test_anthropic_stream_has_the_documented_event_order(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("hi"))
    reply = await harness.messages([{"role": "user", "content": "u"}], stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
    assert events == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_anthropic_sdk_counts_tokens_without_recording(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("hi"))
    client = await stage.anthropic()
    messages: Any = [{"role": "user", "content": "count me"}]
    count = await client.messages.count_tokens(model="m", messages=messages, system="s", tools=[BASH])
    await client.messages.create(model="m", messages=messages, system="s", tools=[BASH], max_tokens=9)
    assert count.input_tokens == len(proxy.engine.calls[0].input_ids)
    assert len((await harness.seal()).calls) == 1


async def test_openai_sdk_runs_a_tool_loop(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(THOUGHT + call_text("bash", '{"command": "ls"}'), "done"))
    client = await stage.openai()
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    first = await client.chat.completions.create(model="any", messages=messages, tools=[CHAT_BASH], temperature=0.2)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert choice.message.content is None
    assert first.usage and first.usage.prompt_tokens == len(proxy.engine.calls[0].input_ids)
    assert proxy.engine.calls[0].sampling_params["temperature"] == 1.0
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "x"})
    second = await client.chat.completions.create(model="any", messages=messages, tools=[CHAT_BASH])
    assert second.choices[0].message.content == "done" and second.choices[0].finish_reason == "stop"
    assert second.usage and second.usage.prompt_tokens_details
    known = len(proxy.engine.calls[0].input_ids + proxy.engine.calls[0].output_ids)
    assert second.usage.prompt_tokens_details.cached_tokens == known
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["temperature_overridden"] == 1


async def test_openai_sdk_streams_tool_calls_and_usage(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("look\n" + call_text("bash", '{"command": "ls"}')))
    client = await stage.openai(f"/s/{harness.session_id}/v1", api_key="any")
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "u"}],
        tools=[CHAT_BASH],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "look"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join((call.function and call.function.arguments) or "" for call in calls) == '{"command":"ls"}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(proxy.engine.calls[0].output_ids)


async def test_length_stop_is_named_in_each_api(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("abcdef", "abcdef"))
    messages = [{"role": "user", "content": "u"}]
    assert (await harness.messages(messages, max_tokens=3)).json()["stop_reason"] == "max_tokens"
    chat = (await harness.chat(messages, max_completion_tokens=3)).json()
    assert chat["choices"][0]["finish_reason"] == "length"


async def test_stop_sequence_ends_the_text_and_is_named(stage: Stage) -> None:
    proxy, harness = stage
    # SGLang ends at the stop string and keeps its tokens in the output.
    proxy.engine.add_outputs(outputs("one STOP…", "two"))
    reply = (await harness.messages([{"role": "user", "content": "u"}], stop_sequences=["STOP"])).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "one"}]
    assert proxy.engine.calls[0].sampling_params["stop"] == ["STOP"]
    history = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "v"},
    ]
    await harness.messages(history)
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert len(trajectory.tree.leaves()) == 1


@pytest.mark.parametrize(
    ("text", "kinds", "delivered", "counter"),
    [
        (call_text("bash", '{"command": '), ["text"], '{"name": "bash"', "malformed_tool_calls"),
        (call_text("bash", '"not an object"'), ["text"], "not an object", "malformed_tool_calls"),
        (call_text("bash", '{"n": NaN}'), ["text"], "NaN", "malformed_tool_calls"),
        (call_text("bash", '{"n": ' + "9" * 40 + "}"), ["text"], "9999", "malformed_tool_calls"),
        (call_text("bash", '{"s": "\\ud800"}'), ["text"], "ud800", "malformed_tool_calls"),
        (call_text("bash", "[" * 3000 + "]" * 3000), ["text"], "[[[[", "malformed_tool_calls"),
        ("<tool_call>\n[1]\n</tool_call>", ["text"], "[1]", "malformed_tool_calls"),
        ("", ["text"], "", "empty_replies"),
        ("<think>\nonly thoughts\n</think>", ["text"], "", "empty_replies"),
    ],
)
async def test_malformed_output_is_decided_before_delivery_and_recorded_as_sampled(
    stage: Stage, text: str, kinds: list[str], delivered: str, counter: str
) -> None:
    proxy, harness = stage
    (ids,) = outputs(text)
    proxy.engine.add_outputs([ids, *outputs("fine")])
    first = await harness.messages([{"role": "user", "content": "u"}], tools=[BASH], max_tokens=9000)
    content = first.json()["content"]
    assert [block["type"] for block in content] == kinds and delivered in content[0]["text"]
    assert first.json()["stop_reason"] in ("end_turn", "max_tokens")
    history = [{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]
    second = await harness.messages([*history, {"role": "user", "content": "v"}], tools=[BASH])
    assert second.json()["content"][0]["text"] == "fine"
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters[counter] == 1
    path = trajectory.tree.path_tokens(trajectory.calls[0].node_id).tolist()
    assert path[len(proxy.engine.calls[0].input_ids) :] == ids[:1000]


async def test_equal_tool_calls_of_one_reply_get_ids_of_their_own(stage: Stage) -> None:
    proxy, harness = stage
    call = call_text("bash", '{"command": "ls"}')
    proxy.engine.add_outputs(outputs(call + "\n" + call))
    reply = (await harness.messages([{"role": "user", "content": "u"}], tools=[BASH])).json()
    assert len({block["id"] for block in reply["content"]}) == 2


async def test_sdk_errors_have_the_types_that_clients_expect(stage: Stage) -> None:
    proxy, harness = stage
    messages: Any = [{"role": "user", "content": "u"}]
    wrong = await stage.anthropic(api_key="gyre-nobody-0", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.messages.create(model="m", max_tokens=5, messages=messages)
    with pytest.raises(openai.AuthenticationError):
        await (await stage.openai(api_key="x")).chat.completions.create(model="m", messages=messages)
    client = await stage.anthropic(max_retries=0)
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(model="m", max_tokens=5, messages=[])
    with pytest.raises(anthropic.NotFoundError):
        await client.post("/v1/nothing", cast_to=object, body={})
    proxy.engine.fail_next(400)
    with pytest.raises(anthropic.InternalServerError) as caught:
        await client.messages.create(model="m", max_tokens=5, messages=messages)
    assert caught.value.status_code == 529
    await harness.seal()
    with pytest.raises(anthropic.PermissionDeniedError):
        await client.messages.create(model="m", max_tokens=5, messages=messages)


async def test_sdk_retries_a_failed_call_by_itself(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.fail_next(400)
    proxy.engine.add_outputs(outputs("a"))
    client = await stage.anthropic(max_retries=1)
    reply = await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "u"}])
    assert reply.content[0].type == "text"
    assert len((await harness.seal()).calls) == 1
