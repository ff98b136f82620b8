from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.selection.branches import count_targets, select_branches
from gyre_core.trajectory.tree import TrajectoryTree
from gyre_core.types import Role
from tests.support.random_trees import make_tree, rng, target_tokens, trees

MAIN, SUMMARY, SUB, SUB_SUMMARY, AUX = Role
ORDER = (MAIN, SUMMARY, SUB, SUB_SUMMARY)


def trained(tree: TrajectoryTree, selected) -> list[list[int]]:
    """Token ids that each selected branch trains."""
    return [tree.path_tokens(branch.leaf)[branch.target].tolist() for branch in selected]


# <0 1> [2 3] <4> [5]        the main branch goes on after a turn
#       [6 7 8]              a second sample of the first turn
TWO_BRANCHES = make_tree(
    [(-1, 2, False, MAIN), (0, 2, True, MAIN), (1, 1, False, MAIN), (2, 1, True, MAIN), (0, 3, True, MAIN)]
)


def test_selection_of_all_branches_masks_shared_targets_once():
    selected = select_branches(TWO_BRANCHES, max_branches=0, role_order=ORDER, rng=rng())
    assert sorted(trained(TWO_BRANCHES, selected)) == [[2, 3, 5], [6, 7, 8]]
    by_leaf = {branch.leaf: branch for branch in selected}
    assert by_leaf[3].node_ids == (0, 1, 2, 3) and by_leaf[3].target.tolist() == [False, False, True, True, False, True]
    assert by_leaf[4].node_ids == (0, 4) and by_leaf[4].target.tolist() == [False, False, True, True, True]


def test_selection_with_a_shared_prefix_gives_its_targets_to_the_first_branch():
    # <0> [1] <2> [3]  and after the same [1]:  <4> [5 6]
    shapes = [
        (-1, 1, False, MAIN),
        (0, 1, True, MAIN),
        (1, 1, False, MAIN),
        (2, 1, True, MAIN),
        (1, 1, False, MAIN),
        (4, 2, True, MAIN),
    ]
    tree = make_tree(shapes)
    first, second = select_branches(tree, max_branches=2, role_order=ORDER, rng=rng(3))
    assert [1 in tokens for tokens in trained(tree, (first, second))] == [True, False]
    assert sorted(token for tokens in trained(tree, (first, second)) for token in tokens) == [1, 3, 5, 6]


def test_selection_stops_at_the_cap():
    assert len(select_branches(TWO_BRANCHES, max_branches=1, role_order=ORDER, rng=rng())) == 1


def test_selection_draws_in_proportion_to_targets_left():
    # leaf 3 has 3 targets on its path, leaf 4 has 3: equal; with one more sampled token 3 of 7 against 4 of 7
    tree = make_tree(
        [(-1, 2, False, MAIN), (0, 2, True, MAIN), (1, 1, False, MAIN), (2, 1, True, MAIN), (0, 4, True, MAIN)]
    )
    draws = Counter(
        select_branches(tree, max_branches=1, role_order=ORDER, rng=rng(seed))[0].leaf for seed in range(2000)
    )
    assert abs(draws[3] / 2000 - 3 / 7) < 0.04


def test_selection_takes_roles_in_order():
    shapes = [
        (-1, 1, False, SUB),
        (0, 50, True, SUB),
        (-1, 1, False, MAIN),
        (2, 1, True, MAIN),
        (3, 1, False, SUMMARY),
        (4, 9, True, SUMMARY),
        (-1, 1, False, SUB_SUMMARY),
        (6, 9, True, SUB_SUMMARY),
        (-1, 1, False, MAIN),
        (8, 1, True, MAIN),
    ]
    tree = make_tree(shapes)
    selected = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng())
    assert [branch.role for branch in selected] == [MAIN, SUMMARY, SUB, SUB_SUMMARY]
    assert [branch.leaf for branch in selected] == [9, 5, 1, 7]
    assert trained(tree, selected)[1] == [52, *range(54, 63)], "the main turn before the summary is its prefix"
    reverse = select_branches(tree, max_branches=0, role_order=ORDER[::-1], rng=rng())
    assert [branch.leaf for branch in reverse] == [7, 1, 5, 9]


def test_selection_never_trains_aux_nor_roles_left_out():
    # main turn [1], below it only an aux call [3 4]; the branch ends at the main turn
    tree = make_tree(
        [
            (-1, 1, False, MAIN),
            (0, 1, True, MAIN),
            (1, 1, False, AUX),
            (2, 2, True, AUX),
            (-1, 3, False, SUB),
            (4, 2, True, SUB),
        ]
    )
    (branch,) = select_branches(tree, max_branches=0, role_order=(MAIN,), rng=rng())
    assert (branch.leaf, branch.node_ids, branch.target.tolist()) == (1, (0, 1), [False, True])
    assert count_targets(tree, (MAIN,)) == 1


def test_selection_aux_output_inside_a_main_branch_is_context():
    tree = make_tree([(-1, 1, False, AUX), (0, 2, True, AUX), (1, 1, False, MAIN), (2, 2, True, MAIN)])
    (branch,) = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng())
    assert branch.target.tolist() == [False, False, False, False, True, True]


def test_selection_first_token_of_a_path_is_no_target():
    tree = make_tree([(-1, 3, True, MAIN), (-1, 1, True, MAIN)])
    (branch,) = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng())
    assert (branch.leaf, branch.target.tolist()) == (0, [False, True, True])


@pytest.mark.parametrize("shapes", [[], [(-1, 4, False, MAIN)], [(-1, 4, False, AUX), (0, 2, True, AUX)]])
def test_selection_of_a_tree_without_targets_is_empty(shapes):
    assert select_branches(make_tree(shapes), max_branches=5, role_order=ORDER, rng=rng()) == ()


@pytest.mark.parametrize(("cap", "order"), [(-1, ORDER), (5, (MAIN, AUX)), (5, (MAIN, MAIN))])
def test_selection_with_bad_arguments_raises(cap: int, order: tuple[Role, ...]):
    with pytest.raises(ValueError, match="must"):
        select_branches(TWO_BRANCHES, max_branches=cap, role_order=order, rng=rng())


role_orders = st.permutations(ORDER).flatmap(lambda order: st.integers(1, 4).map(lambda num: tuple(order[:num])))


@settings(max_examples=100)
@given(trees(), st.integers(0, 6), role_orders, st.integers(0, 2**32))
def test_selection_invariants(tree: TrajectoryTree, cap: int, order: tuple[Role, ...], seed: int):
    selected = select_branches(tree, max_branches=cap, role_order=order, rng=rng(seed))
    everything = target_tokens(tree, order)
    taken = [token for tokens in trained(tree, selected) for token in tokens]
    assert len(taken) == len(set(taken)), "each target at most once"
    assert set(taken) <= everything
    assert count_targets(tree, order) == len(everything)
    assert cap == 0 or len(selected) <= cap
    if cap == 0 or len(selected) < cap:
        assert set(taken) == everything, "without a cap every target"
    for branch in selected:
        assert list(branch.node_ids) == tree.path(branch.leaf)
        assert branch.role in order and branch.target.any() and not branch.target[0]
        assert branch.target[-len(tree.nodes[branch.leaf].token_ids) :].any(), "it ends where something is trained"
    again = select_branches(tree, max_branches=cap, role_order=order, rng=rng(seed))
    assert [(b.leaf, b.target.tobytes()) for b in again] == [(b.leaf, b.target.tobytes()) for b in selected]


@settings(max_examples=50)
@given(trees(), role_orders, st.integers(0, 2**32))
def test_selection_with_a_smaller_cap_is_a_prefix(tree: TrajectoryTree, order: tuple[Role, ...], seed: int):
    full = select_branches(tree, max_branches=0, role_order=order, rng=rng(seed))
    for cap in range(1, len(full)):
        capped = select_branches(tree, max_branches=cap, role_order=order, rng=rng(seed))
        assert [branch.leaf for branch in capped] == [branch.leaf for branch in full[:cap]]


@settings(max_examples=50)
@given(trees(), role_orders, st.integers(0, 2**32))
def test_selection_takes_a_role_up_before_the_next(tree: TrajectoryTree, order: tuple[Role, ...], seed: int):
    selected = select_branches(tree, max_branches=0, role_order=order, rng=rng(seed))
    left = target_tokens(tree, order)
    # Leaves by definition: nodes with targets and no node with targets below them.
    with_targets = {node.node_id for node in tree.nodes if left & set(node.token_ids.tolist())}
    leaves = {n for n in with_targets if not any(n != other and n in tree.path(other) for other in with_targets)}
    assert {branch.leaf for branch in selected} == leaves
    for branch in selected:
        ranks = [order.index(tree.nodes[leaf].role) for leaf in leaves if left & set(tree.path_tokens(leaf).tolist())]
        assert order.index(branch.role) == min(ranks)
        left -= set(tree.path_tokens(branch.leaf)[branch.target].tolist())


def test_selection_of_a_long_rollout_is_quick():
    shapes = [(-1, 500, False, MAIN)]
    for turn in range(500):
        shapes += [(len(shapes) - 1, 40, False, MAIN), (len(shapes), 20, True, MAIN)]
        if turn % 5 == 0:
            shapes += [(len(shapes) - 3, 5, True, SUB)]
            shapes += [(len(shapes) - 2, 1, False, MAIN)]
    tree = make_tree(shapes)
    selected = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng())
    assert len(selected) == 101
    assert sum(int(branch.target.sum()) for branch in selected) == 500 * 20 + 100 * 5
    assert np.all(np.diff([ORDER.index(branch.role) for branch in selected]) >= 0)
