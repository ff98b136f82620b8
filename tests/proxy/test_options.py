"""What a harness may ask for beside its messages: honoured at delivery, or ignored and counted; never refused."""

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.support.proxies import BASH, assert_exact, call_text, fake_engine, running_proxy, serving

USER: list[Any] = [{"role": "user", "content": "u"}]
CHAT_BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = call_text("bash", '{"command": "ls"}')
CALLS = CALL + "\n" + call_text("bash", '{"command": "pwd"}')

NONE = {"messages": {"tool_choice": {"type": "none"}}, "chat": {"tool_choice": "none"}}
ONE = {
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "chat": {"parallel_tool_calls": False},
}


async def ask(harness: Any, dialect: str, messages: list[Any], **fields: Any) -> Any:
    """Send a request with a tool; returns (message, text, tool calls, stop reason)."""
    if dialect == "messages":
        reply = (await harness.messages(messages, **{"tools": [BASH], **fields})).json()
        content = reply["content"]
        text = "".join(block.get("text", "") for block in content)
        calls = [block["input"] for block in content if block["type"] == "tool_use"]
        return {"role": "assistant", "content": content}, text, calls, reply["stop_reason"]
    reply = (await harness.chat(messages, **{"tools": [CHAT_BASH], **fields})).json()
    message = reply["choices"][0]["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return message, message["content"] or "", calls, reply["choices"][0]["finish_reason"]


@pytest.mark.parametrize("dialect", ["messages", "chat"])
async def test_tool_choice_none_delivers_calls_as_text_and_keeps_the_tools_in_the_prompt(
    model_path: Path, dialect: str
) -> None:
    engine = fake_engine(CALL, "done", "again")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        message, text, calls, stop = await ask(harness, dialect, USER, **NONE[dialect])
        assert not calls and '"command":"ls"' in text and stop in ("end_turn", "stop")
        more = [*USER, message, {"role": "user", "content": "v"}]
        await ask(harness, dialect, more)  # without the option: the same tools, the same tree
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["tool_calls_withheld"] == 1
        assert trajectory.counters["substitution_clean"] == 2


@pytest.mark.parametrize("dialect", ["messages", "chat"])
async def test_without_parallel_calls_only_the_first_is_delivered(model_path: Path, dialect: str) -> None:
    engine = fake_engine(CALLS, "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        message, _, calls, stop = await ask(harness, dialect, USER, **ONE[dialect])
        assert len(calls) == 1 and "ls" in str(calls) and stop in ("tool_use", "tool_calls")
        if dialect == "messages":
            result: Any = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": "x"}
            answer: Any = {"role": "user", "content": [result]}
        else:
            answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        await ask(harness, dialect, [*USER, message, answer], **ONE[dialect])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["tool_calls_withheld"] == 1
        assert trajectory.counters["substitution_clean"] == 2


@pytest.mark.parametrize(
    ("dialect", "choice", "text", "ignored"),
    [
        ("messages", {"type": "auto"}, "hi", 0),
        ("messages", {"type": "any"}, CALL, 0),
        ("messages", {"type": "any"}, "hi", 1),
        ("messages", {"type": "tool", "name": "bash"}, CALL, 0),
        ("messages", {"type": "tool", "name": "other"}, CALL, 1),
        ("chat", "auto", "hi", 0),
        ("chat", "required", CALL, 0),
        ("chat", "required", "hi", 1),
        ("chat", {"type": "function", "function": {"name": "bash"}}, CALL, 0),
        ("chat", {"type": "function", "function": {"name": "other"}}, CALL, 1),
        ("chat", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "hi", 1),
        ("messages", "nonsense", "hi", 0),
        ("chat", {"nonsense": []}, "hi", 0),
    ],
)
async def test_tool_choice_that_the_policy_does_not_follow_is_counted(
    model_path: Path, dialect: str, choice: Any, text: str, ignored: int
) -> None:
    async with running_proxy(model_path, fake_engine(text)) as proxy:
        harness = await proxy.open()
        _, _, calls, _ = await ask(harness, dialect, USER, tool_choice=choice)
        assert len(calls) == (text == CALL)
        assert (await harness.seal()).counters.get("option_ignored_tool_choice", 0) == ignored


@pytest.mark.parametrize(
    ("dialect", "fields", "names"),
    [
        ("chat", {"top_p": 1, "presence_penalty": 0.0, "logprobs": False, "response_format": {"type": "text"}}, set()),
        ("chat", {"top_p": 0.9, "seed": 0, "logit_bias": {"5": 1}}, {"top_p", "seed", "logit_bias"}),
        ("chat", {"reasoning_effort": "low", "logprobs": True}, {"reasoning_effort", "logprobs"}),
        ("chat", {"response_format": {"type": "json_object"}}, {"output_format"}),
        ("messages", {"top_k": 40, "top_p": None}, {"top_k"}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking_budget"}),
        ("messages", {"output_config": {"effort": "high"}}, {"reasoning_effort"}),
        ("messages", {"output_format": {"type": "json_schema", "schema": {}}}, {"output_format"}),
        ("messages", {"metadata": {"user_id": "x"}, "service_tier": "auto"}, set()),
    ],
)
async def test_option_that_is_not_honoured_is_counted(
    model_path: Path, dialect: str, fields: dict[str, Any], names: set[str]
) -> None:
    engine = fake_engine("hi")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        _, text, _, _ = await ask(harness, dialect, USER, **fields)
        assert text == "hi"
        counters = (await harness.seal()).counters
        prefix = "option_ignored_"
        assert {
            name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)
        } == dict.fromkeys(names, 1)


@pytest.mark.parametrize("stops", [["x"] * 65, ["x" * 5000]])
async def test_absurd_stop_strings_reach_no_engine(model_path: Path, stops: list[str]) -> None:
    engine = fake_engine("a")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        assert (await harness.messages(USER, stop_sequences=stops)).status_code == 400
        assert (await harness.chat(USER, stop=stops)).status_code == 400
        assert not engine.calls


async def test_several_choices_are_refused(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        assert (await harness.chat(USER, n=2)).status_code == 400
        assert (await harness.chat(USER, n=1)).status_code == 200


async def test_older_name_of_the_token_limit_holds_when_the_newer_is_null(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("abcdef")) as proxy:
        harness = await proxy.open()
        reply = (await harness.chat(USER, max_tokens=3, max_completion_tokens=None)).json()
        assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "developer", "content": "d"}, *USER],
        [*USER, {"role": "system", "content": "s"}, {"role": "user", "content": "v"}],
        [*USER, {"role": "user", "content": [{"type": "text", "text": "v"}]}, {"role": "developer", "content": "d"}],
    ],
)
async def test_system_messages_anywhere_and_runs_of_one_role_grow_one_branch(
    model_path: Path, history: list[Any]
) -> None:
    engine = fake_engine(CALL, "done", "end")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        message, _, _, _ = await ask(harness, "chat", history)
        parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": parts}
        history = [*history, message, result, {"role": "system", "content": "note"}]
        message, _, _, _ = await ask(harness, "chat", history)
        await ask(harness, "chat", [*history, message, *USER, *USER])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1 and trajectory.counters["substitution_clean"] == 3


async def test_sdks_list_and_find_models(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy, serving(proxy) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
            (model,) = [model async for model in client.models.list()]
            assert model.type == "model" and (await client.models.retrieve("claude-any")).id == "claude-any"
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any") as client:
            (found,) = [model async for model in client.models.list()]
            assert found.object == "model" and (await client.models.retrieve("gpt-any")).id == "gpt-any"
