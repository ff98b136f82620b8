"""Duties 4, 8 and 12: replies that came back in part, joined, completed or not at all."""

from pathlib import Path

import pytest

from gyre_core.trajectory.text import golden
from gyre_core.types import Substitution
from tests.support.messages import THINKING, assistant, bash, chatted, replied, text, tool_result, user
from tests.support.proxies import assert_exact, fake_engine, running_proxy, short

CALL = '<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>'


async def test_beginning_of_a_reply_keeps_so_many_of_its_tokens(model_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\npart one AAAA\n" + bash(), "rest")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await chatted(harness, [user("u")])
        await chatted(harness, [user("u"), assistant("part one A"), user("it broke, go on")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast> [<think> hm </think> part one A]\n"
            f"  [AAA {CALL}]\n"
            "  </> <usr> it broke, go on </> <ast> [rest </>]"
        )
        assert trajectory.calls[1].substitution is Substitution.FORKED
        assert trajectory.counters["splice_cut"] == 1


async def test_outputs_joined_after_a_dropped_connection_go_on_in_one_branch(model_path: Path) -> None:
    engine = fake_engine("part one\n" + bash('{"command": "lost"}'), "then two\n" + bash(), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await chatted(harness, [user("u")])
        second = await chatted(harness, [user("u"), assistant("part one"), user("it broke, go on")])
        joined = assistant("part one then two", tool_calls=second["tool_calls"])
        answer = {"role": "tool", "tool_call_id": second["tool_calls"][0]["id"], "content": "r"}
        await chatted(harness, [user("u"), joined, answer])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast> [part one]\n"
            '  [<tool_call> {"name": "bash", "arguments": {"command": "lost"}} </tool_call> </>]\n'
            f"  </> <usr> it broke, go on </> <ast> [then two {CALL}] <usr> <res> r </res> </> <ast> [done </>]"
        )
        assert trajectory.counters["splice_joined"] == 1


async def test_reasoning_that_came_back_alone_is_gone_on_with(model_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\nlost", "stands")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        thinking, _ = await replied(harness, [user("u")], **THINKING)
        await replied(harness, [user("u"), assistant([thinking])], **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == "<usr> u </> <ast> [<think> hm </think>]\n  [lost </>]\n  [stands </>]"


async def test_reasoning_gone_on_with_comes_back_joined_with_its_continuation(model_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\nlost", "<think>\nmore\n</think>\n\nstands", "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        first, _ = await replied(harness, [user("u")], **THINKING)
        second, words = await replied(harness, [user("u"), assistant([first])], **THINKING)
        await replied(harness, [user("u"), assistant([first, second, words]), user("v")], **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast> [<think> hm </think>]\n"
            "  [lost </>]\n"
            "  [<think> more </think> stands </>] <usr> v </> <ast> [done </>]"
        )


async def test_cut_reply_and_its_continuation_joined_in_one_text_go_on(model_path: Path) -> None:
    engine = fake_engine("one tw…", "o three", "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await chatted(harness, [user("u")], max_tokens=6)
        await chatted(harness, [user("u"), assistant("one tw")])
        await chatted(harness, [user("u"), assistant("one two three"), user("v")])
        trajectory = await harness.seal()
        assert golden(trajectory.tree, short) == "<usr> u </> <ast> [one tw] [o three </>] <usr> v </> <ast> [done </>]"
        assert trajectory.calls[2].substitution is Substitution.RESPLICED
        assert trajectory.counters["splice_joined"] == 1


async def test_completed_prefill_comes_back_as_one_message(model_path: Path) -> None:
    engine = fake_engine(" world\n" + bash(), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        words, call = await replied(harness, [user("u"), assistant("hello")])
        whole = assistant([text("hello" + " " + words["text"]), call])
        await replied(harness, [user("u"), whole, user([tool_result(call["id"])])])
        assert (
            await harness.tree() == f"<usr> u </> <ast> hello [world {CALL}] <usr> <res> r </res> </> <ast> [done </>]"
        )


async def test_continuations_after_the_token_limit_form_one_branch(model_path: Path) -> None:
    engine = fake_engine("one tw…", "o thr…", "ee")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        history = [user("u")]
        for size, reply in ((6, "one tw"), (5, "o thr"), (100, "ee")):
            assert (await replied(harness, history, max_tokens=size))[0]["text"] == reply
            history += [assistant(reply), user("go on")]
        assert await harness.tree() == (
            "<usr> u </> <ast> [one tw] </> <usr> go on </> <ast> [o thr] </> <usr> go on </> <ast> [ee </>]"
        )


@pytest.mark.parametrize("policy", ["keep", "fork"])
async def test_reply_without_text_stays_before_the_note_that_replaced_it(model_path: Path, policy: str) -> None:
    engine = fake_engine(bash(), "<think>\nhm\n</think>\n\n", "done", "end")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(on_change=policy)
        call = (await replied(harness, [user("u")]))[0]
        history = [user("u"), assistant([call]), user([tool_result(call["id"])])]
        await replied(harness, history)
        noted = [*history[:2], user([tool_result(call["id"]), text("no output, go on")])]
        await replied(harness, noted)
        await replied(harness, [*noted, assistant("done"), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        branch = "<usr> no output, go on </> <ast> [done </>] <usr> v </> <ast> [end </>]"
        thought = "[<think> hm </think> </>]"
        begin = f"<usr> u </> <ast> [{CALL}] <usr> <res> r </res> </> "
        assert (
            golden(trajectory.tree, short)
            == {
                "keep": f"{begin}<ast> {thought} {branch}",
                "fork": f"{begin}<|im_start|>\n  assistant {thought}\n  user {branch.removeprefix('<usr> ')}",
            }[policy]
        )
        assert trajectory.counters.get("splice_empty_kept", 0) == (policy == "keep")


async def test_empty_message_that_nobody_sampled_is_left_out(model_path: Path) -> None:
    engine = fake_engine("a", "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await chatted(harness, [user("u")])
        await chatted(harness, [user("u"), assistant("", reasoning_content="lost"), assistant("a"), user("v")])
        assert await harness.tree() == "<usr> u </> <ast> [a </>] <usr> v </> <ast> [done </>]"
