"""`gyre bench select`: what turning graded rollouts into training branches takes, and what capping and sharing save.

Enters: how many synthetic rollouts of how many calls. Leaves: tokens a second from finished trees to branches (group
advantages, selection, arrays and weights), and the cost of training them at several caps J.

The cost of training is stated in two units, both relative to uncapped flat branches (every branch of the rollout that
has targets of its own, computed whole): tokens that go through the model (one forward and one backward pass each; the
linear layers' work is proportional to them, so the ratio is that of forward+backward), and attention pairs (a token
and one it attends to, itself included). `flat` computes each selected branch whole, `packed` each shared prefix once.
One group is in memory at a time.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_core.bench.tree import record_call
from gyre_core.bench.tree_rollout import ROLLOUT_ID, SyntheticCall, synthetic_calls
from gyre_core.config.models import SelectionConfig
from gyre_core.selection.batch import build_branches, selection_rng
from gyre_core.selection.branches import SelectedBranch, count_targets, select_branches
from gyre_core.trajectory.recorder import Recorder
from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree, TreeNode
from gyre_core.types import Grade, Outcome, Role, RolloutSpec

CAPS = (1, 3, 5, 10)
GROUP_SIZE = 16
_REWARDS = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """A graded rollout. Example: Member(spec=spec, trajectory=trajectory, grade=grade)"""

    spec: RolloutSpec
    trajectory: Trajectory
    grade: Grade


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelectionCosts:
    """Costs of the first 1, 2, ... branches of an uncapped selection; entry 0 is nothing at all.

    Example: selection_costs(tree, select_branches(tree, max_branches=0, ...), role_order).flat_tokens[-1]
    """

    flat_tokens: NDArray[np.int64]  # [B + 1] cumulative, as all fields
    packed_tokens: NDArray[np.int64]
    flat_pairs: NDArray[np.int64]
    packed_pairs: NDArray[np.int64]
    targets: NDArray[np.int64]  # each once
    repeated_targets: NDArray[np.int64]  # those of each branch's whole path


def bench_select(
    *, num_rollouts: int, num_calls: int, num_tokens: int, seed: int, branching: float = 1.0
) -> dict[str, Any]:
    """Process the rollouts group by group; raises ValueError for sizes that make no rollout."""
    if num_rollouts < 1 or branching < 0:
        raise ValueError(f"{num_rollouts} rollouts with branching {branching:g}: at least one, and not below 0")
    selection = SelectionConfig()
    build_s = process_s = process_cpu_s = 0.0
    totals = {name: np.zeros(len(CAPS) + 1, np.int64) for name in SelectionCosts.__slots__}
    counts = dict.fromkeys(("unique_tokens", "nodes", "targets", "tree_targets", "training_branches"), 0)
    branches_of: list[int] = []
    for index in range(0, num_rollouts, GROUP_SIZE):
        started = time.perf_counter()
        members = list(_group(index, min(GROUP_SIZE, num_rollouts - index), num_calls, num_tokens, seed, branching))
        build_s += time.perf_counter() - started
        started, started_cpu = time.perf_counter(), time.process_time()
        group = build_branches(
            members, selection=selection, run_seed=seed, trainer_version=0, max_staleness=0, temperature=1.0
        )
        process_s += time.perf_counter() - started
        process_cpu_s += time.process_time() - started_cpu
        counts["training_branches"] += len(group.branches)
        counts["targets"] += group.counters["targets_selected"]
        del group
        for member in members:
            tree = member.trajectory.tree
            selected = select_branches(
                tree,
                max_branches=0,
                role_order=selection.role_order,
                rng=selection_rng(seed, 0, member.spec.rollout_id),
            )
            costs = selection_costs(tree, selected, selection.role_order)
            branches_of.append(len(selected))
            counts["unique_tokens"] += tree.unique_tokens
            counts["nodes"] += len(tree.nodes)
            counts["tree_targets"] += count_targets(tree, selection.role_order)
            caps = [*(min(cap, len(selected)) for cap in CAPS), len(selected)]
            for name, total in totals.items():
                total += getattr(costs, name)[caps]
    return {
        "rollouts": num_rollouts,
        "calls": num_rollouts * num_calls,
        **counts,
        "branches_per_rollout": round(float(np.mean(branches_of)), 1),
        "build_s": round(build_s, 3),
        "process_s": round(process_s, 3),
        "process_cpu_s": round(process_cpu_s, 3),
        "tokens_per_s": round(counts["unique_tokens"] / process_s),
        "tokens_per_cpu_s": round(counts["unique_tokens"] / process_cpu_s),
        "rollouts_per_s": round(num_rollouts / process_s, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "caps": {**{str(cap): _shares(totals, at) for at, cap in enumerate(CAPS)}, "uncapped": _shares(totals, -1)},
        "once_only_target_rows": _ratio(totals["targets"][-1], totals["repeated_targets"][-1]),
    }


def select_rows(result: dict[str, Any]) -> list[str]:
    """The result for people, a line each."""
    lines = [
        f"rollouts    {result['rollouts']:,} of {result['calls'] // result['rollouts']} calls, "
        f"{result['branches_per_rollout']:g} branches each",
        f"tokens      {result['unique_tokens']:,} unique, {result['tree_targets']:,} targets",
        f"processed   {result['process_s']:.2f} s at J=5: {result['tokens_per_s'] / 1e6:.1f} M tokens/s, "
        f"{result['rollouts_per_s']:.0f} rollouts/s",
        f"CPU time    {result['process_cpu_s']:.2f} s: {result['tokens_per_cpu_s'] / 1e6:.1f} M tokens/s",
        f"trees       built in {result['build_s']:.1f} s, call by call",
        f"memory      {result['peak_rss_mb']:.0f} MB at its peak",
        f"once only   {100 * result['once_only_target_rows']:.1f} % of the target rows that branches would repeat",
        "",
        "of uncapped flat branches:   tokens            attention pairs    targets",
        "J          branches          flat    packed    flat    packed     trained",
    ]
    for cap, share in result["caps"].items():
        values = [share[name] for name in ("flat_tokens", "packed_tokens", "flat_pairs", "packed_pairs", "targets")]
        cells = "".join(f"{100 * value:8.1f} %" for value in values)
        lines.append(f"{cap:20s}{cells}")
    return lines


def selection_costs(
    tree: TrajectoryTree, selected: Sequence[SelectedBranch], role_order: Sequence[Role]
) -> SelectionCosts:
    """What the first branches of a selection cost: a selection with a smaller cap is the beginning of a larger one."""
    size = np.array([len(node.token_ids) for node in tree.nodes], np.int64)
    targets = np.array([_num_targets(node, role_order) for node in tree.nodes], np.int64)
    start = np.zeros(len(size), np.int64)  # tokens above each node
    for node in tree.nodes:
        if node.parent_id != NO_PARENT:
            start[node.node_id] = start[node.parent_id] + size[node.parent_id]
    pairs = size * start + size * (size + 1) // 2
    seen = np.zeros(len(size), np.bool_)
    rows = []
    for branch in selected:
        path = np.array(branch.node_ids)
        fresh = path[~seen[path]]
        seen[path] = True
        rows.append(
            (
                size[path].sum(),
                size[fresh].sum(),
                pairs[path].sum(),
                pairs[fresh].sum(),
                branch.target.sum(),
                targets[path].sum(),
            )
        )
    table = np.zeros((len(rows) + 1, 6), np.int64)
    if rows:
        np.cumsum(np.array(rows, np.int64), axis=0, out=table[1:])
    return SelectionCosts(
        flat_tokens=table[:, 0],
        packed_tokens=table[:, 1],
        flat_pairs=table[:, 2],
        packed_pairs=table[:, 3],
        targets=table[:, 4],
        repeated_targets=table[:, 5],
    )


def synthetic_trajectory(calls: Iterator[SyntheticCall]) -> Trajectory:
    """The calls as a session's recorder leaves them."""
    recorder = Recorder(ROLLOUT_ID)
    for index, call in enumerate(calls):
        record_call(recorder, index, call)
    return recorder.snapshot()


def _group(first: int, num: int, num_calls: int, num_tokens: int, seed: int, branching: float) -> Iterator[Member]:
    rng = np.random.default_rng((seed, first))
    for member in range(num):
        rollout_id = f"s0000-p{first // GROUP_SIZE:04d}-{member:02d}"
        calls = synthetic_calls(
            num_calls=num_calls,
            num_tokens=num_tokens,
            seed=int(np.random.SeedSequence((seed, first + member)).generate_state(1)[0]),
            branching=branching,
        )
        spec = RolloutSpec(
            rollout_id=rollout_id,
            group_id=rollout_id[:-3],
            problem_id=rollout_id[6:-3],
            step=0,
            member=member,
            dispatch_version=0,
            seed=member,
        )
        grade = Grade(outcome=Outcome.FINISHED, reward=float(rng.choice(_REWARDS)), reason="synthetic")
        yield Member(spec=spec, trajectory=synthetic_trajectory(calls), grade=grade)


def _num_targets(node: TreeNode, role_order: Sequence[Role]) -> int:
    """Sampled tokens of a trained role that have something to be predicted from."""
    if node.role not in role_order:
        return 0
    return int(np.count_nonzero(node.sampled[int(node.parent_id == NO_PARENT) :]))


def _shares(totals: dict[str, NDArray[np.int64]], at: int) -> dict[str, float]:
    return {
        "flat_tokens": _ratio(totals["flat_tokens"][at], totals["flat_tokens"][-1]),
        "packed_tokens": _ratio(totals["packed_tokens"][at], totals["flat_tokens"][-1]),
        "flat_pairs": _ratio(totals["flat_pairs"][at], totals["flat_pairs"][-1]),
        "packed_pairs": _ratio(totals["packed_pairs"][at], totals["flat_pairs"][-1]),
        "targets": _ratio(totals["targets"][at], totals["targets"][-1]),
    }


def _ratio(part: np.int64, whole: np.int64) -> float:
    return round(float(part) / float(whole), 4) if whole else 0.0
