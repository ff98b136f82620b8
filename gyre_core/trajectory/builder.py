"""The growing token tree of a live session.

Enters: prompt ids and sampled outputs, in any order. Leaves: handles (`LiveNode`) and, at the end, a `TrajectoryTree`.

A handle names the end of a token path and keeps that meaning for life: when a later prompt diverges inside a node, the
node keeps its end and a new node with the shared part is put above it. Prompt tokens are shared wherever they are
equal, sampled tokens included when a prompt repeats them in the same context; two samples never share a node, so every
sampled token is in the tree exactly once. Ids are given when the tree is frozen (`freeze`), parents first.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from gyre_core.trajectory.tree import NO_PARENT, TrajectoryTree, TreeNode
from gyre_core.types import LogProbs, Role, TokenIds, VersionSpan


class LiveNode:
    """A handle: the end of one token path. Only `TokenTree` changes it."""

    __slots__ = ("age", "call_id", "children", "end", "logprobs", "parent", "role", "serial", "spans", "token_ids")

    def __init__(
        self,
        parent: "LiveNode | None",
        token_ids: TokenIds,
        *,
        serial: int,
        role: Role,
        call_id: str = "",
        logprobs: LogProbs | None = None,
        spans: tuple[VersionSpan, ...] = (),
    ) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.serial = serial  # unique
        self.age = serial  # orders siblings; a split hands it to the upper node
        self.role = role
        self.call_id = call_id
        self.logprobs = logprobs
        self.spans = spans
        self.end: int = (parent.end if parent is not None else 0) + len(token_ids)  # tokens of the path to here
        self.children: dict[int, list[LiveNode]] = {}  # by first token; several only below equal samples


class TokenTree:
    """A radix tree of token ids. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._serial = count()
        self.root = LiveNode(None, np.zeros(0, np.int32), serial=next(self._serial), role=Role.MAIN)

    def attach(self, anchor: LiveNode, token_ids: TokenIds, role: Role) -> LiveNode:
        """The node that ends the path of `anchor` + `token_ids`; shares the longest prefix that exists below `anchor`.

        `token_ids` may be empty (the anchor itself is returned). Only tokens that exist nowhere are added.
        """
        node, offset, matched = self.match(anchor, token_ids)
        if offset < len(node.token_ids):
            node = self._split(node, offset)
        rest = token_ids[matched:]
        if not len(rest):
            return node
        return self._add(LiveNode(node, _frozen(rest, np.int32), serial=next(self._serial), role=role))

    def add_output(
        self,
        parent: LiveNode,
        token_ids: TokenIds,
        logprobs: LogProbs,
        spans: Sequence[VersionSpan],
        *,
        call_id: str,
        role: Role,
    ) -> LiveNode:
        """Append one sampled output, never merged with another; raises ValueError for empty or unequal arrays."""
        if not len(token_ids) or len(token_ids) != len(logprobs):
            raise ValueError(f"output of {call_id}: {len(token_ids)} ids, {len(logprobs)} log-probs")
        return self._add(
            LiveNode(
                parent,
                _frozen(token_ids, np.int32),
                serial=next(self._serial),
                role=role,
                call_id=call_id,
                logprobs=_frozen(logprobs, np.float32),
                spans=tuple(spans),
            )
        )

    def match(self, anchor: LiveNode, token_ids: TokenIds) -> tuple[LiveNode, int, int]:
        """Longest prefix of `token_ids` below `anchor`: (node, tokens matched inside it, tokens matched in all).

        Looks into every equal sibling; of equally long matches the oldest node wins.
        """
        best = (anchor, len(anchor.token_ids), 0)
        stack = [(anchor, 0)]
        while stack:
            node, matched = stack.pop()
            if matched == len(token_ids):
                continue
            for child in reversed(node.children.get(int(token_ids[matched]), ())):
                inside = _common_prefix(child.token_ids, token_ids[matched : matched + len(child.token_ids)])
                total = matched + inside
                if total > best[2] or (total == best[2] and child.age < best[0].age):
                    best = (child, inside, total)
                if inside == len(child.token_ids):
                    stack.append((child, total))
        return best

    def path_ids(self, node: LiveNode) -> TokenIds:
        """Token ids from the root to the end of `node`: [node.end] int32."""
        return self.tail_ids(node, node.end)

    def tail_ids(self, node: LiveNode, at_least: int) -> TokenIds:
        """The last tokens of the path to `node`: whole nodes, at least `at_least` tokens unless the path is shorter."""
        parts: list[TokenIds] = []
        size = 0
        current: LiveNode | None = node
        while current is not None and size < at_least:
            parts.append(current.token_ids)
            size += len(current.token_ids)
            current = current.parent
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def freeze(self, rollout_id: str) -> tuple[TrajectoryTree, dict[int, int]]:
        """The tree as immutable nodes in depth-first order, siblings by age, and node ids by handle serial."""
        nodes: list[TreeNode] = []
        ids: dict[int, int] = {self.root.serial: NO_PARENT}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                ids[node.serial] = len(nodes)
                nodes.append(_frozen_node(node, len(nodes), ids[node.parent.serial]))
            children = [child for siblings in node.children.values() for child in siblings]
            stack.extend(sorted(children, key=lambda child: child.age, reverse=True))
        return TrajectoryTree(rollout_id=rollout_id, nodes=tuple(nodes)), ids

    def _add(self, node: LiveNode) -> LiveNode:
        assert node.parent is not None
        node.parent.children.setdefault(int(node.token_ids[0]), []).append(node)
        return node

    def _split(self, node: LiveNode, offset: int) -> LiveNode:
        """Put a node with the first `offset` tokens above `node`, which keeps its end; returns the new upper node."""
        assert node.parent is not None and 0 < offset < len(node.token_ids)
        upper = LiveNode(
            node.parent,
            node.token_ids[:offset],
            serial=next(self._serial),
            role=node.role,
            call_id=node.call_id,
            logprobs=None if node.logprobs is None else node.logprobs[:offset],
            spans=_cut(node.spans, 0, offset),
        )
        upper.age = node.age
        siblings = node.parent.children[int(node.token_ids[0])]
        siblings[siblings.index(node)] = upper
        node.spans = _cut(node.spans, offset, len(node.token_ids))
        node.token_ids = node.token_ids[offset:]
        node.logprobs = None if node.logprobs is None else node.logprobs[offset:]
        node.parent = upper
        upper.children[int(node.token_ids[0])] = [node]
        return upper


def _frozen_node(node: LiveNode, node_id: int, parent_id: int) -> TreeNode:
    num = len(node.token_ids)
    sampled = node.logprobs is not None
    return TreeNode(
        node_id=node_id,
        parent_id=parent_id,
        token_ids=node.token_ids,
        sampled=_frozen(np.full(num, sampled), np.bool_),
        logprobs=node.logprobs if node.logprobs is not None else _frozen(np.zeros(num), np.float32),
        spans=node.spans,
        call_id=node.call_id,
        role=node.role,
    )


def _frozen(values: Sequence[int] | np.ndarray, dtype: type) -> np.ndarray:
    """A read-only copy: nobody else may change what was recorded."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def _cut(spans: tuple[VersionSpan, ...], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans inside [start, end), offsets relative to `start`."""
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
    )
