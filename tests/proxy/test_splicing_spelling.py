"""Duties 3 and 4: another spelling of a message is the same message, and its recorded tokens stand for it."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from gyre_core.trajectory.text import golden
from gyre_core.types import Substitution
from tests.support.messages import THINKING, assistant, bash, chatted, replied, text, tool_result, tool_use, user
from tests.support.proxies import assert_exact, call_text, fake_engine, outputs, running_proxy, short

SAMPLED = "<think>\nhm\n</think>\n\n go  \n" + bash('{"n":  5000.0, "command": "cd /app && ls"}')
ONE_BRANCH = (
    '<usr> u </> <ast> [<think> hm </think> go <tool_call> {"name": "bash", "arguments": {"n": 5000.0, '
    '"command": "cd /app && ls"}} </tool_call> </>] <usr> <res> r </res> </> <ast> [done </>]'
)
ARGUMENTS = {"n": 5000.0, "command": "cd /app && ls"}


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(lambda th, te, tu: [te, tu], id="thinking-dropped"),
        pytest.param(lambda th, te, tu: [{**th, "thinking": " hm\n"}, te, tu], id="thinking-trimmed"),
        pytest.param(lambda th, te, tu: [th, tu], id="text-dropped"),
        pytest.param(lambda th, te, tu: [th, te, text(" \n"), tu], id="white-space-added"),
        pytest.param(lambda th, te, tu: [th, tu, te], id="text-moved-behind-the-call"),
        pytest.param(lambda th, te, tu: [tu, th, te], id="thinking-moved"),
        pytest.param(lambda th, te, tu: [th, {**te, "cache_control": {"type": "ephemeral"}}, tu], id="cache-mark"),
    ],
)
async def test_blocks_dropped_trimmed_or_moved_keep_one_branch(model_path: Path, blocks: Any) -> None:
    async with running_proxy(model_path, fake_engine(SAMPLED, "done")) as proxy:
        harness = await proxy.open()
        thinking, words, call = await replied(harness, [user("u")], **THINKING)
        history = [user("u"), assistant(blocks(thinking, words, call)), user([tool_result(call["id"])])]
        await replied(harness, history, **THINKING)
        trajectory = await harness.seal()
        assert golden(trajectory.tree, short) == ONE_BRANCH
        assert trajectory.calls[1].substitution in (Substitution.CLEAN, Substitution.RESPLICED)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"command": "cd /app && ls", "n": 5000}, id="key-order-and-number"),
        pytest.param({"n": "5000", "command": "cd /app && ls"}, id="number-as-string"),
        pytest.param({"n": 5000, "command": "ls"}, id="change-of-folder-gone"),
        pytest.param({"n": 5000, "command": "ls \n"}, id="line-end"),
        pytest.param({"n": 5000, "command": "ls", "force": False, "note": ""}, id="defaults-added"),
    ],
)
@pytest.mark.parametrize("policy", ["keep", "fork"])
async def test_arguments_spelled_anew_are_the_same_under_both_policies(
    model_path: Path, arguments: Any, policy: str
) -> None:
    async with running_proxy(model_path, fake_engine(SAMPLED, "done")) as proxy:
        harness = await proxy.open(on_change=policy)
        _, words, call = await replied(harness, [user("u")], **THINKING)
        history = [user("u"), assistant([words, tool_use(call["id"], arguments)]), user([tool_result(call["id"])])]
        await replied(harness, history, **THINKING)
        trajectory = await harness.seal()
        assert golden(trajectory.tree, short) == ONE_BRANCH
        assert trajectory.calls[1].substitution is Substitution.RESPLICED
        assert not any(name.startswith("splice_") for name in trajectory.counters)


async def test_numbers_rounded_to_double_precision_are_the_same(model_path: Path) -> None:
    sampled = bash('{"n": 12345678901234567890, "e": 1e5, "z": -0.0}')
    async with running_proxy(model_path, fake_engine(sampled, "done")) as proxy:
        harness = await proxy.open(on_change="fork")
        (call,) = await replied(harness, [user("u")])
        resent = tool_use(call["id"], {"n": 12345678901234567000, "e": 100000, "z": 0})
        await replied(harness, [user("u"), assistant([resent]), user([tool_result(call["id"])])])
        trajectory = await harness.seal()
        assert len(trajectory.tree.leaves()) == 1 and trajectory.calls[1].substitution is Substitution.RESPLICED


@pytest.mark.parametrize("spelling", ["string", "parts", "none"])
async def test_chat_content_as_string_parts_or_none_is_the_same(model_path: Path, spelling: str) -> None:
    async with running_proxy(model_path, fake_engine(bash(), "done")) as proxy:
        harness = await proxy.open()
        message = await chatted(harness, [user("u")])
        call = message["tool_calls"][0]
        spaced = {**call, "function": {"name": "bash", "arguments": '{ "command" :\n"ls" }'}}
        content = {"string": "", "parts": [], "none": None}[spelling]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "r"}]}
        await chatted(harness, [user([text("u")]), assistant(content, tool_calls=[spaced]), answer])
        assert await harness.tree() == (
            '<usr> u </> <ast> [<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>] '
            "<usr> <res> r </res> </> <ast> [done </>]"
        )


async def test_reply_without_an_id_joins_by_its_words_whatever_the_white_space(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("one  two\n\nthree", "done")) as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")])
        await replied(harness, [user("u"), assistant("one two three"), user("v")])
        assert await harness.tree() == "<usr> u </> <ast> [one two three </>] <usr> v </> <ast> [done </>]"


async def test_id_written_into_a_text_joins(model_path: Path) -> None:
    engine = fake_engine("go\n" + bash(), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        message = await chatted(harness, [user("u")])
        written = f"go\nCalling tools:\n{orjson.dumps(message['tool_calls']).decode()}"
        await chatted(harness, [user("u"), assistant(written), user("Observation: r")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            '<usr> u </> <ast> [go <tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>] '
            "<usr> Observation: r </> <ast> [done </>]"
        )
        assert trajectory.counters["splice_changed_kept"] == 1


async def test_reply_that_mentions_an_id_of_another_call_is_matched_by_its_words(model_path: Path) -> None:
    engine = fake_engine(bash())
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        (call,) = await replied(harness, [user("u")])
        engine.add_outputs(outputs(f"see {call['id']}", "end"))
        history = [user("u"), assistant([call]), user([tool_result(call["id"])])]
        (words,) = await replied(harness, history)
        await replied(harness, [*history, assistant([words]), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert {call.substitution for call in trajectory.calls} == {Substitution.CLEAN}


async def test_one_of_two_calls_came_back_and_joins(model_path: Path) -> None:
    engine = fake_engine(call_text("bash", '{"c": 1}') + "\n" + call_text("bash", '{"c": 2}'), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first, _ = await replied(harness, [user("u")])
        await replied(harness, [user("u"), assistant([first]), user([tool_result(first["id"])])])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["splice_changed_kept"] == 1


async def test_signature_joins_a_reply_whose_thinking_came_back_changed(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("<think>\nhm\n</think>\n\na", "done")) as proxy:
        harness = await proxy.open()
        thinking, words = await replied(harness, [user("u")], **THINKING)
        resent = [{**thinking, "thinking": "something else"}, {**words, "text": "A"}]
        await replied(harness, [user("u"), assistant(resent), user("v")], **THINKING)
        assert await harness.tree() == "<usr> u </> <ast> [<think> hm </think> a </>] <usr> v </> <ast> [done </>]"
