"""Small builders for token trees: a token is a letter, a path is a word."""

from collections.abc import Sequence

import numpy as np

from gyre_core.trajectory.builder import LiveNode, TokenTree
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import CallRecord, FinishReason, Role, Substitution, VersionSpan


def ids(word: str) -> np.ndarray:
    """Tokens of a word."""
    return np.array([ord(letter) for letter in word], np.int32)


def word(tokens: Sequence[int]) -> str:
    """The word of tokens."""
    return "".join(chr(token) for token in tokens)


def attach(tree: TokenTree, text: str, below: LiveNode | None = None, role: Role = Role.MAIN) -> LiveNode:
    """Hang prompt tokens below a node, the root by default."""
    return tree.attach(tree.root if below is None else below, ids(text), role)


def sample(
    tree: TokenTree, parent: LiveNode, text: str, call_id: str, *, version: int = 0, role: Role = Role.MAIN
) -> LiveNode:
    """Hang an output below a node; log-probs are -1, -2, ..."""
    logprobs = -np.arange(1, len(text) + 1, dtype=np.float32)
    span = VersionSpan(version=version, start=0, end=len(text))
    return tree.add_output(parent, ids(text), logprobs, [span], call_id=call_id, role=role)


def call_record(call_id: str, node_id: int, index: int = 0, **fields: object) -> CallRecord:
    """A call's record with plausible values."""
    values: dict = {
        "rollout_id": "r",
        "role": Role.MAIN,
        "dialect": "messages",
        "model_name": "m",
        "substitution": Substitution.CLEAN,
        "finish_reason": FinishReason.STOP,
        "prompt_tokens": 3,
        "output_tokens": 2,
        "cached_tokens": 1,
        "started_s": 1.25,
        "finished_s": 2.5,
        **fields,
    }
    return CallRecord(call_id=call_id, node_id=node_id, index=index, **values)


def trajectory_of(tree: TrajectoryTree, **counters: int) -> Trajectory:
    """A trajectory with one call for each call id of a tree."""
    last: dict[str, int] = {}
    for node in tree.nodes:
        if node.call_id:
            last[node.call_id] = node.node_id
    calls = tuple(call_record(call_id, node_id, index) for index, (call_id, node_id) in enumerate(last.items()))
    return Trajectory(rollout_id=tree.rollout_id, tree=tree, calls=calls, counters=counters)
