"""`gyre bench switch`: its model, its calls and its table; the whole measurement with the slow tests."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from gyre_core.bench.switch import PUBLISHED, bench_switch, switch_lines
from gyre_core.bench.switch_cells import CONTEXT_LENGTH, prompts, read_call, training_batch, write_model
from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import Role, VersionSpan


def node(parent: int, ids: list[int], spans: tuple[VersionSpan, ...] = ()) -> TreeNode:
    sampled = bool(spans)
    return TreeNode(
        node_id=parent + 1,
        parent_id=parent,
        token_ids=np.array(ids, np.int32),
        sampled=np.full(len(ids), sampled),
        logprobs=np.zeros(len(ids), np.float32),
        spans=spans,
        call_id="c0" if sampled else "",
        role=Role.MAIN,
    )


def test_read_call_gives_prompt_output_and_the_versions_in_order() -> None:
    spans = (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    tree = TrajectoryTree(rollout_id="r", nodes=(node(NO_PARENT, [1, 2, 3, 4]), node(0, [7, 8, 9], spans)))
    call = read_call(Trajectory(rollout_id="r", tree=tree, calls=(), counters={}), 1.5)
    assert call.output_ids == (7, 8, 9)
    assert call.versions == (3, 4)
    assert call.prompt_tokens == 4
    assert call.seconds == 1.5


def test_prompts_share_no_page_with_each_other() -> None:
    texts = [*prompts("move-0", 4, 2000), *prompts("wait-0", 4, 2000)]
    assert len({text[:8] for text in texts}) == 8
    assert all(len(text) > 1500 for text in texts)


def test_model_never_prefers_the_end_of_its_turn(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    stop = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    assert stop is not None
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert head[stop].abs().max() == 0
    assert head[: stop // 2].abs().min(dim=0).values.max() > 0
    assert head[:100].std() > 0.1  # logits that differ


def test_training_batch_is_one_group_within_the_context() -> None:
    batch = training_batch(3)
    assert len({branch.group_id for branch in batch}) == 1
    assert len(batch) == 8
    assert max(len(branch.token_ids) for branch in batch) <= CONTEXT_LENGTH


def test_switch_lines_name_directions_phases_and_the_published_means() -> None:
    result = {
        "calls": 8,
        "calls_moved": 4,
        "calls_lost": 0,
        "rollout_to_train_s": 0.5,
        "train_to_rollout_s": 0.25,
        "phases": {"rollout_to_train": {"calls": 0.4}, "train_to_rollout": {"return": 0.2}},
        "tokens_recomputed": {"with_kv_store": 8.5, "without_kv_store": 700.0},
        "moved_context_tokens": 708.0,
        "page_tokens": 16,
        "engine_cost": {"with_kv_store": {"cpu_s_per_1k_tokens": 4.2, "memory_mb": 900}},
    }
    text = "\n".join(switch_lines(result))
    assert "8 live calls, 4 moved, 0 lost" in text
    assert "0.500 s   (published 8.52 s)" in text
    assert "0.250 s   (published 3.46 s)" in text
    assert "of 708 tokens: 8.5 with the KV store (a page has 16), 700.0 without" in text
    assert "engine with kv store: 4.20 processor seconds for 1,000 sampled tokens, 900 MB" in text


@pytest.mark.parametrize(("calls", "rounds", "max_tokens"), [(1, 1, 64), (2, 0, 64), (2, 1, 31)])
def test_bench_switch_refuses_sizes_that_measure_nothing(calls: int, rounds: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least two calls, one round and 32 tokens"):
        bench_switch(calls=calls, rounds=rounds, max_tokens=max_tokens)


@pytest.mark.slow
@pytest.mark.integration
def test_bench_switch_loses_no_call_and_recomputes_at_most_a_page_each() -> None:
    result = bench_switch(calls=4, rounds=2, max_tokens=300)
    assert result["calls"] == 2 * 2 * 2 * 4  # scenarios, rounds, kinds of calls, calls
    assert result["calls_lost"] == 0
    assert result["calls_moved"] > 0
    assert set(PUBLISHED) <= set(result)
    assert result["tokens_recomputed"]["with_kv_store"] <= result["page_tokens"]
    assert result["tokens_recomputed"]["without_kv_store"] > 400  # the whole context
    assert list(result["phases"]["rollout_to_train"])[:2] == ["drain", "calls"]
