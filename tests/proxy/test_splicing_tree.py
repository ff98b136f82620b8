"""Duty 7: the tree is keyed by parent and appended messages; system and tools are in the key; branches are normal."""

import asyncio
from pathlib import Path

from gyre_core.trajectory.text import golden
from gyre_core.types import Role, Substitution
from tests.support.messages import assistant, bash, chatted, replied, text, tool_result, user
from tests.support.proxies import BASH, assert_exact, fake_engine, running_proxy, short

CALL = '<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>'


async def test_other_system_prompt_and_other_tools_are_other_branches(model_path: Path) -> None:
    engine = fake_engine("a", "b", "c")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")], system="s one")
        await replied(harness, [user("u"), assistant("a"), user("v")], system="s two")
        await replied(harness, [user("u"), assistant("a"), user("v")], system="s one", tools=[BASH])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 3
        assert trajectory.counters["splice_moved"] == 2


async def test_branch_one_turn_back_and_siblings_share_all_before_them(model_path: Path) -> None:
    engine = fake_engine(bash(), "a", "b", "c")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        (call,) = await replied(harness, [user("u")])
        turn = [user("u"), assistant([call])]
        await replied(harness, [*turn, user([tool_result(call["id"], "one")])])
        await replied(harness, [*turn, user([tool_result(call["id"], "two")])])
        await replied(harness, [*turn, user([tool_result(call["id"], "two")]), assistant("b"), user("v")])
        assert await harness.tree() == (
            f"<usr> u </> <ast> [{CALL}] <usr> <res>\n"
            "  one </res> </> <ast> [a </>]\n"
            "  two </res> </> <ast> [b </>] <usr> v </> <ast> [c </>]"
        )


async def test_instruction_behind_the_last_tool_result_is_a_branch_beside_the_next_turn(model_path: Path) -> None:
    """How Claude Code asks for a summary: the previous request's messages, the instruction in the last one."""
    engine = fake_engine(bash(), "a", "the summary")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(harness="claude-code")
        (call,) = await replied(harness, [user("u")])
        turn = [user("u"), assistant([call])]
        await replied(harness, [*turn, user([tool_result(call["id"])])])
        ask = text("CRITICAL: Respond with TEXT ONLY. Now")
        await replied(harness, [*turn, user([tool_result(call["id"]), ask])])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            f"<usr> u </> <ast> [{CALL}] <usr> <res> r </res> </> <|im_start|>\n"
            "  assistant [a </>]\n"
            "  user CRITICAL: Respond with TEXT ONLY. Now </> <ast> [the summary </>]"
        )
        assert [call.role for call in trajectory.calls] == [Role.MAIN, Role.MAIN, Role.MAIN_SUMMARY]
        assert all(call.substitution is Substitution.CLEAN for call in trajectory.calls)


async def test_overlapping_sub_agents_never_mix(model_path: Path) -> None:
    engine = fake_engine("a1", "b1", "a2", "b2")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        child = {"x-agent-parent": "main"}
        histories = {name: [user(f"task {name}")] for name in "ab"}
        for turn in "12":
            engine.hold()
            calls = []
            for number, name in enumerate("ab", start=1):
                calls.append(asyncio.create_task(replied(harness, histories[name], headers=child)))
                await engine.running(number)  # in this order, both at once
            engine.release()
            for name, blocks in zip("ab", await asyncio.gather(*calls), strict=True):
                assert blocks[0]["text"] == name + turn
                histories[name] += [assistant(blocks), user("more")]
        assert await harness.tree() == (
            "<usr> task\n"
            "  a </> <ast> [a1 </>] <usr> more </> <ast> [a2 </>]\n"
            "  b </> <ast> [b1 </>] <usr> more </> <ast> [b2 </>]"
        )


async def test_system_messages_in_the_middle_and_at_the_end_append(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        note = {"role": "system", "content": [text("note")]}
        await replied(harness, [user("u"), note])
        await replied(harness, [user("u"), {**note, "content": "note"}, assistant("a"), user("v"), user("w"), note])
        assert await harness.tree() == (
            "<usr> u </> <sys> note </> <ast> [a </>] <usr> v </> <usr> w </> <sys> note </> <ast> [b </>]"
        )


async def test_reply_dropped_on_purpose_is_a_sibling_of_what_follows(model_path: Path) -> None:
    """mini-swe-agent: a reply without a tool call leaves the history, an error takes its place."""
    engine = fake_engine("no call", bash())
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await chatted(harness, [user("u")])
        await chatted(harness, [user("u"), user("error: no tool call")])
        assert await harness.tree() == (
            f"<usr> u </> <|im_start|>\n  assistant [no call </>]\n  user error: no tool call </> <ast> [{CALL}]"
        )
