"""The outline of a tree: order, threads, indentation."""

from hypothesis import given

from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.tree import TrajectoryTree
from gyre_core.types import Role
from gyre_core.viewer.outline import outline
from tests.support.random_trees import make_tree, trees
from tests.support.trees import attach, sample, word


def shown(tree: TrajectoryTree) -> str:
    """The outline as text: a line a thread, its own nodes' words, indented by level."""
    layout = outline(tree)
    lines = []
    for thread in layout.threads:
        rows = range(thread.start, thread.end)
        own = [layout.rows[row] for row in rows if layout.thread_of[row] == thread.index]
        kind = "talk" if thread.conversation else "branch"
        lines.append("  " * thread.level + kind + " " + " ".join(word(tree.nodes[node].token_ids) for node in own))
    return "\n".join(lines)


def test_outline_of_a_fork_goes_on_with_the_child_that_has_most_tokens() -> None:
    tree = TokenTree()
    first = sample(tree, attach(tree, "ab"), "c", "c0")
    sample(tree, attach(tree, "d", first), "e", "c1")
    sample(tree, attach(tree, "fgh", first), "i", "c2")
    frozen = tree.freeze("r")[0]
    assert shown(frozen) == "talk ab c fgh i\n  branch d e"
    layout = outline(frozen)
    assert [word(frozen.nodes[node].token_ids) for node in layout.rows] == ["ab", "c", "d", "e", "fgh", "i"]
    assert [(thread.start, thread.end, thread.below) for thread in layout.threads] == [(0, 6, -1), (2, 4, 1)]


def test_outline_of_a_shared_prompt_makes_each_child_a_conversation() -> None:
    tree = TokenTree()
    system = attach(tree, "sys")
    sample(tree, attach(tree, "a", system), "b", "c0")
    sample(tree, attach(tree, "cccc", system), "d", "c1")
    sample(tree, attach(tree, "x", role=Role.SUB_AGENT), "y", "c2", role=Role.SUB_AGENT)
    assert shown(tree.freeze("r")[0]) == "talk sys\n  talk a b\n  talk cccc d\ntalk x y"


def test_outline_of_an_empty_tree_is_empty() -> None:
    layout = outline(TrajectoryTree(rollout_id="r", nodes=()))
    assert layout.rows == () and layout.threads == ()


def test_outline_of_many_forks_on_one_path_stays_flat() -> None:
    shapes = [(-1, 2, False, Role.MAIN)]
    at = 0
    for _ in range(300):  # each turn is tried twice; the second try goes on
        shapes += [(at, 1, True, Role.MAIN), (at, 1, True, Role.MAIN)]
        at = len(shapes) - 1
        shapes.append((at, 3, False, Role.MAIN))
        at += 1
    layout = outline(make_tree(shapes))
    assert max(thread.level for thread in layout.threads) == 2
    assert len(layout.rows) == 901


@given(trees())
def test_outline_of_any_tree_has_each_node_once_below_its_parent(tree: TrajectoryTree) -> None:
    layout = outline(tree)
    assert sorted(layout.rows) == [node.node_id for node in tree.nodes]
    place = {node: row for row, node in enumerate(layout.rows)}
    for node in tree.nodes:
        if node.parent_id >= 0:
            assert place[node.parent_id] < place[node.node_id]
    for thread in layout.threads:
        inside = set(layout.thread_of[thread.start : thread.end])
        assert layout.thread_of[thread.start] == thread.index and layout.rows[thread.start] == thread.root
        assert all(layout.thread_of[row] not in inside for row in range(thread.end, len(layout.rows)))
        if thread.parent >= 0:
            around = layout.threads[thread.parent]
            assert around.start < thread.start and thread.end <= around.end and thread.level == around.level + 1
