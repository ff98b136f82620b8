"""A rollout's calls as one prefix-shared token tree: what the recorder hands on, immutable.

Enters: nodes from `builder.TokenTree`. Leaves: paths, leaves, token counts for selection, packing, store and people.

Invariants (checked by `TrajectoryTree.validate`):
- a node holds only the tokens it adds; a path's nodes concatenated are exactly the ids the engine saw and sampled;
- len(token_ids) == len(sampled) == len(logprobs); log-probs are 0 where nothing was sampled;
- node_id == index, parents come before children, -1 is the parent of a root;
- version spans cover a sampled node's tokens in order without gaps; a prompt node has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_core.types import BoolMask, CallRecord, LogProbs, Role, TokenIds, VersionSpan

NO_PARENT = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeNode:
    """Tokens that one prompt or one sampled output adds to its parent's path.

    A call's prompt delta and its output are separate nodes, so `sampled` is all False or all True. An output that later
    prompts share only in part is held by a chain of nodes with the same `call_id`.

    Example: TreeNode(node_id=1, parent_id=0, token_ids=ids, sampled=np.ones(3, bool), logprobs=lp, spans=(...), ...)
    """

    node_id: int
    parent_id: int  # NO_PARENT for a root
    token_ids: TokenIds  # [n], n > 0
    sampled: BoolMask  # [n]
    logprobs: LogProbs  # [n], nats, 0 where not sampled
    spans: tuple[VersionSpan, ...]  # offsets relative to this node's tokens; empty for prompt nodes
    call_id: str  # the call that sampled these tokens, "" for prompt nodes
    role: Role  # of the call that added the node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryTree:
    """All token paths of a rollout.

    Example: TrajectoryTree(rollout_id="r1", nodes=(prompt, output)).path_tokens(1)
    """

    rollout_id: str
    nodes: tuple[TreeNode, ...]

    def path(self, node_id: int) -> list[int]:
        """Node ids from the root to `node_id`, both included. Raises IndexError for an unknown id."""
        if not 0 <= node_id < len(self.nodes):
            raise IndexError(f"tree of {self.rollout_id} has no node {node_id} (it has {len(self.nodes)})")
        path = []
        while node_id != NO_PARENT:
            path.append(node_id)
            node_id = self.nodes[node_id].parent_id
        return path[::-1]

    def path_tokens(self, node_id: int) -> TokenIds:
        """Token ids of the path to the end of `node_id`: [T] int32."""
        return _joined([self.nodes[i].token_ids for i in self.path(node_id)], np.int32)

    def path_sampled(self, node_id: int) -> BoolMask:
        """Which tokens of the path were sampled: [T] bool, aligned with `path_tokens`."""
        return _joined([self.nodes[i].sampled for i in self.path(node_id)], np.bool_)

    def path_logprobs(self, node_id: int) -> LogProbs:
        """Sampler log-probs of the path: [T] float32, 0 where not sampled."""
        return _joined([self.nodes[i].logprobs for i in self.path(node_id)], np.float32)

    def children(self) -> list[list[int]]:
        """For every node its children's ids, ascending."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            if node.parent_id != NO_PARENT:
                children[node.parent_id].append(node.node_id)
        return children

    def leaves(self) -> list[int]:
        """Ids of the nodes without children, ascending: one per branch."""
        parents = {node.parent_id for node in self.nodes}
        return [node.node_id for node in self.nodes if node.node_id not in parents]

    @property
    def unique_tokens(self) -> int:
        """Tokens in the tree, each shared prefix counted once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens in the tree."""
        return sum(int(node.sampled.sum()) for node in self.nodes)

    def validate(self) -> None:
        """Check the module's invariants; raises ValueError naming the node that breaks one."""
        for index, node in enumerate(self.nodes):
            where = f"node {index} of {self.rollout_id}"
            num = len(node.token_ids)
            if node.node_id != index or not NO_PARENT <= node.parent_id < index:
                raise ValueError(f"{where}: id {node.node_id}, parent {node.parent_id}: ids must equal the index")
            if num == 0 or len(node.sampled) != num or len(node.logprobs) != num:
                raise ValueError(f"{where}: {num} ids, {len(node.sampled)} mask, {len(node.logprobs)} log-probs")
            if np.any(node.logprobs[~node.sampled] != 0):
                raise ValueError(f"{where}: a token that was not sampled has a log-prob")
            ends = [0, *(span.end for span in node.spans)]
            starts = [*(span.start for span in node.spans), num]
            if bool(node.sampled.any()) != bool(node.call_id) or (node.call_id and ends != starts):
                raise ValueError(f"{where}: spans {node.spans} do not cover the {num} tokens of call {node.call_id!r}")
            if not node.call_id and node.spans:
                raise ValueError(f"{where}: a prompt node has version spans")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """Everything the proxy recorded of one rollout.

    Example: Trajectory(rollout_id="r1", tree=tree, calls=(call,), counters={"substitution_clean": 1})
    """

    rollout_id: str
    tree: TrajectoryTree
    calls: tuple[CallRecord, ...]  # in order of arrival
    counters: dict[str, int] = field(default_factory=dict)  # substitution classes, retries, refusals, oddities


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
