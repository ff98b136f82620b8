"""Duty 5: where the meaning really changed, the session's policy decides, and the counters say what it decided."""

from pathlib import Path
from typing import Any

import pytest

from gyre_core.trajectory.text import golden
from gyre_core.types import Substitution
from tests.support.messages import assistant, bash, replied, tool_result, tool_use, user
from tests.support.proxies import assert_exact, fake_engine, running_proxy, short

KEEP, FORK = "keep", "fork"
CALLED = '<tool_call> {"name": "bash", "arguments": {"command": "ls"}} </tool_call> </>'


async def two_turns(model_path: Path, policy: str, sampled: str, resend: Any) -> Any:
    """A turn, the history that `resend` makes of it, another turn; the trajectory."""
    engine = fake_engine(sampled, "done")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(on_change=policy)
        blocks = await replied(harness, [user("u")])
        await replied(harness, [user("u"), *resend(blocks)])
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        return trajectory


def other_command(blocks: list[Any]) -> list[Any]:
    return [assistant([tool_use(blocks[0]["id"], {"command": "pwd"})]), user([tool_result(blocks[0]["id"])])]


async def test_other_arguments_under_a_known_id_keep_the_sampled_tokens(model_path: Path) -> None:
    trajectory = await two_turns(model_path, KEEP, bash(), other_command)
    assert golden(trajectory.tree, short) == f"<usr> u </> <ast> [{CALLED}] <usr> <res> r </res> </> <ast> [done </>]"
    assert trajectory.calls[1].substitution is Substitution.RESPLICED
    assert trajectory.counters["splice_changed_kept"] == 1


async def test_other_arguments_fork_with_the_harness_words_masked(model_path: Path) -> None:
    trajectory = await two_turns(model_path, FORK, bash(), other_command)
    # What the harness left as it was is still what the policy sampled, and a target once; its own words are none.
    assert golden(trajectory.tree, short) == (
        '<usr> u </> <ast> [<tool_call> {"name": "bash", "arguments": {"command": "]\n'
        '  [ls"}} </tool_call> </>]\n'
        '  pwd"}} </tool_call> </> <usr> <res> r </res> </> <ast> [done </>]'
    )
    assert trajectory.calls[1].substitution is Substitution.FORKED
    assert trajectory.counters["splice_changed_forked"] == 1


@pytest.mark.parametrize(
    ("policy", "tree"),
    [
        (KEEP, "<usr> u </> <ast> [no code </>] <usr> v </> <ast> [done </>]"),
        (FORK, "<usr> u </> <ast> [no code]\n  [</>]\n  </code> </> <usr> v </> <ast> [done </>]"),
    ],
)
async def test_text_behind_a_reply_is_kept_out_or_forks(model_path: Path, policy: str, tree: str) -> None:
    trajectory = await two_turns(model_path, policy, "no code", lambda _: [assistant("no code</code>"), user("v")])
    assert golden(trajectory.tree, short) == tree


@pytest.mark.parametrize("policy", [KEEP, FORK])
async def test_rewritten_text_without_an_id_is_nobodys(model_path: Path, policy: str) -> None:
    trajectory = await two_turns(model_path, policy, "sampled", lambda _: [assistant("rewritten"), user("v")])
    assert golden(trajectory.tree, short) == (
        "<usr> u </> <ast>\n  [sampled </>]\n  rewritten </> <usr> v </> <ast> [done </>]"
    )
    assert trajectory.calls[1].substitution is Substitution.SYNTHETIC


async def test_longer_word_does_not_pass_for_a_reply_with_text_behind_it(model_path: Path) -> None:
    trajectory = await two_turns(model_path, KEEP, "no", lambda _: [assistant("nobody"), user("v")])
    assert trajectory.calls[1].substitution is Substitution.SYNTHETIC


@pytest.mark.parametrize("policy", [KEEP, FORK])
async def test_change_is_counted_once_however_often_it_comes_back(model_path: Path, policy: str) -> None:
    engine = fake_engine(bash(), "b", "c", "d")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open(on_change=policy)
        history = [user("u"), *other_command(await replied(harness, [user("u")]))]
        for reply in "bcd":
            assert (await replied(harness, history))[0]["text"] == reply
            history += [assistant(reply), user("v")]
        trajectory = await harness.seal()
        assert_exact(trajectory, engine)
        name = "splice_changed_kept" if policy == KEEP else "splice_changed_forked"
        assert trajectory.counters[name] == 1
        assert [call.substitution for call in trajectory.calls[2:]] == [Substitution.CLEAN, Substitution.CLEAN]
        assert len(trajectory.tree.leaves()) == (1 if policy == KEEP else 2)


async def test_template_that_rewrites_its_past_is_named_as_the_reason(model_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\na", "b")
    async with running_proxy(model_path, engine, thinking_retention="tool_cycle") as proxy:
        harness = await proxy.open()
        await replied(harness, [user("u")])
        await replied(harness, [user("u"), assistant("a"), user("v")])
        trajectory = await harness.seal()
        assert trajectory.calls[1].substitution is Substitution.FORKED
        assert {name for name in trajectory.counters if name.startswith("splice_")} == {"splice_template"}


async def test_setting_refuses_an_unknown_policy(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy:
        with pytest.raises(AssertionError, match="on_change"):
            await proxy.open(on_change="guess")
