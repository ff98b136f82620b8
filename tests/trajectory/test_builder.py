"""The live token tree: what is shared, what never is, and that handles keep their meaning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.text import golden
from gyre_core.types import Role, VersionSpan
from tests.support.trees import attach, ids, sample, word


def show(tree: TokenTree) -> str:
    frozen, _ = tree.freeze("r")
    frozen.validate()
    return golden(frozen, word)


def test_equal_prompts_share_one_node() -> None:
    tree = TokenTree()
    assert attach(tree, "abc") is attach(tree, "abc")
    assert show(tree) == "abc"


def test_longer_prompt_hangs_below_the_shorter() -> None:
    tree = TokenTree()
    attach(tree, "ab")
    attach(tree, "abcd")
    assert show(tree) == "ab cd"


def test_prompts_that_diverge_share_their_prefix_only() -> None:
    tree = TokenTree()
    attach(tree, "abcd")
    attach(tree, "abxy")
    assert show(tree) == "ab\n  cd\n  xy"


def test_handle_names_the_same_path_after_a_split_above_it() -> None:
    tree = TokenTree()
    long = attach(tree, "abcd")
    output = sample(tree, long, "pq", "c0")
    attach(tree, "axx")
    assert word(tree.path_ids(long)) == "abcd"
    assert word(tree.path_ids(output)) == "abcdpq"
    attach(tree, "ef", output)
    assert show(tree) == "a\n  bcd [pq] ef\n  xx"


def test_equal_samples_are_never_merged() -> None:
    tree = TokenTree()
    prompt = attach(tree, "a")
    sample(tree, prompt, "xy", "c0")
    sample(tree, prompt, "xy", "c1")
    assert show(tree) == "a\n  [xy]\n  [xy]"


def test_prompt_is_matched_below_every_equal_sample() -> None:
    tree = TokenTree()
    prompt = attach(tree, "a")
    sample(tree, prompt, "xy", "c0")
    second = sample(tree, prompt, "xy", "c1")
    attach(tree, "zz", second)
    attach(tree, "axyzw")
    assert show(tree) == "a\n  [xy]\n  [xy] z\n    z\n    w"


def test_prompt_that_repeats_a_part_of_a_sample_splits_it_with_its_spans_and_logprobs() -> None:
    tree = TokenTree()
    prompt = attach(tree, "a")
    spans = [VersionSpan(version=1, start=0, end=3), VersionSpan(version=2, start=3, end=5)]
    logprobs = np.array([-1, -2, -3, -4, -5], np.float32)
    output = tree.add_output(prompt, ids("vwxyz"), logprobs, spans, call_id="c0", role=Role.MAIN)
    attach(tree, "avwxyQ")
    frozen, names = tree.freeze("r")
    frozen.validate()
    assert golden(frozen, word) == "a [vwxy]\n  [z]\n  Q"
    upper, lower = frozen.nodes[1], frozen.nodes[names[output.serial]]
    assert [(s.version, s.start, s.end) for s in upper.spans] == [(1, 0, 3), (2, 3, 4)]
    assert [(s.version, s.start, s.end) for s in lower.spans] == [(2, 0, 1)]
    assert frozen.path_logprobs(lower.node_id).tolist() == [0, -1, -2, -3, -4, -5]
    assert upper.call_id == lower.call_id == "c0"


def test_prompt_that_ends_inside_a_node_gives_the_inner_end() -> None:
    tree = TokenTree()
    attach(tree, "abcd")
    inner = attach(tree, "ab")
    sample(tree, inner, "x", "c0")
    assert show(tree) == "ab\n  cd\n  [x]"


def test_nothing_to_add_gives_the_anchor() -> None:
    tree = TokenTree()
    anchor = attach(tree, "ab")
    assert tree.attach(anchor, ids(""), Role.MAIN) is anchor


def test_recorded_arrays_cannot_be_changed_from_outside() -> None:
    tree = TokenTree()
    source = ids("abc")
    node = tree.attach(tree.root, source, Role.MAIN)
    source[0] = 0
    assert word(tree.path_ids(node)) == "abc"
    with pytest.raises(ValueError, match="read-only"):
        node.token_ids[0] = 1


@pytest.mark.parametrize(("text", "num_logprobs"), [("", 0), ("ab", 1)])
def test_output_without_tokens_or_with_unequal_logprobs_is_refused(text: str, num_logprobs: int) -> None:
    tree = TokenTree()
    with pytest.raises(ValueError, match="c0"):
        tree.add_output(tree.root, ids(text), np.zeros(num_logprobs, np.float32), [], call_id="c0", role=Role.MAIN)


def test_tail_has_whole_nodes_and_at_least_the_tokens_asked_for() -> None:
    tree = TokenTree()
    node = sample(tree, attach(tree, "abc"), "de", "c0")
    assert word(tree.tail_ids(node, 1)) == "de"
    assert word(tree.tail_ids(node, 3)) == "abcde"
    assert word(tree.tail_ids(node, 99)) == "abcde"


@settings(max_examples=60)
@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=30))
def test_prompt_only_tree_is_the_trie_of_its_prompts(prompts: list[str]) -> None:
    tree = TokenTree()
    handles = [(prompt, attach(tree, prompt)) for prompt in prompts]
    for prompt, handle in handles:
        assert word(tree.path_ids(handle)) == prompt and handle.end == len(prompt)
    frozen, names = tree.freeze("r")
    frozen.validate()
    prefixes = {prompt[:size] for prompt in prompts for size in range(1, len(prompt) + 1)}
    assert frozen.unique_tokens == len(prefixes)
    for prompt, handle in handles:
        assert word(frozen.path_tokens(names[handle.serial])) == prompt


@settings(max_examples=60)
@given(st.data())
def test_any_mix_of_prompts_and_samples_keeps_paths_and_counts(data: st.DataObject) -> None:
    """Random growth: each path reads as it was made, each sampled token is there once, prompts share what exists."""
    tree = TokenTree()
    made = [(tree.root, "")]
    sampled = 0
    words = st.text("ab", min_size=1, max_size=5)
    for number in range(data.draw(st.integers(1, 25))):
        handle, path = data.draw(st.sampled_from(made))
        text = data.draw(words)
        if data.draw(st.booleans()):
            anew = data.draw(st.booleans())
            node = attach(tree, path + text) if anew else attach(tree, text, handle)
        else:
            node = sample(tree, handle, text, f"c{number}")
            sampled += len(text)
        made.append((node, path + text))
    frozen, names = tree.freeze("r")
    frozen.validate()
    assert frozen.sampled_tokens == sampled
    for handle, path in made[1:]:
        assert word(frozen.path_tokens(names[handle.serial])) == path
        assert len(frozen.path_sampled(names[handle.serial])) == len(path)
    for siblings in frozen.children():
        prompts = [frozen.nodes[i].token_ids[0] for i in siblings if not frozen.nodes[i].call_id]
        assert len(prompts) == len(set(prompts)), "two prompt nodes below one parent begin alike"
