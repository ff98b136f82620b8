"""The hand-off: what goes in comes out, bit for bit, and other bytes are refused."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.trajectory.arrow import FORMAT_KEY, SCHEMA, trajectory_from_ipc, trajectory_to_ipc
from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import FinishReason, Role, Substitution, VersionSpan
from tests.support.trees import attach, call_record, ids, sample, trajectory_of


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    assert (left.rollout_id, left.calls, left.counters) == (right.rollout_id, right.calls, right.counters)
    assert len(left.tree.nodes) == len(right.tree.nodes)
    for a, b in zip(left.tree.nodes, right.tree.nodes, strict=True):
        assert (a.node_id, a.parent_id, a.spans, a.call_id, a.role) == (
            b.node_id,
            b.parent_id,
            b.spans,
            b.call_id,
            b.role,
        )
        for name in ("token_ids", "sampled", "logprobs"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), name


def small() -> Trajectory:
    tree = TokenTree()
    first = sample(tree, attach(tree, "ab"), "cd", "c0")
    attach(tree, "e", first)
    return trajectory_of(tree.freeze("r")[0], substitution_clean=1)


def test_small_trajectory_comes_back_equal_and_gives_the_same_bytes() -> None:
    trajectory = small()
    data = trajectory_to_ipc(trajectory)
    again = trajectory_from_ipc(data)
    assert_equal(trajectory, again)
    assert trajectory_to_ipc(again) == data == trajectory_to_ipc(trajectory)


def test_empty_trajectory_comes_back() -> None:
    empty = Trajectory(rollout_id="nothing", tree=TrajectoryTree(rollout_id="nothing", nodes=()), calls=())
    assert_equal(empty, trajectory_from_ipc(trajectory_to_ipc(empty)))


def test_every_kind_of_call_comes_back() -> None:
    tree = small().tree
    calls = tuple(
        call_record(
            f"c{index}",
            1,
            index,
            role=role,
            substitution=substitution,
            finish_reason=finish,
            hints={"x-agent-parent": "main", "ünï": "✓"},
            started_s=1e9 + 1 / 3,
        )
        for index, (role, substitution, finish) in enumerate(
            (role, substitution, finish) for role in Role for substitution in Substitution for finish in FinishReason
        )
    )
    trajectory = Trajectory(rollout_id="r", tree=tree, calls=calls, counters={"a": 2**40})
    assert_equal(trajectory, trajectory_from_ipc(trajectory_to_ipc(trajectory)))


@settings(max_examples=40)
@given(st.data())
def test_any_tree_comes_back_bit_for_bit(data: st.DataObject) -> None:
    tree = TokenTree()
    nodes = [tree.root]
    floats = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
    for number in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.sampled_from(nodes))
        values = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
        tokens = np.array(values, np.int32)
        if data.draw(st.booleans()):
            nodes.append(tree.attach(parent, tokens, data.draw(st.sampled_from(Role))))
        else:
            logprobs = np.array([data.draw(floats) for _ in values], np.float32)
            cut = data.draw(st.integers(1, len(values)))
            spans = [VersionSpan(version=number, start=0, end=cut), VersionSpan(version=9, start=cut, end=len(values))]
            nodes.append(
                tree.add_output(
                    parent,
                    tokens,
                    logprobs,
                    [s for s in spans if s.end > s.start],
                    call_id=f"c{number}",
                    role=Role.MAIN,
                )
            )
    trajectory = trajectory_of(tree.freeze("r")[0])
    assert_equal(trajectory, trajectory_from_ipc(trajectory_to_ipc(trajectory)))


def test_truncated_bytes_are_a_value_error_at_any_length() -> None:
    data = trajectory_to_ipc(small())
    for size in (0, 1, 7, 100, len(data) // 2, len(data) - 40):
        with pytest.raises(ValueError, match=r"Arrow IPC|trajectory"):
            trajectory_from_ipc(data[:size])


def test_foreign_bytes_and_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="not a whole Arrow IPC stream"):
        trajectory_from_ipc(b"PAR1" + b"\x00" * 64)
    for metadata, match in (({}, "found None"), ({FORMAT_KEY: b"2"}, "found b'2'")):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA.with_metadata(metadata)):
            pass
        with pytest.raises(ValueError, match=match):
            trajectory_from_ipc(sink.getvalue().to_pybytes())


def test_tokens_are_read_only_after_reading() -> None:
    node = trajectory_from_ipc(trajectory_to_ipc(small())).tree.nodes[0]
    assert node.token_ids.tolist() == ids("ab").tolist()
    with pytest.raises(ValueError, match="read-only"):
        node.token_ids[0] = 5
