"""The immutable tree: paths, leaves, checks, and how people see it."""

from dataclasses import replace

import numpy as np
import pytest

from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.text import golden, render_tree
from gyre_core.trajectory.tree import TrajectoryTree
from gyre_core.types import Role
from tests.support.trees import attach, sample, trajectory_of, word


def branching() -> TrajectoryTree:
    """ab [c] d [e], and from [c] also f [g] by a sub-agent."""
    tree = TokenTree()
    first = sample(tree, attach(tree, "ab"), "c", "c0", version=3)
    sample(tree, attach(tree, "d", first), "e", "c1", version=3)
    sample(tree, attach(tree, "f", first, Role.SUB_AGENT), "g", "c2", version=4, role=Role.SUB_AGENT)
    return tree.freeze("r")[0]


def test_paths_masks_and_leaves_of_a_branching_tree() -> None:
    tree = branching()
    assert golden(tree, word) == "ab [c]\n  d [e]\n  f [g]"
    assert tree.leaves() == [3, 5]
    assert tree.path(5) == [0, 1, 4, 5]
    assert word(tree.path_tokens(5)) == "abcfg"
    assert tree.path_sampled(5).tolist() == [False, False, True, False, True]
    assert tree.path_logprobs(5).tolist() == [0, 0, -1, 0, -1]
    assert (tree.unique_tokens, tree.sampled_tokens) == (7, 3)
    assert tree.children() == [[1], [2, 4], [3], [], [5], []]


def test_empty_tree_has_no_leaves() -> None:
    tree = TrajectoryTree(rollout_id="r", nodes=())
    tree.validate()
    assert tree.leaves() == [] and tree.unique_tokens == 0 and golden(tree, word) == ""


def test_unknown_node_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="no node 6"):
        branching().path(6)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (1, {"node_id": 5}),
        (1, {"parent_id": 1}),
        (1, {"parent_id": 3}),
        (1, {"logprobs": np.zeros(2, np.float32)}),
        (1, {"sampled": np.zeros(1, bool)}),
        (1, {"spans": ()}),
        (1, {"call_id": ""}),
        (0, {"logprobs": np.ones(2, np.float32)}),
        (0, {"token_ids": np.zeros(0, np.int32)}),
    ],
)
def test_broken_invariants_are_named(index: int, change: dict) -> None:
    tree = branching()
    nodes = list(tree.nodes)
    nodes[index] = replace(nodes[index], **change)
    with pytest.raises(ValueError, match=f"node {index} of r"):
        TrajectoryTree(rollout_id="r", nodes=tuple(nodes)).validate()


def test_rendered_tree_shows_roles_versions_and_branches() -> None:
    text = render_tree(trajectory_of(branching()), word, width=60)
    assert text.splitlines() == [
        "r: 3 calls (3 main), 2 branches, 7 tokens (3 sampled)",
        "0   2 tok  ab",
        "1 * main 1 tok v3  c",
        "├─2   1 tok  d",
        "│ 3 * main 1 tok v3  e",
        "└─4   1 tok  f",
        "  5 * sub-agent 1 tok v4  g",
    ]


def test_rendered_tree_is_bounded_in_width_and_tokens_and_marks_trained_ones() -> None:
    tree = TokenTree()
    sample(tree, attach(tree, "x" * 500), "line\nbreak\x1b[31m", "c0")
    text = render_tree(
        trajectory_of(tree.freeze("r")[0]), word, width=70, max_tokens=20, trained=lambda node: len(node.token_ids)
    )
    lines = text.splitlines()
    assert lines[1] == "0   500 tok  xxxxxxxxxx … xxxxxxxxxx"
    assert lines[2] == "1 * main 15 tok v0 trained 15  line\\nbreak�[31m"
    narrow = render_tree(trajectory_of(tree.freeze("r")[0]), word, width=20)
    assert all(len(line) <= 20 for line in narrow.splitlines()[1:])
