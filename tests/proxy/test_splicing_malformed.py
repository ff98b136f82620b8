"""Duty 12: what is wrong with an output is decided before delivery; what was sampled is what is recorded."""

from pathlib import Path

import pytest

from gyre_core.trajectory.text import golden
from tests.support.messages import assistant, bash, replied, text, tool_result, user
from tests.support.proxies import assert_exact, fake_engine, running_proxy, short


@pytest.mark.parametrize(
    "arguments",
    ['{"command": "ls"', '{"command": "ls",}', "[1, 2]", "", '{"x": NaN}', '{"command": "\\033[31m"}'],
)
async def test_broken_arguments_are_delivered_as_text_and_stay_in_the_branch(model_path: Path, arguments: str) -> None:
    engine = fake_engine("go\n" + bash(arguments), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        blocks = await replied(harness, [user("u")])
        assert [block["type"] for block in blocks] == ["text"]
        assert blocks[0]["text"].startswith("go\n<tool_call>")
        await replied(harness, [user("u"), assistant(blocks), user("no call could be read")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["malformed_tool_calls"] == 1


async def test_good_call_beside_a_broken_one_is_delivered(model_path: Path) -> None:
    engine = fake_engine(bash("{broken") + "\n" + bash(), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        words, call = await replied(harness, [user("u")])
        assert words["type"] == "text" and call["input"] == {"command": "ls"}
        await replied(harness, [user("u"), assistant([words, call]), user([tool_result(call["id"])])])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1


async def test_equal_calls_get_ids_of_their_own(model_path: Path) -> None:
    engine = fake_engine(bash() + "\n" + bash(), "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        one, two = await replied(harness, [user("u")])
        assert one["id"] != two["id"]
        results = [tool_result(one["id"], "1"), tool_result(two["id"], "2")]
        await replied(harness, [user("u"), assistant([one, two]), user(results)])
        call = '<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call>'
        assert await harness.tree() == (
            f"<usr> u </> <ast> [{call} {call} </>] <usr> <res> 1 </res> <res> 2 </res> </> <ast> [done </>]"
        )


@pytest.mark.parametrize("sampled", ["", "  \n", "<think>\nhm\n</think>\n\n"])
async def test_empty_reply_is_one_empty_text_and_can_be_sent_back(model_path: Path, sampled: str) -> None:
    engine = fake_engine(sampled, "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        blocks = await replied(harness, [user("u")])
        assert blocks == [text("")]
        await replied(harness, [user("u"), assistant(blocks), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters["empty_replies"] == 1


async def test_reply_cut_in_a_call_is_closed_and_gone_on_from(model_path: Path) -> None:
    engine = fake_engine('more\n<tool_call>\n{"name": "ba…', "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        blocks = await replied(harness, [user("u")], max_tokens=20)
        await replied(harness, [user("u"), assistant(blocks), user("limit hit, resume")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            '<usr> u </> <ast> [more <tool_call> {"name": "ba] </> <usr> limit hit, resume </> <ast> [done </>]'
        )
