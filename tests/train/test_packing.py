from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.train.packing import PackedMicroStep, pack_branches
from gyre_core.types import TrainingBranch
from tests.support.training import make_branch, random_branches


def by_key(branches: list[TrainingBranch]) -> dict[tuple[str, int], TrainingBranch]:
    return {(branch.rollout_id, branch.branch): branch for branch in branches}


def check_invariants(
    branches: list[TrainingBranch], steps: list[PackedMicroStep], budget: int, share: bool = True
) -> None:
    """What must hold for any packing: exact paths, each target once, the budget, chains and ancestors."""
    wanted = by_key([branch for branch in branches if branch.target.any()])
    seen: Counter[tuple[str, int, int]] = Counter()
    packed_keys = []
    for step in steps:
        assert step.num_tokens <= budget
        assert np.all(step.parent < np.arange(step.num_tokens))
        roots = step.parent < 0
        assert np.array_equal(step.position[roots], np.zeros(roots.sum()))
        assert np.array_equal(step.position[~roots], step.position[step.parent[~roots]] + 1)
        edges = list(zip(step.parent.tolist(), step.token_ids.tolist(), strict=True))
        assert not share or len(edges) == len(set(edges)), "two children of one token hold the same id"
        assert step.segment_start[0] == 0
        assert step.segment_end[-1] == step.num_tokens
        assert np.array_equal(step.segment_start[1:], step.segment_end[:-1])
        children = np.bincount(step.parent[~roots], minlength=step.num_tokens)
        for start, end in zip(step.segment_start, step.segment_end, strict=True):
            assert np.array_equal(step.parent[start + 1 : end], np.arange(start, end - 1))
            assert np.all(children[start : end - 1] == 1), "a segment forks inside"
            above, walked = int(step.parent[start]), []
            while above >= 0:
                walked.append(above)
                above = int(step.parent[above])
            assert step.path(int(start)).tolist() == [*walked[::-1], start]
        for index, key in enumerate(step.branches):
            branch = wanted[key.rollout_id, key.branch]
            packed_keys.append((key.rollout_id, key.branch))
            path = step.path(int(step.branch_leaf[index]))
            assert np.array_equal(step.token_ids[path], branch.token_ids)
            rows = step.rows.branch == index
            positions = step.position[step.rows.child[rows]]
            assert np.array_equal(path[positions], step.rows.child[rows]), "a row lies off its branch's path"
            seen.update((key.rollout_id, key.branch, int(p)) for p in positions)
            assert np.array_equal(step.rows.sampler_logprob[rows], branch.sampler_logprobs[positions])
            assert np.array_equal(step.rows.weight[rows], branch.weights[positions])
            assert np.all(step.rows.advantage[rows] == np.float32(branch.advantage))
            assert np.all(step.rows.temperature[rows] == np.float32(branch.temperature))
    assert sorted(packed_keys) == sorted(wanted)
    targets = {(r, b, int(p)) for (r, b), branch in wanted.items() for p in np.flatnonzero(branch.target)}
    assert seen == Counter(targets), "every target is exactly one row"


@st.composite
def branch_lists(draw: st.DrawFn) -> list[TrainingBranch]:
    """Few token values, so that prefixes collide within and across rollouts and groups; duplicates and extensions."""
    ids = st.lists(st.integers(0, 2), min_size=2, max_size=9)
    made, count = [], draw(st.integers(1, 9))
    for index in range(count):
        tokens = draw(ids)
        if made and draw(st.booleans()):
            earlier = made[draw(st.integers(0, len(made) - 1))].token_ids.tolist()
            tokens = (earlier[: draw(st.integers(0, len(earlier)))] + tokens)[:18]  # the smallest budget
        target = draw(st.sets(st.integers(1, len(tokens) - 1), max_size=4))
        rollout = draw(st.integers(0, 3))
        made.append(
            make_branch(
                tokens,
                sorted(target),
                rollout_id=f"r{rollout}",
                group_id=f"g{rollout // 2}",
                branch=index,
                advantage=draw(st.sampled_from([-1.0, 0.0, 0.5])),
                sampler=-draw(st.floats(0.0, 3.0)),
            )
        )
    return made


def same_step(first: PackedMicroStep, second: PackedMicroStep) -> bool:
    arrays = ("token_ids", "position", "parent", "segment_start", "segment_end", "segment_parent", "branch_leaf")
    rows = ("child", "branch", "unit", "sampler_logprob", "weight", "advantage", "temperature")
    return (
        first.branches == second.branches
        and all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays)
        and all(np.array_equal(getattr(first.rows, name), getattr(second.rows, name)) for name in rows)
    )


def test_pack_branches_two_rollouts_of_a_group_gives_the_trie_by_hand() -> None:
    branches = [
        make_branch([7, 8, 5, 6], [2, 3], rollout_id="r0", advantage=1.0),
        make_branch([7, 8, 5, 9, 4], [2, 3, 4], rollout_id="r1", advantage=-1.0),
    ]
    (step,) = pack_branches(branches, 100)
    #                              7  8  5  6  9  4
    assert step.token_ids.tolist() == [7, 8, 5, 6, 9, 4]
    assert step.position.tolist() == [0, 1, 2, 3, 3, 4]
    assert step.parent.tolist() == [-1, 0, 1, 2, 2, 4]
    assert step.segment_start.tolist() == [0, 3, 4]
    assert step.segment_end.tolist() == [3, 4, 6]
    assert step.segment_parent.tolist() == [-1, 0, 0]
    assert step.path(4).tolist() == [0, 1, 2, 4]
    assert step.branch_leaf.tolist() == [3, 5]
    assert step.rows.child.tolist() == [2, 3, 2, 4, 5]  # both rollouts have a row on the edge 8 -> 5
    assert step.rows.branch.tolist() == [0, 0, 1, 1, 1]
    assert step.rows.unit.tolist() == [0, 0, 1, 1, 1]
    assert step.rows.advantage.tolist() == [1, 1, -1, -1, -1]
    assert step.num_branch_tokens == 9


def test_pack_branches_extension_of_a_shorter_branch_stays_one_chain() -> None:
    branches = [make_branch([1, 2], [1], branch=0), make_branch([1, 2, 3], [2], branch=1)]
    (step,) = pack_branches(branches, 10)
    assert step.segment_start.tolist() == [0]
    assert step.segment_end.tolist() == [3]
    assert step.branch_leaf.tolist() == [1, 2]


def test_pack_branches_without_sharing_gives_one_chain_each() -> None:
    branches = [make_branch([1, 2, 3], [1], branch=0), make_branch([1, 2, 4], [2], branch=1)]
    (step,) = pack_branches(branches, 10, share_prefixes=False)
    assert step.token_ids.tolist() == [1, 2, 3, 1, 2, 4]
    assert step.segment_parent.tolist() == [-1, -1]
    assert step.num_tokens == step.num_branch_tokens


@settings(max_examples=150)
@given(branch_lists(), st.integers(18, 60), st.booleans(), st.randoms())
def test_pack_branches_any_branches_keeps_every_invariant_in_any_order(branches, budget, share, random) -> None:
    steps = pack_branches(branches, budget, share_prefixes=share)
    check_invariants(branches, steps, budget, share)
    shuffled = list(branches)
    random.shuffle(shuffled)
    again = pack_branches(shuffled, budget, share_prefixes=share)
    assert len(again) == len(steps)
    assert all(same_step(a, b) for a, b in zip(steps, again, strict=True))


@settings(max_examples=60)
@given(branch_lists())
def test_pack_branches_rollout_unit_never_splits_a_rollout(branches) -> None:
    steps = pack_branches(branches, 200, unit="rollout")
    check_invariants(branches, steps, 200)
    budget = max((step.num_tokens for step in steps), default=1)
    where: dict[str, int] = {}
    for index, step in enumerate(pack_branches(branches, budget, unit="rollout")):
        for key in step.branches:
            assert where.setdefault(key.rollout_id, index) == index
        assert step.num_units == len(step.rollout_ids)
        units = {(step.branches[b].rollout_id, int(u)) for b, u in zip(step.rows.branch, step.rows.unit, strict=True)}
        assert len(units) == step.num_units


@pytest.mark.parametrize("budget", [60, 90, 150, 10_000])
def test_pack_branches_small_budgets_split_without_losing_targets(budget: int) -> None:
    branches = random_branches(3, num_groups=3, rollouts=4, branches=3)
    steps = pack_branches(branches, budget)
    check_invariants(branches, steps, budget)
    assert len(steps) == 1 if budget == 10_000 else len(steps) > 1


@pytest.mark.parametrize("seed", range(4))
def test_pack_branches_groups_of_all_sizes_leave_few_holes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    branches = []
    for group in range(40):
        size = int(rng.integers(20, 200))
        prompt = rng.integers(0, 1000, size).tolist()
        for rollout in range(4):
            ids = prompt + rng.integers(0, 1000, size // 2).tolist()
            branches.append(make_branch(ids, [size], rollout_id=f"g{group}-r{rollout}", group_id=f"g{group}"))
    steps = pack_branches(branches, 1024)
    tokens = sum(step.num_tokens for step in steps)
    assert len(steps) <= -(-tokens // 1024) + 1  # one more than if tokens could be cut anywhere
    assert tokens / (1024 * len(steps)) > 0.9


def test_pack_branches_small_blocks_fill_the_holes_of_large_ones() -> None:
    sizes = [30, 70, 40, 60, 50, 50]  # in this order, first come first served needs four micro-steps of 100
    branches = [
        make_branch([index * 100 + i for i in range(size)], [1], rollout_id=f"r{index}", group_id=f"g{index}")
        for index, size in enumerate(sizes)
    ]
    assert [step.num_tokens for step in pack_branches(branches, 100)] == [100, 100, 100]


def test_pack_branches_group_that_fits_is_not_split() -> None:
    branches = random_branches(1, num_groups=4, rollouts=3, branches=2)
    largest = max(pack_branches(branches[6 * g : 6 * g + 6], 10_000)[0].num_tokens for g in range(4))
    steps = pack_branches(branches, largest)
    for group in range(4):
        assert sum(any(key.group_id == f"g{group}" for key in step.branches) for step in steps) == 1


def test_pack_branches_leaves_out_what_trains_nothing() -> None:
    branches = [
        make_branch([1, 2, 3], [], branch=0),
        make_branch([1, 2, 4], [2], branch=1, advantage=0.0),
        make_branch([1, 2, 5], [2], branch=2),
    ]
    (step,) = pack_branches(branches, 10)
    assert [key.branch for key in step.branches] == [1, 2]
    (step,) = pack_branches(branches, 10, skip_zero_advantage=True)
    assert [key.branch for key in step.branches] == [2]
    assert pack_branches(branches[:1], 10) == []
    assert pack_branches([], 10) == []


def test_pack_branches_branch_over_budget_says_what_to_change() -> None:
    with pytest.raises(
        ValueError, match=r"branch 3 of rollout r9 has 12 tokens.*\(10\): raise train.micro_step_tokens"
    ):
        pack_branches([make_branch(list(range(12)), [11], rollout_id="r9", branch=3)], 10)


def test_pack_branches_rollout_unit_over_budget_says_what_to_change() -> None:
    branches = [make_branch([1, 2, 3, 4], [3], branch=0), make_branch([1, 5, 6, 7], [3], branch=1)]
    assert len(pack_branches(branches, 5)) == 2
    with pytest.raises(ValueError, match=r"rollout r0 has 7 unique tokens.*train.unit"):
        pack_branches(branches, 5, unit="rollout")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.array([True, True])}, "position 0"),
        ({"weights": np.zeros(3, np.float32)}, "3 entries for 2 tokens"),
        ({"sampler_logprobs": np.array([0, np.nan], np.float32)}, "non-finite"),
        ({"advantage": float("inf")}, "non-finite"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"token_ids": np.array([1, -2], np.int32)}, "negative token id"),
    ],
)
def test_pack_branches_malformed_branch_is_refused(change, message) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match=message):
        pack_branches([replace(make_branch([1, 2], [1]), **change)], 10)


def test_pack_branches_same_branch_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="branch 0 of rollout r0 was given twice"):
        pack_branches([make_branch([1, 2], [1]), make_branch([1, 3], [1])], 10)


def test_pack_branches_64_by_800_is_quick() -> None:
    import time

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 400).tolist()
    branches = [
        make_branch(prompt + rng.integers(0, 1000, 400).tolist(), range(400, 800), rollout_id=f"r{i}")
        for i in range(64)
    ]
    pack_branches(branches, 8192)
    started = time.process_time()
    pack_branches(branches, 8192)
    assert time.process_time() - started < 0.1
