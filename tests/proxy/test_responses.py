"""The official SDK and harnesses like Codex talk to the proxy by the Responses API: replies, streams, exact tokens."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gyre_core.trajectory.text import golden
from gyre_core.types import Role, Substitution
from tests.support.clients import Stage, served_stage
from tests.support.proxies import Harness, assert_exact, call_text, outputs, short

THOUGHT = "<think>\nhm\n</think>\n\n"
BASH: Any = {"type": "function", "name": "bash", "parameters": {"type": "object"}}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents_v1",
    "description": "Helpers.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
CODEX: Any = {  # what Codex asks for in every call
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "tools": [BASH, AGENTS, {"type": "web_search", "external_web_access": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "thread-1",
    "client_metadata": {"thread_id": "thread-1"},
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def developer(text: str) -> Any:
    return {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def result(item: Any, text: str) -> Any:
    kind = "custom_tool_call_output" if item["type"] == "custom_tool_call" else "function_call_output"
    return {"type": kind, "call_id": item["call_id"], "output": text}


def tree(trajectory: Any) -> str:
    """The golden tree with its tools left out."""
    return re.sub(r"(# Tools .*?)?# Tools .*? </tool_call> </>", "TOOLS </>", golden(trajectory.tree, short))


def stream_events(response: Any) -> list[Any]:
    """The events of a streamed reply, each checked against the official model of its type."""
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    events = [EVENTS.validate_json(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event.type for event in events] == [line[7:] for line in lines if line.startswith("event: ")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def codex(harness: Harness, items: list[Any], *, headers: Any = None, **fields: Any) -> list[Any]:
    """One call in Codex's form; returns the finished items as it keeps them."""
    response = await harness.responses(items, headers=headers, **{**CODEX, **fields})
    events = stream_events(response)
    assert events[-1].type == "response.completed"
    return [event.item.to_dict() for event in events if event.type == "response.output_item.done"]


async def test_sdk_runs_a_tool_loop(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(THOUGHT + "I look\n" + call_text("bash", '{"command":  "ls"}'), "done"))
    client = await stage.openai()
    items: list[Any] = [{"role": "user", "content": "u"}]
    first = await client.responses.create(model="any", instructions="s", input=items, tools=[BASH], temperature=0.2)
    Response.model_validate(first.to_dict())
    assert first._request_id and first._request_id.startswith("req_")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.status, first.model, first.output_text, first.instructions) == ("completed", "any", "I look", "s")
    call = proxy.engine.calls[0]
    assert first.usage and first.usage.input_tokens == len(call.input_ids)
    assert first.usage.output_tokens == len(call.output_ids)
    assert first.usage.output_tokens_details.reasoning_tokens == 6  # <think>, a line end, "hm", a line end, </think>
    items += first.output
    use = first.output[2]
    assert use.type == "function_call" and json.loads(use.arguments) == {"command": "ls"}
    items.append({"type": "function_call_output", "call_id": use.call_id, "output": "x"})
    second = await client.responses.create(model="any", instructions="s", input=items, tools=[BASH])
    assert second.output_text == "done"
    assert second.usage and second.usage.input_tokens == len(proxy.engine.calls[1].input_ids)
    assert second.usage.input_tokens_details.cached_tokens == len(call.input_ids + call.output_ids)
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 2
    assert tree(trajectory).endswith(
        '</> <usr> u </> <ast> [<think> hm </think> I look <tool_call> {"name": "bash", "arguments": '
        '{"command": "ls"}} </tool_call> </>] <usr> <res> x </res> </> <ast> [done </>]'
    )


async def test_sdk_streams_what_it_would_have_got_whole(stage: Stage) -> None:
    proxy, harness = stage
    text = THOUGHT + "I look\n" + call_text("bash", '{"command": "ls", "n": 1}')
    proxy.engine.add_outputs(outputs(text, text))
    client = await stage.openai(f"/s/{harness.session_id}/v1", api_key="any")
    arguments: Any = {"model": "m", "input": "u", "tools": [BASH]}
    async with client.responses.stream(**arguments) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_response()
    whole = await client.responses.create(**arguments)
    leave_out = {"id", "call_id", "parsed_arguments", "content"}
    assert [item.model_dump(exclude=leave_out) for item in streamed.output] == [
        item.model_dump(exclude=leave_out) for item in whole.output
    ]
    assert (streamed.output_text, streamed.status) == (whole.output_text, whole.status) == ("I look", "completed")
    assert streamed.usage and whole.usage and streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


async def test_stream_has_the_documented_events_and_fields(stage: Stage) -> None:
    proxy, harness = stage
    text = THOUGHT + "I look\n" + call_text("bash", '{"command": "ls"}') + call_text("apply_patch", '{"input": "+"}')
    proxy.engine.add_outputs(outputs(text))
    events = stream_events(await harness.responses([user("u")], stream=True, tools=[BASH, PATCH]))
    shown = [event.type.removeprefix("response.") for event in events]
    assert shown == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in events[-1].response.output]
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert len({item["id"] for item in done}) == 4


async def test_reasoning_is_a_summary_when_the_harness_asks_for_one(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(*[THOUGHT + "a"] * 3))
    events = stream_events(await harness.responses([user("u")], stream=True, reasoning={"summary": "auto"}))
    assert [event.type.removeprefix("response.") for event in events[2:8]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[7].item.to_dict()
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item and "encrypted_content" not in item
    item = (await harness.responses([user("u")], store=False)).json()["output"][0]
    assert item["content"] == [{"type": "reasoning_text", "text": "hm"}] and item["summary"] == []
    assert item["encrypted_content"].startswith("gyre-")


@pytest.mark.parametrize(
    ("change", "substitution"),
    [
        ("nothing", Substitution.CLEAN),
        ("no reasoning", Substitution.RESPLICED),
        ("encrypted only", Substitution.RESPLICED),
        ("no ids", Substitution.CLEAN),
        ("other arguments", Substitution.RESPLICED),
    ],
)
async def test_history_keeps_the_recorded_tokens(stage: Stage, change: str, substitution: Substitution) -> None:
    proxy, harness = stage
    sampled = "<think>\nplan it \n</think>\n\n look  \n" + call_text("bash", '{"command":  "ls", "n": 5000.0}')
    proxy.engine.add_outputs(outputs(sampled, "b"))
    reasoning, message, call = await codex(harness, [developer("s"), user("u")])
    items = {
        "nothing": [reasoning, message, call],
        "no reasoning": [message, call],
        "encrypted only": [{**reasoning, "summary": []}, message, call],
        "no ids": [{k: v for k, v in item.items() if k != "id"} for item in (reasoning, message, call)],
        "other arguments": [reasoning, message, {**call, "arguments": '{"n": 1, "command": "cd /app && ls"}'}],
    }[change]
    await codex(harness, [developer("s"), user("u"), *items, result(call, "a.txt")])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.calls[1].substitution is substitution
    assert len(trajectory.tree.leaves()) == 1
    assert tree(trajectory).endswith("<usr> <res> a.txt </res> </> <ast> [b </>]")


async def test_codex_session_with_sub_agent_and_compaction_is_one_tree(stage: Stage) -> None:
    proxy, _ = stage
    harness = await proxy.open("r2", harness="codex")
    spawn = call_text("agents_v1__spawn", '{"message": "task"}')
    proxy.engine.add_outputs(outputs(THOUGHT + spawn, "sub", "b", "sum", "c"))
    main = [developer("s"), user("u")]
    thought, call = await codex(harness, main)
    assert (call["namespace"], call["name"], call["arguments"]) == ("agents_v1", "spawn", '{"message":"task"}')
    child = {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1"}
    await codex(harness, [developer("s"), user("task")], tools=[BASH], headers=child)
    main += [thought, call, result(call, "done"), user("news")]
    main += await codex(harness, main)
    compaction = {"x-codex-turn-metadata": '{"request_kind":"compaction","window_number":0}'}
    await codex(harness, [*main, user("sum up")], tools=[], parallel_tool_calls=False, headers=compaction)
    await codex(harness, [developer("s"), user("u"), user("summary: sum")])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert [call.role for call in trajectory.calls] == [
        Role.MAIN,
        Role.SUB_AGENT,
        Role.MAIN,
        Role.MAIN_SUMMARY,
        Role.MAIN,
    ]
    # The compaction offers no tools, so that its prompt begins anew; the sub-agent has tools of its own.
    assert len(trajectory.tree.leaves()) == 4
    assert [call.substitution for call in trajectory.calls][:3] == [Substitution.CLEAN] * 3
    assert trajectory.calls[1].hints == child
    path = trajectory.tree.path_tokens(trajectory.calls[2].node_id)
    assert short(path.tolist()).endswith(
        "<usr> u </> <ast> <think> hm </think> " + spawn.replace("\n", " ") + " </> "
        "<usr> <res> done </res> </> <usr> news </> <ast> b </>"
    )


async def test_tools_of_two_namespaces_with_one_name_are_told_apart(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(call_text("b__run", "{}") + "\n" + call_text("run", "{}")))
    run = {"type": "function", "name": "run", "parameters": {"type": "object"}}
    spaces = [{"type": "namespace", "name": name, "description": "d", "tools": [run]} for name in "ab"]
    calls = (await harness.responses([user("u")], tools=[run, *spaces])).json()["output"]
    assert [(call.get("namespace"), call["name"]) for call in calls] == [("b", "run"), (None, "run")]


async def test_custom_tool_gets_free_text_and_comes_back_clean(stage: Stage) -> None:
    proxy, harness = stage
    patch = "*** Begin\n+é\n"
    proxy.engine.add_outputs(outputs(call_text("apply_patch", json.dumps({"input": patch})), "done"))
    client = await stage.openai()
    items: list[Any] = [{"role": "user", "content": "u"}]
    first = await client.responses.create(model="m", input=items, tools=[PATCH])
    (call,) = first.output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("apply_patch", patch)
    items += [call, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}]
    await client.responses.create(model="m", input=items, tools=[PATCH])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 2
    assert '"parameters": {"type": "object", "properties": {"input": ' in golden(trajectory.tree, short)


async def test_custom_tool_called_in_another_form_gets_all_that_was_written(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(call_text("apply_patch", '{"patch": "x"}'), "done"))
    (call,) = (await harness.responses([user("u")], tools=[PATCH])).json()["output"]
    assert call["input"] == '{"patch":"x"}'
    await harness.responses([user("u"), call, result(call, "bad")], tools=[PATCH])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.calls[1].substitution is Substitution.RESPLICED


@pytest.mark.parametrize("interleaved", [False, True])
async def test_parallel_calls_are_one_reply_however_their_outputs_come_back(stage: Stage, interleaved: bool) -> None:
    proxy, harness = stage
    calls = call_text("bash", '{"command": "ls"}') + "\n" + call_text("bash", '{"command": "ls"}')
    proxy.engine.add_outputs(outputs(calls, "done"))
    one, two = await codex(harness, [user("u")])
    assert one["call_id"] != two["call_id"]
    back = [one, result(one, "a"), two, result(two, "b")]
    await codex(harness, [user("u"), *(back if interleaved else [back[0], back[2], back[1], back[3]])])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 2
    assert tree(trajectory).endswith("<usr> <res> a </res> <res> b </res> </> <ast> [done </>]")


async def test_items_kept_of_a_cut_stream_are_replies_of_their_own(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs(*[THOUGHT + "look\n" + call_text("bash", "{}")] * 2, "done"))
    first = await codex(harness, [user("u")])
    kept = [user("u"), first[0]]  # its stream was cut after the reasoning
    second = await codex(harness, kept)
    await codex(harness, [*kept, *second, result(second[2], "x")])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    path = short(trajectory.tree.path_tokens(trajectory.calls[2].node_id).tolist())
    assert path.endswith("<usr> <res> x </res> </> <ast> done </>")
    own = short(trajectory.tree.path_tokens(trajectory.calls[1].node_id).tolist())
    assert path.startswith(own)


async def test_length_stop_is_an_incomplete_response_that_can_go_on(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("one tw…", "o three"))
    events = stream_events(await harness.responses([user("u")], stream=True, max_output_tokens=6))
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 6
    items = [item.to_dict() for item in response.output]
    assert (await harness.responses([user("u"), *items])).json()["output"][0]["content"][0]["text"] == "o three"
    assert await harness.tree() == "<usr> u </> <ast> [one tw] [o three </>]"


async def test_empty_reply_has_an_empty_message(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("<think>\nonly thoughts\n</think>", "b"))
    first = await codex(harness, [user("u")])
    assert [item["type"] for item in first] == ["reasoning", "message"] and first[1]["content"][0]["text"] == ""
    await codex(harness, [user("u"), *first, user("v")])
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 2 and len(trajectory.tree.leaves()) == 1


async def test_agents_loop_of_an_async_client_is_one_clean_branch(stage: Stage) -> None:
    proxy, harness = stage
    turns = [THOUGHT + call_text("bash", json.dumps({"command": f"step {i}"})) for i in range(4)]
    proxy.engine.add_outputs(outputs(*turns, THOUGHT + "finished"))
    client = await stage.openai()
    items: list[Any] = [{"role": "user", "content": "u"}]
    while True:
        async with client.responses.stream(
            model="m",
            instructions="s",
            input=items,
            tools=[BASH],
            store=False,
            include=["reasoning.encrypted_content"],
        ) as stream:
            reply = await stream.get_final_response()
        items += [item.to_dict() for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": call.arguments} for call in calls]
    assert reply.output_text == "finished"
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert trajectory.counters["substitution_clean"] == 5 and len(trajectory.tree.leaves()) == 1


async def test_unknown_fields_and_items_are_context_and_never_refused(stage: Stage) -> None:
    proxy, harness = stage
    proxy.engine.add_outputs(outputs("a", "b"))
    odd = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    fields: Any = {"no_such_field": {"a": [1]}, "text": {"verbosity": "low"}, "store": True, "user": "x"}
    first = (await harness.responses([odd, user("u")], **fields)).json()
    assert first["store"] is True and first["text"] == {"verbosity": "low"}
    shell = {"type": "local_shell_call", "call_id": "c1", "action": {"command": ["ls"]}, "status": "completed"}
    items = [odd, user("u"), *first["output"], shell, {"type": "local_shell_call_output", "id": "c1", "output": "x"}]
    assert (await harness.responses(items, **fields)).status_code == 200
    trajectory = await harness.seal()
    assert_exact(trajectory, proxy.engine)
    assert golden(trajectory.tree, short).startswith(
        '<usr> {"status":"completed","type":"web_search_call"} </> <usr> u'
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_sdk_reads_a_reply_that_takes_long(model_path: Path, stream: bool) -> None:
    async with served_stage(model_path, keepalive_s=0.02) as stage:
        proxy, harness = stage
        proxy.engine.hold()
        proxy.engine.add_outputs(outputs(THOUGHT + "I look\n" + call_text("bash", "{}"), "done"))
        client = await stage.openai()
        arguments: Any = {"model": "m", "tools": [BASH], "store": False}
        if stream:
            num_alive = 0
            async with client.responses.stream(input="u", **arguments) as events:
                async for event in events:
                    num_alive += event.type == "response.in_progress"
                    if num_alive == 4:  # the first one begins the stream
                        proxy.engine.release()
                first = await events.get_final_response()
        else:
            call = asyncio.create_task(client.responses.create(input="u", **arguments))
            await proxy.until_at_least(keepalives=3)
            proxy.engine.release()
            first = await call
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        items = [user("u"), *(item.to_dict() for item in first.output), result(first.output[2].to_dict(), "x")]
        await client.responses.create(input=items, **arguments)
        trajectory = await harness.seal()
        assert_exact(trajectory, proxy.engine)
        assert trajectory.counters["substitution_clean"] == 2
        assert trajectory.counters["replies_opened_early"] == 1


async def test_stream_of_a_prompt_that_is_too_long_fails_as_codex_expects(stage: Stage) -> None:
    _, harness = stage
    response = await harness.responses([user("u" * 9000)], **CODEX)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert "maximum context length" in failed["error"]["message"]
    assert (await harness.seal()).counters["refused_context_length"] == 1


async def test_errors_have_the_types_that_clients_expect(stage: Stage) -> None:
    proxy, harness = stage
    with pytest.raises(openai.AuthenticationError):
        await (await stage.openai(api_key="x")).responses.create(model="m", input="u")
    client = await stage.openai(max_retries=0)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        await client.responses.create(model="m", input="u", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="u" * 9000)
    assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    assert caught.value.request_id and caught.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.post("/responses/compact", cast_to=object, body={"model": "m", "input": []})
    assert missing.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    proxy.engine.fail_next(400)
    with pytest.raises(openai.InternalServerError) as failed:
        await client.responses.create(model="m", input="u")
    assert failed.value.status_code == 503
    await harness.seal()
    with pytest.raises(openai.PermissionDeniedError):
        await client.responses.create(model="m", input="u")
