"""What engines saw and sampled is what the tree holds, whatever a harness does to the history it re-sends."""

from pathlib import Path
from typing import Any

import pytest

from gyre_core.trajectory.text import golden
from gyre_core.types import FinishReason, Role, Substitution
from tests.support.proxies import BASH, assert_exact, call_text, fake_engine, outputs, running_proxy, short
from tests.support.tokenizer import save_model_folder

THINKING = {"thinking": {"type": "adaptive"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": text}]}


async def test_two_turns_of_text_form_one_branch(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first = (await harness.messages([user("u")], system="s")).json()
        await harness.messages([user("u"), assistant(first["content"]), user("v")], system="s")
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert [call.substitution for call in trajectory.calls] == [Substitution.CLEAN, Substitution.CLEAN]
        assert len(trajectory.tree.leaves()) == 1


async def test_two_turns_golden_tree(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a", "b")) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")], system="s")
        await harness.messages([user("u"), assistant("a"), user("v")], system="s")
        assert await harness.tree() == "<sys> s </> <usr> u </> <ast> [a </>] <usr> v </> <ast> [b </>]"


@pytest.mark.parametrize(
    ("content", "substitution"),
    [
        (None, Substitution.CLEAN),  # re-sent as it came
        ("no thinking", Substitution.RESPLICED),
        ("json", Substitution.RESPLICED),
        ("other arguments", Substitution.RESPLICED),
        ("text moved", Substitution.RESPLICED),
    ],
)
async def test_changed_history_keeps_the_recorded_tokens(
    model_path: Path, content: str | None, substitution: Substitution
) -> None:
    sampled = "<think>\nplan it \n</think>\n\n look  \n" + call_text("bash", '{"command":  "ls", "n": 5000.0}')
    engine = fake_engine(sampled, "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first = (await harness.messages([user("u")], tools=[BASH], **THINKING)).json()
        thinking, text, call = first["content"]
        assert (thinking["thinking"], text["text"], call["input"]) == ("plan it", "look", {"command": "ls", "n": 5000})
        blocks = {
            None: [thinking, text, call],
            "no thinking": [text, call],
            "json": [thinking, text, {**call, "input": {"n": 5000.0, "command": "ls"}}],
            "other arguments": [text, {**call, "input": {"command": "cd /app && ls", "timeout": 60}}],
            "text moved": [call, {"type": "text", "text": " look\t"}],
        }[content]
        reply = await harness.messages(
            [user("u"), assistant(blocks), result(call["id"], "a.txt")], tools=[BASH], **THINKING
        )
        assert reply.status_code == 200
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.calls[1].substitution is substitution
        # The next prompt goes on after the very ids that were sampled.
        first_call, second_call = engine.calls
        known = first_call.input_ids + first_call.output_ids
        assert second_call.input_ids[: len(known)] == known


async def test_cache_marks_and_block_content_do_not_matter(model_path: Path) -> None:
    engine = fake_engine("a", "b", "c")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        mark = {"cache_control": {"type": "ephemeral"}}
        await harness.messages([user("u")], system=[{"type": "text", "text": "s", **mark}])
        second = [{"role": "user", "content": [{"type": "text", "text": "u", **mark}]}, assistant("a"), user("v")]
        await harness.messages(second, system="s")
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}
        third = [user("u"), assistant([{"type": "text", "text": "a", **mark}]), user("v"), assistant("b "), user("w")]
        await harness.messages(third, system=[billing, {"type": "text", "text": "s"}])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        substitutions = [call.substitution for call in trajectory.calls]
        assert substitutions == [Substitution.CLEAN, Substitution.CLEAN, Substitution.RESPLICED]


async def test_best_of_three_then_the_second_continues(model_path: Path) -> None:
    engine = fake_engine("a1", "a2", "a3", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        for _ in range(3):
            await harness.messages([user("u")])
        await harness.messages([user("u"), assistant("a2"), user("v")])
        assert await harness.tree() == (
            "<usr> u </> <ast>\n  [a1 </>]\n  [a2 </>] <usr> v </> <ast> [b </>]\n  [a3 </>]"
        )


async def test_equal_samples_of_equal_calls_are_told_apart_by_their_ids(model_path: Path) -> None:
    call = call_text("bash", '{"command": "ls"}')
    engine = fake_engine(call, call, "from the first", "from the second")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        ids = [(await harness.messages([user("u")], tools=[BASH])).json()["content"][0]["id"] for _ in range(2)]
        assert ids[0] != ids[1]
        for call_id in ids:
            tool_use = {"type": "tool_use", "id": call_id, "name": "bash", "input": {"command": "ls"}}
            await harness.messages([user("u"), assistant([tool_use]), result(call_id, "x")], tools=[BASH])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        parents = [trajectory.tree.path(call.node_id) for call in trajectory.calls]
        assert parents[0][-1] == parents[2][-3] and parents[1][-1] == parents[3][-3]


async def test_one_turn_back_makes_a_sibling_branch(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a", "b", "c")) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")])
        await harness.messages([user("u"), assistant("a"), user("v")])
        await harness.messages([user("u"), assistant("a"), user("w")])
        assert await harness.tree() == ("<usr> u </> <ast> [a </>] <usr>\n  v </> <ast> [b </>]\n  w </> <ast> [c </>]")


async def test_prompt_that_diverges_inside_a_node_shares_its_beginning(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("abcX")])
        await harness.messages([user("abcY")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert [call.node_id for call in trajectory.calls] == [2, 4]
        assert trajectory.tree.unique_tokens < sum(len(call.input_ids + call.output_ids) for call in engine.calls)


async def test_reply_cut_in_reasoning_is_closed_with_untrained_tokens(model_path: Path) -> None:
    engine = fake_engine("<think>\nso lon…", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first = (await harness.messages([user("u")], max_tokens=8, **THINKING)).json()
        assert first["stop_reason"] == "max_tokens"
        await harness.messages([user("u"), assistant(first["content"]), user("go on")], **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert trajectory.calls[0].finish_reason is FinishReason.LENGTH
        assert len(trajectory.tree.leaves()) == 1
        closing = trajectory.tree.nodes[trajectory.calls[0].node_id + 1]
        assert not closing.sampled.any()
        assert short(closing.token_ids.tolist()) == "</think> </> <usr> go on </> <ast> "


async def test_reply_cut_in_a_tool_call_is_delivered_as_text(model_path: Path) -> None:
    engine = fake_engine('look\n<tool_call>\n{"na…', "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first = (await harness.messages([user("u")], tools=[BASH], max_tokens=14)).json()
        assert [block["type"] for block in first["content"]] == ["text"]
        assert first["content"][0]["text"].startswith("look\n<tool_call>")
        await harness.messages([user("u"), assistant(first["content"]), user("go on")], tools=[BASH])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["malformed_tool_calls"] == 1


async def test_harness_asks_to_go_on_with_a_cut_reply(model_path: Path) -> None:
    engine = fake_engine("one tw…", "o three")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")], max_tokens=6)
        await harness.messages([user("u"), assistant("one tw")])
        assert await harness.tree() == "<usr> u </> <ast> [one tw] [o three </>]"


async def test_prefilled_assistant_turn_is_context(model_path: Path) -> None:
    engine = fake_engine(" world")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u"), assistant("hello")])
        assert await harness.tree() == "<usr> u </> <ast> hello [world </>]"


async def test_assistant_text_nobody_sampled_is_never_a_target(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")])
        await harness.messages([user("u"), assistant("a"), user("v"), assistant("No response."), user("w")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert [call.substitution for call in trajectory.calls] == [Substitution.CLEAN, Substitution.SYNTHETIC]
        # The full render repeats the recorded tokens here, so the branch goes on from the sampled reply.
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.tree.sampled_tokens == len(outputs("a")[0]) + len(outputs("b")[0])


async def test_changed_meaning_forks(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("first question")])
        await harness.messages([user("another question"), assistant("a"), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert trajectory.calls[1].substitution is Substitution.FORKED
        assert len(trajectory.tree.leaves()) == 2


async def test_template_that_is_not_append_only_hangs_where_tokens_diverge(model_path: Path) -> None:
    sampled = "<think>\nhm\n</think>\n\na"
    engine = fake_engine(sampled, "b", "c")
    async with running_proxy(model_path, engine, thinking_retention="tool_cycle") as proxy:
        harness = await proxy.open()
        first = (await harness.messages([user("u")], **THINKING)).json()
        history = [user("u"), assistant(first["content"]), user("v")]
        await harness.messages(history, **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert trajectory.calls[1].substitution is Substitution.FORKED
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast>\n  [<think> hm </think> a </>]\n  a </> <usr> v </> <ast> [b </>]"
        )


async def test_model_without_a_renderer_keeps_sampled_tokens_through_its_template(tmp_path: Path) -> None:
    engine = fake_engine("a ", "b")
    async with running_proxy(save_model_folder(tmp_path, model_type="other"), engine, renderer="default") as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")])
        await harness.messages([user("u"), assistant("a"), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        known = engine.calls[0].input_ids + engine.calls[0].output_ids
        assert engine.calls[1].input_ids[: len(known)] == known


async def test_tools_are_part_of_the_key(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages([user("u")], tools=[BASH])
        await harness.messages([user("u"), assistant("a"), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 2


async def test_sub_agent_and_compaction_are_branches_with_their_roles(model_path: Path) -> None:
    engine = fake_engine("a", "sub", "sub sum", "sum", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        child = {"x-agent-parent": "main"}
        await harness.messages([user("u")], system="s")
        await harness.messages([user("task")], system="sub-agent", headers=child)
        ask = user("Write a summary of this conversation")
        await harness.messages([user("task"), assistant("sub"), ask], system="sub-agent", headers=child)
        await harness.messages([user("u"), assistant("a"), ask], system="s")
        await harness.messages([user("Summary: sum")], system="s")
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert [call.role for call in trajectory.calls] == [
            Role.MAIN,
            Role.SUB_AGENT,
            Role.SUB_AGENT_SUMMARY,
            Role.MAIN_SUMMARY,
            Role.MAIN,
        ]
        assert len(trajectory.tree.leaves()) == 3
        assert trajectory.calls[1].hints == {"x-agent-parent": "main"}


async def test_tool_messages_of_chat_form_one_branch(model_path: Path) -> None:
    first = call_text("bash", '{"command": "ls"}') + "\n" + call_text("bash", '{"command": "pwd"}')
    engine = fake_engine(first, "done")
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        message = (await harness.chat([user("u")], tools=tools)).json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": f"out {i}"}]}
            for i, call in enumerate(message["tool_calls"])
        ]
        reply = await harness.chat([user("u"), message, *results], tools=tools)
        assert reply.json()["choices"][0]["message"]["content"] == "done"
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert [call.substitution for call in trajectory.calls] == [Substitution.CLEAN, Substitution.CLEAN]


async def test_seed_depends_on_session_seed_and_call_only(model_path: Path) -> None:
    seeds = []
    for _ in range(2):
        engine = fake_engine("a", "b")
        async with running_proxy(model_path, engine) as proxy:
            harness = await proxy.open()
            await harness.messages([user("u")])
            await harness.messages([user("v")])
            seeds.append([call.sampling_params["sampling_seed"] for call in engine.calls])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]
