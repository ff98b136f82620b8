"""Matching requests with what was sampled: by id, by form, at the same place, over all calls."""

import numpy as np
import pytest

from gyre_core.trajectory.arrow import trajectory_to_ipc
from gyre_core.trajectory.recorder import Change, FinishedCall, MessageKey, Plan, Recorder
from gyre_core.trajectory.text import golden
from gyre_core.types import FinishReason, Role, Substitution, VersionSpan
from tests.support.trees import ids, word

TOOLS = b"tools"


def said(text: str) -> MessageKey:
    """A user or tool message."""
    return MessageKey(is_assistant=False, exact=text.encode(), form=text.strip().encode())


def replied(text: str, *joins: str) -> MessageKey:
    """An assistant message; its form forgets case and spaces around it."""
    return MessageKey(
        is_assistant=True,
        exact=text.encode(),
        form=text.strip().lower().encode(),
        joins=joins,
        empty=not text,
        text=text.strip(),
        has_calls=bool(joins),
    )


def finish(recorder: Recorder, plan: Plan, prompt: str, output: str, reply: MessageKey) -> str:
    """Record a call; `prompt` is what follows the anchor's path (all of it without an anchor)."""
    call_id = f"c{recorder.num_calls}"
    base = plan.anchor.output_node.end if plan.anchor is not None else 0
    recorder.record(
        FinishedCall(
            call_id=call_id,
            index=recorder.num_calls,
            role=Role.MAIN,
            dialect="messages",
            model_name="m",
            substitution=plan.substitution,
            finish_reason=FinishReason.STOP,
            anchor_call=plan.anchor.call_id if plan.anchor is not None else "",
            prompt_ids=ids(prompt),
            output_ids=ids(output),
            logprobs=np.full(len(output), -1, np.float32),
            spans=(VersionSpan(version=0, start=0, end=len(output)),),
            prompt_tokens=base + len(prompt),
            cached_tokens=0,
            prompt_state=plan.prompt_state,
            seen=plan.seen,
            resumes=plan.resumes,
            reply=reply,
            started_s=0.0,
            finished_s=1.0,
            hints={},
        )
    )
    return call_id


def test_first_request_has_no_anchor_and_is_clean() -> None:
    plan = Recorder("r").plan(TOOLS, [said("u")])
    assert plan.anchor is None and plan.num_known == 0 and plan.substitution is Substitution.CLEAN


def test_next_turn_continues_the_call_that_sampled_its_last_reply() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a"))
    plan = recorder.plan(TOOLS, [said("u"), replied("a"), said("v")])
    assert plan.anchor is recorder.call("c0") and plan.num_known == 2 and plan.bridgeable
    finish(recorder, plan, "V", "B", replied("b"))
    plan = recorder.plan(TOOLS, [said("u"), replied("a"), said("v"), replied("b"), said("w")])
    assert plan.anchor is recorder.call("c1") and plan.num_known == 4
    assert golden(recorder.snapshot().tree, word) == "U [A] V [B]"


def test_reply_in_another_form_is_respliced_once() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a"))
    plan = recorder.plan(TOOLS, [said("u"), replied(" A"), said("v")])
    assert plan.anchor is recorder.call("c0") and plan.substitution is Substitution.RESPLICED
    finish(recorder, plan, "V", "B", replied("b"))
    plan = recorder.plan(TOOLS, [said("u"), replied(" A"), said("v"), replied("b"), said("w")])
    assert plan.anchor is recorder.call("c1") and plan.substitution is Substitution.CLEAN


def test_id_joins_a_reply_whose_text_changed() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", "toolu_1"))
    plan = recorder.plan(TOOLS, [said("u"), replied("something else", "toolu_1"), said("v")])
    assert plan.anchor is recorder.call("c0") and plan.substitution is Substitution.RESPLICED


def test_id_at_another_place_is_a_fork() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", "toolu_1"))
    plan = recorder.plan(TOOLS, [said("summary"), replied("a", "toolu_1"), said("v")])
    assert plan.anchor is None and plan.substitution is Substitution.FORKED and not plan.bridgeable


def test_text_at_another_place_is_a_fork_and_unknown_text_is_synthetic() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a"))
    assert recorder.plan(TOOLS, [said("x"), replied("a"), said("v")]).substitution is Substitution.FORKED
    assert recorder.plan(TOOLS, [said("u"), replied("b"), said("v")]).substitution is Substitution.SYNTHETIC
    assert recorder.plan(b"other tools", [said("u"), replied("a"), said("v")]).anchor is None


def test_empty_reply_that_nobody_sampled_here_is_left_out() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied(""))
    plan = recorder.plan(TOOLS, [said("x"), replied(""), said("v")])
    assert plan.substitution is Substitution.CLEAN and plan.dropped == {1}
    assert plan.prompt_state == recorder.plan(TOOLS, [said("x"), said("v")]).prompt_state


def test_synthetic_text_between_keeps_the_deepest_call_but_cannot_be_bridged() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a"))
    history = [said("u"), replied("a"), said("v"), replied("got it"), said("w")]
    plan = recorder.plan(TOOLS, history)
    assert plan.anchor is recorder.call("c0") and not plan.bridgeable
    assert plan.substitution is Substitution.SYNTHETIC
    # Rendered anew: the whole prompt is given, and shares the sampled token where it repeats it.
    whole = Plan(
        anchor=None,
        num_known=0,
        prompt_state=plan.prompt_state,
        substitution=plan.substitution,
        bridgeable=False,
        seen=plan.seen,
    )
    finish(recorder, whole, "UAVGW", "B", replied("b"))
    assert golden(recorder.snapshot().tree, word) == "U [A] VGW [B]"
    after = recorder.plan(TOOLS, [*history, replied("b"), said("x")])
    assert after.anchor is recorder.call("c1") and after.bridgeable and after.substitution is Substitution.CLEAN


def test_any_of_several_samples_can_go_on() -> None:
    recorder = Recorder("r")
    for text in ("a", "b", "c"):
        finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", text.upper(), replied(text))
    plan = recorder.plan(TOOLS, [said("u"), replied("b"), said("v")])
    assert plan.anchor is recorder.call("c1")
    finish(recorder, plan, "V", "D", replied("d"))
    assert golden(recorder.snapshot().tree, word) == "U\n  [A]\n  [B] V [D]\n  [C]"


def test_equal_samples_are_told_apart_by_id_over_several_turns() -> None:
    recorder = Recorder("r")
    for call in range(2):
        finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", f"toolu_{call}"))
    for call in range(2):
        plan = recorder.plan(TOOLS, [said("u"), replied("a", f"toolu_{call}"), said("v")])
        assert plan.anchor is recorder.call(f"c{call}")
        finish(recorder, plan, "V", "B", replied("b"))
    for call in range(2):
        plan = recorder.plan(TOOLS, [said("u"), replied("a", f"toolu_{call}"), said("v"), replied("b"), said("w")])
        assert plan.anchor is recorder.call(f"c{call + 2}")


def test_call_that_does_not_fit_its_prompt_is_refused() -> None:
    recorder = Recorder("r")
    plan = recorder.plan(TOOLS, [said("u")])
    finish(recorder, plan, "U", "A", replied("a"))
    with pytest.raises(ValueError, match="c1"):
        finish(recorder, plan, "U", "", replied("a"))
    assert recorder.num_calls == 1 and recorder.num_sampled == 1


def test_same_operations_give_the_same_trajectory() -> None:
    def build() -> Recorder:
        recorder = Recorder("r")
        for text in ("a", "b"):
            finish(recorder, recorder.plan(TOOLS, [said("u")]), "Uu", text.upper(), replied(text))
        finish(recorder, recorder.plan(TOOLS, [said("x")]), "Ux", "C", replied("c"))
        return recorder

    assert trajectory_to_ipc(build().snapshot()) == trajectory_to_ipc(build().snapshot())


def test_changed_reply_keeps_its_call_or_forks_by_policy() -> None:
    for keep, change in ((True, Change.CHANGED_KEPT), (False, Change.CHANGED_FORKED)):
        recorder = Recorder("r", keep_changed=keep)
        finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", "toolu_1"))
        plan = recorder.plan(TOOLS, [said("u"), replied("other", "toolu_1"), said("v")])
        assert plan.changes == {change: 1}
        assert (plan.anchor is not None) == keep
        assert plan.substitution is (Substitution.RESPLICED if keep else Substitution.FORKED)


def test_beginning_of_a_reply_is_a_cut_of_its_call() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("one two"))
    plan = recorder.plan(TOOLS, [said("u"), replied("one t"), said("v")])
    assert plan.anchor is None and plan.cut == {1: recorder.call("c0")} and plan.changes == {Change.CUT: 1}
    assert plan.substitution is Substitution.FORKED


def test_reply_joined_with_what_it_went_on_with_continues_its_call() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("one two"))
    plan = recorder.plan(TOOLS, [said("u"), replied("one"), said("go on")])
    finish(recorder, plan, "UAg", "B", replied("two", "toolu_2"))
    plan = recorder.plan(TOOLS, [said("u"), replied("one two", "toolu_2"), said("v")])
    assert plan.anchor is recorder.call("c1") and plan.num_known == 2 and plan.changes == {Change.JOINED: 1}


def test_turns_left_out_between_are_not_taken_for_a_joined_reply() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", "toolu_1"))
    plan = recorder.plan(TOOLS, [said("s"), replied("a", "toolu_1"), said("v")])  # after a summary
    finish(recorder, plan, "SAV", "B", replied("b", "toolu_2"))
    plan = recorder.plan(TOOLS, [said("s"), replied("b", "toolu_2"), said("w")])  # after another, of the same words
    assert plan.anchor is None and plan.changes == {Change.MOVED: 1}
    assert plan.moved == {1: recorder.call("c1")}


def test_moved_reply_in_other_words_brings_no_recorded_tokens() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied("a", "toolu_1"))
    plan = recorder.plan(TOOLS, [said("s"), replied("got it", "toolu_1"), said("v")])
    assert plan.changes == {Change.MOVED: 1} and not plan.moved


def test_empty_reply_is_kept_before_the_note_that_follows_it_and_no_other() -> None:
    recorder = Recorder("r")
    finish(recorder, recorder.plan(TOOLS, [said("u")]), "U", "A", replied(""))
    plan = recorder.plan(TOOLS, [said("u"), said("note")])
    assert plan.anchor is recorder.call("c0") and plan.num_known == 1 and plan.changes == {Change.EMPTY_KEPT: 1}
    assert recorder.plan(TOOLS, [said("u")]).anchor is None  # the same body again
    finish(recorder, plan, "N", "B", replied("b"))
    again = recorder.plan(TOOLS, [said("u"), said("note"), replied("b"), said("v")])
    assert again.anchor is recorder.call("c1") and not again.changes
    assert Recorder("other", keep_changed=False).plan(TOOLS, [said("u"), said("note")]).anchor is None
