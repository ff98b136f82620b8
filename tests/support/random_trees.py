"""Token trees for tests: a tiny notation, and random ones."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from gyre_core.trajectory.tree import NO_PARENT, TrajectoryTree, TreeNode
from gyre_core.types import Role
from tests.support.rollouts import output_node, prompt_node

# (parent, number of tokens, sampled, role)
NodeShape = tuple[int, int, bool, Role]


def make_tree(shapes: Sequence[NodeShape], rollout_id: str = "r1", versions: Sequence[int] = ()) -> TrajectoryTree:
    """A tree of given shape; token ids count up from 0 over all nodes, so each token is recognisable."""
    nodes: list[TreeNode] = []
    next_id = 0
    for index, (parent, num, sampled, role) in enumerate(shapes):
        ids = list(range(next_id, next_id + num))
        next_id += num
        if sampled:
            logprobs = [-0.25 * (token + 1) for token in ids]
            version = versions[index] if versions else 0
            nodes.append(
                output_node(index, parent, ids, logprobs, call_id=f"{rollout_id}-c{index}", version=version, role=role)
            )
        else:
            nodes.append(prompt_node(index, parent, ids, role=role))
    tree = TrajectoryTree(rollout_id=rollout_id, nodes=tuple(nodes))
    tree.validate()
    return tree


@st.composite
def trees(draw: st.DrawFn, *, max_nodes: int = 14) -> TrajectoryTree:
    """Any tree: several roots, outputs at roots, prompts as leaves, every role anywhere."""
    num = draw(st.integers(0, max_nodes))
    shapes = [
        (
            draw(st.integers(NO_PARENT, index - 1)),
            draw(st.integers(1, 4)),
            draw(st.booleans()),
            draw(st.sampled_from(list(Role))),
        )
        for index in range(num)
    ]
    return make_tree(shapes, versions=[draw(st.integers(0, 5)) for _ in range(num)])


def target_tokens(tree: TrajectoryTree, roles: Sequence[Role]) -> set[int]:
    """Token ids (unique in trees of `make_tree`) that are targets, by the definition and without any cleverness."""
    found = set()
    for node in tree.nodes:
        path = tree.path_tokens(node.node_id)
        start = len(path) - len(node.token_ids)
        for offset in range(len(node.token_ids)):
            if node.sampled[offset] and node.role in roles and start + offset > 0:
                found.add(int(node.token_ids[offset]))
    return found


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)
