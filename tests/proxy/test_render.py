"""Rendering: what follows a recorded output is what a full render would put there, and nothing else is touched."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.proxy.conversation import Message, ToolCall
from gyre_core.proxy.parts import call_seed, joined
from gyre_core.proxy.render import LONG_TEXT, PromptRenderer, check_vocabulary
from gyre_core.proxy.tokenizer import FastTokenizer
from gyre_core.types import FinishReason, Generation, VersionSpan
from tests.support.proxies import call_text
from tests.support.tokenizer import VOCAB_SIZE, byte_tokenizer, encode, save_model_folder

USER = Message(role="user", text="u")
TOOL = {"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer(model_path: Path) -> PromptRenderer:
    return PromptRenderer.load(model_path)


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.sampled_from(["<|im_start|>x<think>", "a<tool_call>b", "\n\n  \t"]))
def test_fast_tokenizer_equals_transformers(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "fast"
    if not folder.exists():
        folder.mkdir()
        save_model_folder(folder)
    fast = FastTokenizer.load(folder)
    ids = byte_tokenizer().encode(text, add_special_tokens=False)
    assert fast.encode(text) == ids
    assert fast.decode(ids) == byte_tokenizer().decode(ids, skip_special_tokens=False)
    assert fast.convert_tokens_to_ids("<think>") == byte_tokenizer().convert_tokens_to_ids("<think>")
    assert fast.eos_token_id == byte_tokenizer().eos_token_id and len(fast) == len(byte_tokenizer())


def test_extension_equals_what_a_full_render_adds(renderer: PromptRenderer) -> None:
    reply = Message(role="assistant", text="", tool_calls=(ToolCall(call_id="t", name="bash", arguments={"c": "ls"}),))
    new = [Message(role="tool", text="out", tool_call_id="t")]
    prompt = renderer.render([USER], [TOOL])
    output = encode(call_text("bash", '{"c": "ls"}') + "<|im_end|>")
    added = renderer.extend(prompt[-50:], output, new, [TOOL], lambda: [USER, reply])
    assert added is not None
    assert prompt + output + added == renderer.render([USER, reply, *new], [TOOL])


def test_extension_needs_only_the_end_of_the_prompt(renderer: PromptRenderer) -> None:
    prompt = renderer.render([Message(role="user", text="x" * 3000)], [])
    output = encode("<think>\nhm\n</think>\n\nfine<|im_end|>")
    new = [Message(role="user", text="v")]
    whole = renderer.extend(prompt, output, new, [], lambda: [])
    assert whole is not None and whole == renderer.extend(prompt[-60:], output, new, [], lambda: [])


def test_assistant_messages_cannot_follow_by_extension(renderer: PromptRenderer) -> None:
    assert renderer.extend([1], [2], [Message(role="assistant", text="x"), USER], [], lambda: []) is None


def test_template_difference_closes_a_cut_output(tmp_path: Path) -> None:
    renderer = PromptRenderer.load(save_model_folder(tmp_path, model_type="unknown"), "default")
    reply, new = Message(role="assistant", text="a"), [Message(role="user", text="v")]
    expected = encode("<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n")
    prompt = renderer.render([USER], [])
    assert renderer.extend(prompt, encode("a"), new, [], lambda: [USER, reply]) == expected
    assert renderer.extend(prompt, encode("a<|im_end|>"), new, [], lambda: [USER, reply]) == expected[1:]


def test_conversation_without_a_prompt_is_a_value_error(renderer: PromptRenderer) -> None:
    with pytest.raises(ValueError, match="no messages"):
        renderer.render([Message(role="assistant", text="a")], [])


def test_parser_keeps_the_order_of_good_and_bad_calls(renderer: PromptRenderer) -> None:
    text = "say\n" + call_text("a", "{}") + "\n" + call_text("b", "{broken") + "\n" + call_text("c", '{"x": 1}')
    parsed = renderer.parse(encode(text + "<|im_end|>"), [TOOL], [])
    assert parsed.tool_calls == (("a", {}), ("c", {"x": 1}))
    assert parsed.num_malformed == 1 and parsed.text.startswith("say\n<tool_call>") and "{broken" in parsed.text


@settings(max_examples=80)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
def test_any_output_can_be_read(renderer: PromptRenderer, ids: list[int]) -> None:
    parsed = renderer.parse(ids, [TOOL], renderer.render([USER], []))
    assert isinstance(parsed.text, str) and parsed.reasoning_tokens <= len(ids)


async def test_long_texts_are_rendered_beside_the_event_loop(renderer: PromptRenderer) -> None:
    message = Message(role="user", text="x" * (LONG_TEXT + 1))
    seen = []

    def work() -> int:
        seen.append(asyncio.events._get_running_loop())
        return 1

    assert await renderer.run([message], work) == 1
    assert await renderer.run([USER], work) == 1
    assert seen[0] is None and seen[1] is asyncio.get_running_loop()


def test_ids_outside_the_vocabulary_are_named() -> None:
    check_vocabulary([], 5)
    check_vocabulary([0, 4], 5)
    for ids in ([5], [-1], [0, 2**31]):
        with pytest.raises(ValueError, match="outside the policy's 5 ids"):
            check_vocabulary(ids, 5)


def part(ids: list[int], finish: FinishReason, *spans: tuple[int, int, int]) -> Generation:
    return Generation(
        output_ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
        finish_reason=finish,
        spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
        prompt_tokens=9,
        cached_tokens=len(ids),
    )


def test_parts_of_one_output_are_joined_with_their_versions() -> None:
    parts = [
        part([1, 2], FinishReason.ABORT, (0, 0, 2)),
        part([3], FinishReason.ABORT, (0, 0, 1)),
        part([4, 5], FinishReason.STOP, (1, 0, 1), (2, 1, 2)),
    ]
    whole = joined(parts, prompt_tokens=3)
    assert whole.output_ids.tolist() == [1, 2, 3, 4, 5] and whole.logprobs.tolist() == [-1, -2, -3, -4, -5]
    assert [(s.version, s.start, s.end) for s in whole.spans] == [(0, 0, 3), (1, 3, 4), (2, 4, 5)]
    assert (whole.prompt_tokens, whole.cached_tokens, whole.finish_reason) == (3, 2, FinishReason.STOP)
    assert joined(parts[:1], prompt_tokens=3).finish_reason is FinishReason.LENGTH


def test_seed_of_a_call_is_stable_and_different_for_each_call_and_part() -> None:
    assert call_seed(None, "r-c0", 0) is None
    assert call_seed(7, "r-c0", 0) == call_seed(7, "other-rollout-c0", 0) == 1589673464
    seeds = {call_seed(seed, f"r-c{call}", part) for seed in range(4) for call in range(4) for part in range(2)}
    assert len(seeds) == 32 and all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
