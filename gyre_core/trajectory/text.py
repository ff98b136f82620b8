"""Trees as text: golden strings for tests and an indented view for people.

Enters: a tree (or a trajectory) and a decode function (ids -> text). Leaves: text. Sampled tokens stand in brackets.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from gyre_core.trajectory.tree import Trajectory, TrajectoryTree, TreeNode

Decode = Callable[[Sequence[int]], str]


def golden(tree: TrajectoryTree, decode: Decode) -> str:
    """The tree in the golden form of the tests: one line a chain of only children, branches indented below it.

    Example: "<sys> s </sys> <usr> u </usr> [a]\\n  <tool> r </tool> [b]\\n  <usr> v </usr> [c]"
    """
    lines = []
    for chain, depth in _chains(tree):
        parts = []
        for node in (tree.nodes[i] for i in chain):
            text = decode(node.token_ids.tolist()).strip()
            parts.append(f"[{text}]" if node.call_id else text)
        lines.append("  " * depth + " ".join(parts))
    return "\n".join(lines)


def render_tree(
    trajectory: Trajectory,
    decode: Decode,
    *,
    width: int = 120,
    max_tokens: int = 64,
    trained: Callable[[TreeNode], int] | None = None,
) -> str:
    """The trajectory as an indented tree for a terminal: one line a node.

    A line shows the node id, `*` and the role for sampled nodes, the number of tokens, the versions that sampled them
    and the text of at most `max_tokens` tokens (from both ends of a longer node), cut to `width` columns. `trained`
    gives the number of a node's tokens that a selection trains; it is shown as `trained k`.

    Example:
        r1: 2 calls, 2 branches, 31 tokens (12 sampled)
        0    19 tok  <|im_start|>user…
        ├─1 * main 7 tok v3  ls -a<|im_end|>
        └─2 * main 5 tok v3  done<|im_end|>
    """
    tree = trajectory.tree
    num_calls = Counter(call.role.value for call in trajectory.calls)
    roles = ", ".join(f"{count} {role}" for role, count in sorted(num_calls.items()))
    lines = [
        f"{trajectory.rollout_id}: {len(trajectory.calls)} calls ({roles or 'none'}), {len(tree.leaves())} branches, "
        f"{tree.unique_tokens} tokens ({tree.sampled_tokens} sampled)"
    ]
    children = tree.children()
    roots = [node.node_id for node in tree.nodes if node.parent_id < 0]
    # (node, indentation of its own line, indentation of what hangs below it)
    stack = [(node_id, "", "") for node_id in reversed(roots)]
    while stack:
        node_id, own, below = stack.pop()
        lines.append(_line(tree.nodes[node_id], own, decode, width, max_tokens, trained))
        kids = children[node_id]
        for position in range(len(kids) - 1, -1, -1):
            only, last = len(kids) == 1, position == len(kids) - 1
            mark, rest = ("", "") if only else ("└─", "  ") if last else ("├─", "│ ")
            stack.append((kids[position], below + mark, below + rest))
    return "\n".join(lines)


def _line(
    node: TreeNode, indent: str, decode: Decode, width: int, max_tokens: int, trained: Callable[[TreeNode], int] | None
) -> str:
    ids = node.token_ids.tolist()
    if len(ids) > max_tokens:
        half = max(1, max_tokens // 2)
        text = f"{decode(ids[:half])} … {decode(ids[-half:])}"
    else:
        text = decode(ids)
    head = f"{indent}{node.node_id} "
    if node.call_id:
        versions = ",".join(f"v{version}" for version in dict.fromkeys(span.version for span in node.spans))
        head += f"* {node.role.value} {len(ids)} tok {versions} "
        if trained is not None:
            head += f"trained {trained(node)} "
    else:
        head += f"  {len(ids)} tok "
    line = head + " " + text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    printable = "".join(char if char.isprintable() else "�" for char in line)
    return printable if len(printable) <= width else printable[: max(1, width - 1)] + "…"


def _chains(tree: TrajectoryTree) -> list[tuple[list[int], int]]:
    """Maximal runs of only children with their depth of branching, depth first."""
    children = tree.children()
    roots = [node.node_id for node in tree.nodes if node.parent_id < 0]
    stack = [(root, 0) for root in reversed(roots)]
    chains = []
    while stack:
        node_id, depth = stack.pop()
        chain = [node_id]
        while len(children[chain[-1]]) == 1:
            chain += children[chain[-1]]
        chains.append((chain, depth))
        stack.extend((child, depth + 1) for child in reversed(children[chain[-1]]))
    return chains
