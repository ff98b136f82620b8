"""Duty 6: text that was not sampled here is context, and does not cost the recorded tokens around it."""

from pathlib import Path
from typing import Any

from gyre_core.trajectory.text import golden
from gyre_core.types import Substitution
from tests.support.messages import THINKING, assistant, bash, replied, text, tool_result, tool_use, user
from tests.support.proxies import assert_exact, fake_engine, running_proxy, short

CALL = '<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>'


async def test_text_that_nobody_sampled_stands_between_recorded_tokens(model_path: Path) -> None:
    # The first reply is spelled in a way that no rendering repeats.
    engine = fake_engine("<think>\nhm\n</think>\n\n" + bash('{"command":  "ls"}'), "b", "c")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        thinking, call = await replied(harness, [user("u")], **THINKING)
        history = [
            user("u"),
            assistant([thinking, call]),
            user([tool_result(call["id"])]),
            assistant("No response requested."),
            user("v"),
        ]
        await replied(harness, history, **THINKING)
        await replied(harness, [*history, assistant("b"), user("w")], **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            f"<usr> u </> <ast> [<think> hm </think> {CALL}] <usr> <res> r </res> </> <ast> No response requested. </> "
            "<usr> v </> <ast> [b </>] <usr> w </> <ast> [c </>]"
        )
        substitutions = [call.substitution for call in trajectory.calls]
        assert substitutions == [Substitution.CLEAN, Substitution.SYNTHETIC, Substitution.CLEAN]


async def test_call_that_nobody_sampled_stands_with_its_result(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")])
        foreign = [assistant([tool_use("theirs", {"command": "ls"})]), user([tool_result("theirs")])]
        await replied(harness, [user("u"), assistant("a"), user("v"), *foreign])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            f"<usr> u </> <ast> [a </>] <usr> v </> <ast> {CALL} <usr> <res> r </res> </> <ast> [b </>]"
        )


async def test_newest_turn_sent_again_after_a_summary_is_context_with_its_recorded_tokens(model_path: Path) -> None:
    sampled = "<think>\nhm\n</think>\n\ngo\n" + bash('{"command":  "ls"}')
    engine = fake_engine(sampled, "the summary", "b", "c")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        blocks = await replied(harness, [user("u")], **THINKING)
        turn = [assistant(blocks), user([tool_result(blocks[-1]["id"])])]
        await replied(harness, [user([text("u"), text("Write a summary")])], **THINKING)
        after = [user("Summary: the summary"), *turn]
        await replied(harness, after, **THINKING)
        await replied(harness, [*after, assistant("b"), user("v")], **THINKING)
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        recorded = f"<think> hm </think> go {CALL}"
        assert golden(trajectory.tree, short) == (
            "<usr>\n"
            "  u\n"
            f"    </> <ast> [{recorded}]\n"
            "    Write a summary </> <ast> [the summary </>]\n"
            f"  Summary: the summary </> <ast> {recorded} <usr> <res> r </res> </> <ast> [b </>] "
            "<usr> v </> <ast> [c </>]"
        )
        # To the token: the policy reads its own turn, white space and all.
        ids = engine.calls[2].input_ids
        assert engine.calls[0].output_ids == _within(ids, engine.calls[0].output_ids)
        assert trajectory.counters["splice_moved"] == 1
        assert [call.substitution.value[0] for call in trajectory.calls] == ["c", "c", "f", "c"]


async def test_moved_turn_in_other_words_is_rendered_in_the_words_that_came(model_path: Path) -> None:
    engine = fake_engine("go\n" + bash(), "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        _, call = await replied(harness, [user("u")])
        history = [user("Summary"), assistant([text("Got it."), call]), user([tool_result(call["id"])])]
        await replied(harness, history)
        assert await harness.tree() == (
            f"<usr>\n  u </> <ast> [go {CALL}]\n"
            f"  Summary </> <ast> Got it. {CALL} <usr> <res> r </res> </> <ast> [b </>]"
        )


async def test_sampled_text_is_a_target_once_even_where_it_is_repeated(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")])
        await replied(harness, [user("u"), assistant("a"), user("v"), assistant("a"), user("w")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast> [a </>] <usr> v </> <ast> a </> <usr> w </> <ast> [b </>]"
        )


async def test_two_assistant_messages_in_a_row_keep_the_recorded_one(model_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\na  ", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")])
        await replied(harness, [user("u"), assistant("a"), assistant("and"), user("v")])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        assert golden(trajectory.tree, short) == (
            "<usr> u </> <ast> [<think> hm </think> a </>] <ast> and </> <usr> v </> <ast> [b </>]"
        )


def _within(ids: list[int], part: list[int]) -> Any:
    """The part of `ids` that equals `part`, None when there is none."""
    starts = range(len(ids) - len(part) + 1)
    return next((part for start in starts if ids[start : start + len(part)] == part), None)
