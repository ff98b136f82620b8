"""Weights from the trees to the packed micro-steps: what a rollout counts for depends on nothing but itself.

Token ids are unique within a tree of `make_tree`, so a row is recognised by its token; trees share ids with each other,
so that packing shares prefixes across rollouts.
"""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.config.models import SelectionConfig
from gyre_core.selection.batch import GroupBranches, build_branches
from gyre_core.train.packing import PackedMicroStep, pack_branches
from gyre_core.trajectory.tree import Trajectory
from tests.support.random_trees import target_tokens, trees
from tests.support.rollouts import Finished, finished

ORDER = SelectionConfig().role_order
Rows = dict[str, dict[int, float]]  # of each rollout: the weight of each trained token

groups = st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), trees(max_nodes=8)), min_size=1, max_size=4).map(
    lambda parts: [_member(f"r{index}", reward, tree) for index, (reward, tree) in enumerate(parts)]
)
caps = st.integers(0, 4)
budgets = st.integers(32, 200)  # no path of eight nodes is longer than 32


def _member(rollout_id: str, reward: float | None, tree) -> Finished:
    tree = dataclasses.replace(tree, rollout_id=rollout_id)
    return finished(rollout_id, reward=reward, trajectory=Trajectory(rollout_id=rollout_id, tree=tree, calls=()))


def build(members: list[Finished], cap: int) -> GroupBranches:
    return build_branches(
        members,
        selection=SelectionConfig(max_branches=cap, min_group=1),
        run_seed=5,
        trainer_version=0,
        max_staleness=0,
        temperature=1.0,
    )


def rows_of(steps: list[PackedMicroStep]) -> Rows:
    found: Rows = defaultdict(dict)
    for step in steps:
        for child, branch, weight in zip(step.rows.child, step.rows.branch, step.rows.weight, strict=True):
            rollout, token = found[step.branches[branch].rollout_id], int(step.token_ids[child])
            assert token not in rollout, "each target is trained at most once"
            rollout[token] = float(weight)
    return found


@settings(max_examples=60)
@given(groups, caps, budgets, st.booleans(), st.randoms(use_true_random=False))
def test_weights_of_a_rollout_sum_to_its_share_whatever_branches_packing_and_order(
    members: list[Finished], cap: int, budget: int, share: bool, random
):
    branches = list(build(members, cap).branches)
    random.shuffle(branches)
    rows = rows_of(pack_branches(branches, budget, share_prefixes=share))
    for member in members:
        trained = rows.get(member.spec.rollout_id, {})
        targets = target_tokens(member.trajectory.tree, ORDER)
        if member.grade.included and targets:
            assert sum(trained.values()) == pytest.approx(1.0, abs=1e-6)
            assert len(set(trained.values())) == 1, "every target of a rollout weighs the same"
            assert trained.keys() <= targets
        else:
            assert not trained


@settings(max_examples=40)
@given(groups, budgets, budgets, st.sampled_from(["branch", "rollout"]))
def test_weights_do_not_depend_on_the_packing(members: list[Finished], first: int, second: int, unit):
    branches = build(members, 3).branches
    reference = rows_of(pack_branches(branches, 10_000))
    assert rows_of(pack_branches(branches, first)) == reference
    assert rows_of(pack_branches(branches, second, share_prefixes=False)) == reference
    assert rows_of(pack_branches(branches, 10_000, unit=unit)) == reference


@settings(max_examples=40)
@given(groups, caps, st.integers(1, 3), trees(max_nodes=6))
def test_weights_excluded_members_change_nothing(members: list[Finished], cap: int, num_more: int, tree):
    excluded = [_member(f"x{index}", None, tree) for index in range(num_more)]
    alone, among = build(members, cap), build([*excluded, *members], cap)
    assert among.advantages == alone.advantages
    assert rows_of(pack_branches(among.branches, 10_000)) == rows_of(pack_branches(alone.branches, 10_000))


@settings(max_examples=60)
@given(groups, budgets)
def test_weights_uncapped_equal_the_full_tree(members: list[Finished], budget: int):
    rows = rows_of(pack_branches(build(members, 0).branches, budget))
    for member in members:
        if not member.grade.included:
            continue
        targets = target_tokens(member.trajectory.tree, ORDER)
        trained = rows.get(member.spec.rollout_id, {})
        assert trained.keys() == targets
        # The mean of anything over the tree's targets, here of their ids.
        if targets:
            mean = sum(weight * token for token, weight in trained.items())
            assert mean == pytest.approx(np.mean(sorted(targets)), rel=1e-5, abs=1e-6)


@settings(max_examples=40)
@given(groups, st.integers(1, 4))
def test_weights_with_a_cap_are_those_of_its_own_targets_only(members: list[Finished], cap: int):
    capped = rows_of(pack_branches(build(members, cap).branches, 10_000))
    full = rows_of(pack_branches(build(members, 0).branches, 10_000))
    assert capped.keys() == full.keys()
    for rollout_id, trained in capped.items():
        assert trained.keys() <= full[rollout_id].keys()
        assert list(trained.values()) == pytest.approx([1 / len(trained)] * len(trained), rel=1e-6)
