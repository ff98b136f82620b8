"""Small finished rollouts, made by hand or by hypothesis, for tests of what comes after them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import (
    CallRecord,
    FinishReason,
    Grade,
    HarnessResult,
    Outcome,
    Role,
    RolloutSpec,
    Substitution,
    TrainingBranch,
    VersionSpan,
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The parts of a finished rollout."""

    spec: RolloutSpec
    trajectory: Trajectory
    grade: Grade
    harness: HarnessResult
    workspace_ref: str = ""


def prompt_node(node_id: int, parent_id: int, ids: Sequence[int], role: Role = Role.MAIN) -> TreeNode:
    """Tokens that a harness sent."""
    num = len(ids)
    return TreeNode(
        node_id=node_id,
        parent_id=parent_id,
        token_ids=np.array(ids, np.int32),
        sampled=np.zeros(num, np.bool_),
        logprobs=np.zeros(num, np.float32),
        spans=(),
        call_id="",
        role=role,
    )


def output_node(
    node_id: int,
    parent_id: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    call_id: str,
    version: int = 0,
    role: Role = Role.MAIN,
) -> TreeNode:
    """Tokens that an engine sampled."""
    num = len(ids)
    return TreeNode(
        node_id=node_id,
        parent_id=parent_id,
        token_ids=np.array(ids, np.int32),
        sampled=np.ones(num, np.bool_),
        logprobs=np.array(logprobs, np.float32),
        spans=(VersionSpan(version=version, start=0, end=num),),
        call_id=call_id,
        role=role,
    )


def call(rollout_id: str, index: int, node_id: int, *, output_tokens: int = 1, role: Role = Role.MAIN) -> CallRecord:
    """One call's record; its id is `<rollout>-c<index>`."""
    return CallRecord(
        call_id=f"{rollout_id}-c{index}",
        rollout_id=rollout_id,
        index=index,
        node_id=node_id,
        role=role,
        dialect="messages",
        model_name="any-model",
        substitution=Substitution.CLEAN,
        finish_reason=FinishReason.STOP,
        prompt_tokens=3,
        output_tokens=output_tokens,
        cached_tokens=0,
        started_s=100.0 + index,
        finished_s=100.5 + index,
        hints={"x-agent": "main"},
    )


def two_turns(rollout_id: str) -> Trajectory:
    """`1 2 3 [10 11] 4 [12]` and, from the same first prompt, `1 2 3 [20]`."""
    nodes = (
        prompt_node(0, NO_PARENT, [1, 2, 3]),
        output_node(1, 0, [10, 11], [-0.1, -0.2], call_id=f"{rollout_id}-c0"),
        prompt_node(2, 1, [4]),
        output_node(3, 2, [12], [-0.3], call_id=f"{rollout_id}-c1"),
        output_node(4, 0, [20], [-0.4], call_id=f"{rollout_id}-c2"),
    )
    return Trajectory(
        rollout_id=rollout_id,
        tree=TrajectoryTree(rollout_id=rollout_id, nodes=nodes),
        calls=(
            call(rollout_id, 0, 1, output_tokens=2),
            call(rollout_id, 1, 3),
            call(rollout_id, 2, 4),
        ),
        counters={"substitution_clean": 3},
    )


def finished(
    rollout_id: str,
    *,
    reward: float | None = 0.5,
    step: int = 0,
    trajectory: Trajectory | None = None,
    workspace_ref: str = "",
) -> Finished:
    """A whole rollout; reward None is one that the verifier could not grade."""
    outcome = Outcome.FINISHED if reward is not None else Outcome.VERIFIER_FAILED
    return Finished(
        spec=RolloutSpec(
            rollout_id=rollout_id,
            group_id="s0000-p07",
            problem_id="p07",
            step=step,
            member=0,
            dispatch_version=step,
            seed=7,
        ),
        trajectory=trajectory or two_turns(rollout_id),
        grade=Grade(
            outcome=outcome,
            reward=reward,
            reason="verifier wrote 0.5" if reward is not None else "no reward file",
            verifier_attempts=1,
            verifier_s=0.25,
            metrics={"files": 2.0},
        ),
        harness=HarnessResult(
            exit_code=0,
            timed_out=False,
            duration_s=1.5,
            log_tail="done\n",
            started_s=100.0,
            finished_s=101.5,
        ),
        workspace_ref=workspace_ref,
    )


def branch_of(
    trajectory: Trajectory, node_id: int, *, branch: int = 0, num_targets: int | None = None
) -> TrainingBranch:
    """The path to a node with its sampled tokens (the last `num_targets` of them) as targets, weights summing to 1."""
    tree = trajectory.tree
    target = tree.path_sampled(node_id).copy()
    if num_targets is not None:
        (positions,) = np.nonzero(target)
        target[positions[: len(positions) - num_targets]] = False
    count = max(int(target.sum()), 1)
    return TrainingBranch(
        rollout_id=trajectory.rollout_id,
        group_id="s0000-p07",
        branch=branch,
        role=tree.nodes[node_id].role,
        token_ids=tree.path_tokens(node_id),
        target=target,
        sampler_logprobs=np.where(target, tree.path_logprobs(node_id), np.float32(0)),
        weights=np.where(target, np.float32(1 / count), np.float32(0)),
        advantage=-0.75,
        temperature=0.6,
        min_version=0,
    )


def assert_same_trajectory(left: Trajectory, right: Trajectory) -> None:
    """Equal to the bit: ids, masks, log-probs, spans, links, calls, counters."""
    assert left.rollout_id == right.rollout_id
    assert left.calls == right.calls
    assert left.counters == right.counters
    assert len(left.tree.nodes) == len(right.tree.nodes)
    for one, other in zip(left.tree.nodes, right.tree.nodes, strict=True):
        assert (one.node_id, one.parent_id, one.call_id, one.role) == (
            other.node_id,
            other.parent_id,
            other.call_id,
            other.role,
        )
        assert one.spans == other.spans
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.sampled, other.sampled)
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def assert_same_branch(left: TrainingBranch, right: TrainingBranch) -> None:
    """Equal to the bit."""
    for name in ("rollout_id", "group_id", "branch", "role", "advantage", "temperature", "min_version"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("token_ids", "target", "sampler_logprobs", "weights"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), name


@st.composite
def trajectories(draw: st.DrawFn, rollout_id: str = "r") -> Trajectory:
    """Any valid trajectory: several roots, forks, empty trees, several versions in one output."""
    nodes: list[TreeNode] = []
    calls: list[CallRecord] = []
    for node_id in range(draw(st.integers(0, 7))):
        parent_id = draw(st.integers(NO_PARENT, node_id - 1))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
        role = draw(st.sampled_from(list(Role)))
        if draw(st.booleans()):
            nodes.append(prompt_node(node_id, parent_id, ids, role))
            continue
        num = len(ids)
        values = draw(st.lists(st.floats(-80, 0, width=32), min_size=num, max_size=num))
        cut = draw(st.integers(0, num))
        edges = [(0, cut), (cut, num)] if 0 < cut < num else [(0, num)]
        spans = tuple(VersionSpan(version=3 + i, start=start, end=end) for i, (start, end) in enumerate(edges))
        record = call(rollout_id, len(calls), node_id, output_tokens=num, role=role)
        calls.append(record)
        nodes.append(
            TreeNode(
                node_id=node_id,
                parent_id=parent_id,
                token_ids=np.array(ids, np.int32),
                sampled=np.ones(num, np.bool_),
                logprobs=np.array(values, np.float32),
                spans=spans,
                call_id=record.call_id,
                role=role,
            )
        )
    return Trajectory(
        rollout_id=rollout_id,
        tree=TrajectoryTree(rollout_id=rollout_id, nodes=tuple(nodes)),
        calls=tuple(calls),
        counters=draw(st.dictionaries(st.text(max_size=8), st.integers(0, 2**40), max_size=3)),
    )
