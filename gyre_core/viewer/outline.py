"""A token tree as an indented outline that people can read: rows in order, in threads.

Enters: a tree. Leaves: rows and threads. A thread is a run of nodes shown one below the other at one indentation.
Where sampled tokens fork, the child with the most tokens below it goes on in its thread, after the other children's
threads; where only a prompt is shared, each child is a conversation of its own.

Invariants: every node is one row; a parent's row comes before its children's; the rows of a thread and of all threads
inside it are contiguous; inside a conversation the indentation grows with the logarithm of its size, not with its
number of forks.
"""

from dataclasses import dataclass

from gyre_core.trajectory.tree import NO_PARENT, TrajectoryTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread: `rows[start:end]` are its rows and those of the threads inside it.

    Example: Thread(index=1, parent=0, level=1, start=3, end=7, root=4, below=2, conversation=False)
    """

    index: int
    parent: int  # the thread around it, -1 for a root's
    level: int  # indentation
    start: int
    end: int
    root: int  # its first node
    below: int  # the node it hangs from, NO_PARENT for a root
    conversation: bool  # begins with nothing sampled before it; else it branches from a sampled path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Rows in reading order. Example: outline(tree).threads[outline(tree).thread_of[0]]"""

    rows: tuple[int, ...]  # node ids
    thread_of: tuple[int, ...]  # of each row
    threads: tuple[Thread, ...]  # in order of their first rows


def outline(tree: TrajectoryTree) -> Outline:
    """The outline of a tree; linear in the number of nodes."""
    children = tree.children()
    size, sampled_before = _subtree_tokens(tree), _sampled_before(tree)
    rows: list[int] = []
    thread_of: list[int] = []
    starts: list[tuple[int, int, int, int]] = []  # parent thread, level, first row, root node
    # (node, thread it goes on in or -1 for a new one, parent thread)
    roots = [node.node_id for node in tree.nodes if node.parent_id == NO_PARENT]
    stack = [(root, -1, -1) for root in reversed(roots)]
    while stack:
        node_id, thread, parent = stack.pop()
        if thread == -1:
            thread = len(starts)
            level = starts[parent][1] + 1 if parent >= 0 else 0
            starts.append((parent, level, len(rows), node_id))
        rows.append(node_id)
        thread_of.append(thread)
        kids = children[node_id]
        goes_on = kids[0] if len(kids) == 1 else None
        if len(kids) > 1 and (tree.nodes[node_id].call_id or sampled_before[node_id]):
            goes_on = max(kids, key=lambda kid: (size[kid], -kid))
        if goes_on is not None:
            stack.append((goes_on, thread, -1))
        stack.extend((kid, -1, thread) for kid in reversed(kids) if kid != goes_on)
    ends = [0] * len(starts)
    for row, thread in enumerate(thread_of):
        ends[thread] = row + 1
    for index in range(len(starts) - 1, -1, -1):
        parent = starts[index][0]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    threads = tuple(
        Thread(
            index=index,
            parent=parent,
            level=level,
            start=start,
            end=ends[index],
            root=root,
            below=tree.nodes[root].parent_id,
            conversation=not sampled_before[root],
        )
        for index, (parent, level, start, root) in enumerate(starts)
    )
    return Outline(rows=tuple(rows), thread_of=tuple(thread_of), threads=threads)


def _subtree_tokens(tree: TrajectoryTree) -> list[int]:
    size = [len(node.token_ids) for node in tree.nodes]
    for node in reversed(tree.nodes):
        if node.parent_id != NO_PARENT:
            size[node.parent_id] += size[node.node_id]
    return size


def _sampled_before(tree: TrajectoryTree) -> list[bool]:
    """Of each node: whether a node above it was sampled."""
    before: list[bool] = []
    for node in tree.nodes:
        parent = node.parent_id
        before.append(parent != NO_PARENT and (before[parent] or bool(tree.nodes[parent].call_id)))
    return before
