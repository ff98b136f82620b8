import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.config.models import SelectionConfig
from gyre_core.selection.batch import build_branches, selection_rng, training_branches
from gyre_core.selection.branches import select_branches
from gyre_core.selection.staleness import stale_reason, staleness
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import Role
from tests.support.random_trees import make_tree, rng, trees
from tests.support.rollouts import Finished, assert_same_branch, finished

MAIN, SUB = Role.MAIN, Role.SUB_AGENT
ORDER = SelectionConfig().role_order


def member(rollout_id: str, reward: float | None, tree: TrajectoryTree | None = None, **spec) -> Finished:
    tree = dataclasses.replace(tree, rollout_id=rollout_id) if tree is not None else None
    trajectory = Trajectory(rollout_id=rollout_id, tree=tree, calls=()) if tree is not None else None
    made = finished(rollout_id, reward=reward, trajectory=trajectory)
    return dataclasses.replace(made, spec=dataclasses.replace(made.spec, **spec))


def build(members, *, selection: SelectionConfig | None = None, trainer_version: int = 0, max_staleness: int = 0):
    return build_branches(
        members,
        selection=selection or SelectionConfig(advantage_eps=0.0),
        run_seed=5,
        trainer_version=trainer_version,
        max_staleness=max_staleness,
        temperature=0.5,
    )


def test_batch_by_hand():
    # two_turns: 1 2 3 [10 11] 4 [12] and 1 2 3 [20]: four targets, so each weighs a quarter
    group = build([member("b", 0.0), member("a", 1.0)])
    assert group.group_id == "s0000-p07" and group.dropped_reason is None
    assert group.advantages == {"a": 1.0, "b": -1.0} and group.num_included == 2
    assert [(branch.rollout_id, branch.branch) for branch in group.branches] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    by_length = {len(branch.token_ids): branch for branch in group.branches if branch.rollout_id == "a"}
    long, short = by_length[7], by_length[4]
    assert long.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 12] and short.token_ids.tolist() == [1, 2, 3, 20]
    assert long.weights.tolist() == [0, 0, 0, 0.25, 0.25, 0, 0.25] and short.weights.tolist() == [0, 0, 0, 0.25]
    np.testing.assert_array_equal(long.sampler_logprobs, np.array([0, 0, 0, -0.1, -0.2, 0, -0.3], np.float32))
    assert (long.advantage, long.temperature, long.role, long.min_version) == (1.0, 0.5, MAIN, 0)
    assert (long.token_ids.dtype, long.weights.dtype, long.sampler_logprobs.dtype) == (np.int32, np.float32, np.float32)
    assert group.counters == {
        "rollouts_included": 2,
        "rollouts_left_out": 0,
        "groups_dropped": 0,
        "branches_selected": 4,
        "targets_selected": 8,
    }


def test_batch_min_version_is_of_the_branchs_own_targets():
    # <0> [1] v2 <2> [3] v5, and below the same [1]: <4> [5] v4
    shapes = [
        (-1, 1, False, MAIN),
        (0, 1, True, MAIN),
        (1, 1, False, MAIN),
        (2, 1, True, MAIN),
        (1, 1, False, SUB),
        (4, 1, True, SUB),
    ]
    tree = make_tree(shapes, versions=[0, 2, 0, 5, 0, 4])
    selected = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng())
    first, second = training_branches(member("r1", 1.0).spec, tree, selected, advantage=1.0, temperature=1.0)
    assert (first.min_version, second.min_version) == (2, 4)
    assert second.sampler_logprobs.tolist() == [0, 0, 0, -1.5], "the shared turn is context here"


def test_batch_excluded_members_have_their_reason():
    group = build([member("a", 1.0), member("b", 0.0), member("c", None)])
    assert group.left_out == {"c": "verifier_failed: no reward file"}
    assert {branch.rollout_id for branch in group.branches} == {"a", "b"}
    assert group.counters["rollouts_left_out"] == 1


def test_batch_group_below_its_minimum_is_dropped():
    group = build([member("a", 1.0), member("b", None)])
    assert group.branches == () and group.advantages == {} and group.num_included == 0
    assert group.dropped_reason == "1 of 2 members are included, 2 are needed (selection.min_group)"
    assert group.counters["groups_dropped"] == 1


def test_batch_stale_members_are_left_out():
    members = [
        member("a", 1.0, dispatch_version=4),
        member("b", 0.0, dispatch_version=3),
        member("c", 0.5, dispatch_version=1),
    ]
    group = build(members, trainer_version=5, max_staleness=2)
    assert group.left_out == {"c": "staleness 4 exceeds 2 (dispatched with version 1, now 5)"}
    assert group.advantages == {"a": 1.0, "b": -1.0}, "its reward does not shift the mean"


def test_batch_member_without_calls_counts_and_has_no_branches():
    group = build([member("a", 1.0), member("b", 0.0, make_tree([]))])
    assert group.num_included == 2 and {branch.rollout_id for branch in group.branches} == {"a"}


@pytest.mark.parametrize("members", [[], ["a", "a"]])
def test_batch_of_nobody_or_of_duplicates_raises(members: list[str]):
    with pytest.raises(ValueError, match="members of one group"):
        build([member(name, 1.0) for name in members])


def test_batch_of_several_groups_raises():
    with pytest.raises(ValueError, match="members of one group"):
        build([member("a", 1.0), member("b", 1.0, group_id="other")])


members_lists = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 1)), trees(max_nodes=8)), min_size=1, max_size=5
).map(lambda parts: [member(f"r{index}", reward, tree) for index, (reward, tree) in enumerate(parts)])


@settings(max_examples=50)
@given(members_lists, st.integers(0, 4), st.randoms(use_true_random=False))
def test_batch_invariants(members: list[Finished], cap: int, random):
    selection = SelectionConfig(max_branches=cap, min_group=1)
    group = build(members, selection=selection)
    for rollout_id in group.advantages:
        branches = [branch for branch in group.branches if branch.rollout_id == rollout_id]
        if branches:
            assert sum(branch.weights.sum(dtype=np.float64) for branch in branches) == pytest.approx(1, abs=1e-6)
        for branch in branches:
            assert np.array_equal(branch.weights > 0, branch.target) and not branch.target[0]
            assert np.array_equal(branch.sampler_logprobs != 0, branch.target)
            assert len(branch.token_ids) == len(branch.target) == len(branch.weights) == len(branch.sampler_logprobs)
    shuffled = list(members)
    random.shuffle(shuffled)
    included = [item for item in shuffled if item.grade.included]
    for other in (shuffled, included):  # neither order nor excluded members matter
        if not other:
            continue
        again = build(other, selection=selection)
        assert again.advantages == group.advantages
        for left, right in zip(group.branches, again.branches, strict=True):
            assert_same_branch(left, right)


def test_selection_rng_depends_on_run_step_and_rollout_only():
    draws = {key: selection_rng(*key).integers(2**62) for key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]}
    assert len(set(draws.values())) == 4
    assert selection_rng(0, 0, "a").integers(2**62) == draws[0, 0, "a"]


def test_staleness_counts_optimizer_steps_since_dispatch():
    assert staleness(trainer_version=7, dispatch_version=4) == 3
    assert stale_reason(trainer_version=7, dispatch_version=4, max_staleness=3) is None
    assert stale_reason(trainer_version=7, dispatch_version=4, max_staleness=2) is not None
    with pytest.raises(ValueError, match="trainer is at 3"):
        staleness(trainer_version=3, dispatch_version=4)
