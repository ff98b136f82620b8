"""Training branches in, packed micro-steps out: shared prefixes are held, and later computed, once.

The branches of a micro-step, of whatever rollout, become one forest: a token trie in depth-first order, where a token
is one node however many branches pass through it. Depth-first order falls out of sorting the branches
lexicographically by their ids: what branch i adds is what lies behind its longest common prefix with branch i - 1.

Invariants: every target of every branch is exactly one loss row; following `parent` from a branch's last token gives
back its ids; nothing is truncated; all targets of one GSPO unit lie in one micro-step; the result does not depend on
the order of the input. Numpy only, so that a process without torch can pack.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import TokenIds, TrainingBranch

if TYPE_CHECKING:
    from gyre_core.config.models import TrainConfig

Unit = Literal["branch", "rollout"]
Indices = NDArray[np.int64]
Floats = NDArray[np.float32]

_OPEN_MICRO_STEPS = 16  # how many started micro-steps a block is tried in; bounds the work on huge steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchKey:
    """Names one branch of a micro-step. Example: BranchKey(group_id="s0-p07", rollout_id="s0-p07-02", branch=0)"""

    group_id: str
    rollout_id: str
    branch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossRows:
    """One row for each (branch, target), by branch, then position. Several rows may point at the same edge.

    Example: rows.child[0] == 41: the loss of the edge from packed token parent[41] to packed token 41
    """

    child: Indices  # [R] packed index of the target token; the edge's other end is parent[child]
    branch: Indices  # [R] index into PackedMicroStep.branches
    unit: Indices  # [R] GSPO unit, 0 <= unit < num_units
    sampler_logprob: Floats  # [R] nats
    weight: Floats  # [R] sums to 1 over a rollout's selected targets
    advantage: Floats  # [R]
    temperature: Floats  # [R] > 0

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.child)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicroStep:
    """One forward and backward pass: a forest of N tokens with S segments and R loss rows.

    A segment is a maximal chain: its tokens are [start, end) in depth-first order, each the parent of the next, and
    only its last token branches. A segment's queries see its ancestors' tokens and, causally, its own.

    Example: pack_branches(branches, budget_tokens=16384)[0]
    """

    token_ids: TokenIds  # [N]
    position: Indices  # [N] depth in its tree, from 0
    parent: Indices  # [N] packed index, -1 at roots; always below the token's own index
    segment_start: Indices  # [S]
    segment_end: Indices  # [S] one past the last token
    segment_parent: Indices  # [S] segment above, -1 at roots; always below the segment's own index
    branches: tuple[BranchKey, ...]  # by (rollout_id, branch)
    branch_leaf: Indices  # [B] packed index of each branch's last token
    rows: LossRows
    num_units: int
    num_branch_tokens: int  # sum of the branches' lengths: what a run without sharing computes

    @property
    def num_tokens(self) -> int:
        """N, the unique tokens."""
        return len(self.token_ids)

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The rollouts with a branch in this micro-step, sorted."""
        return tuple(sorted({key.rollout_id for key in self.branches}))

    def path(self, token: int) -> Indices:
        """Packed indices from the root of `token`'s tree to `token`, both included."""
        runs = []
        segment = int(np.searchsorted(self.segment_start, token, side="right")) - 1
        end = token + 1
        while segment >= 0:
            runs.append(np.arange(self.segment_start[segment], end))
            segment = int(self.segment_parent[segment])
            end = int(self.segment_end[segment]) if segment >= 0 else 0
        return np.concatenate(runs[::-1])


def pack_for_training(branches: Sequence[TrainingBranch], train: "TrainConfig") -> list[PackedMicroStep]:
    """Pack as a run's settings say. Everything that trains, or says what was trained, packs with this."""
    return pack_branches(
        branches,
        train.micro_step_tokens,
        unit=train.unit,
        share_prefixes=train.share_prefixes,
        skip_zero_advantage=not train.zero_advantage_trains,
    )


def pack_branches(
    branches: Sequence[TrainingBranch],
    budget_tokens: int,
    *,
    unit: Unit = "branch",
    share_prefixes: bool = True,
    skip_zero_advantage: bool = False,
) -> list[PackedMicroStep]:
    """Pack branches into micro-steps of at most `budget_tokens` unique tokens.

    Whole groups stay together where they fit; a group that is too large is split between rollouts, a rollout between
    branches, and the prefix above the cut is computed again. Blocks are placed largest first, each in the started
    micro-step where it adds fewest tokens: what is small, or mostly shared, fills the holes. Branches without a target
    are left out: they train nothing.

    `unit`: what must not be split, because GSPO's ratio needs all its targets (trajectories.md section 7).
    `share_prefixes=False`: every branch is a chain of its own, for models that cannot share prefixes and as a baseline.
    `skip_zero_advantage`: leave out branches whose gradient is exactly 0; their statistics are then missing too.

    Raises ValueError for malformed or duplicate branches, and for a branch (or a rollout, with unit "rollout") that
    exceeds the budget, with what to change.
    """
    if budget_tokens <= 0:
        raise ValueError(f"budget_tokens must be positive, got {budget_tokens}")
    kept = []
    for branch in branches:
        check_branch(branch)
        if branch.target.any() and not (skip_zero_advantage and branch.advantage == 0.0):
            kept.append(branch)
    kept.sort(key=lambda branch: (branch.rollout_id, branch.branch))
    for first, second in pairwise(kept):
        if (first.rollout_id, first.branch) == (second.rollout_id, second.branch):
            raise ValueError(f"branch {first.branch} of rollout {first.rollout_id} was given twice")
    order = _Order([branch.token_ids for branch in kept], share_prefixes)
    blocks = _blocks(kept, order, budget_tokens, unit)
    return [_build(kept, order, ranks, unit) for ranks in _fill(blocks, order, budget_tokens)]


def check_branch(branch: TrainingBranch) -> None:
    """Raise ValueError when a branch's arrays do not fit together or hold values that no sampler gives."""
    name = f"branch {branch.branch} of rollout {branch.rollout_id}"
    length = len(branch.token_ids)
    for field in ("target", "sampler_logprobs", "weights"):
        if len(getattr(branch, field)) != length:
            raise ValueError(f"{name}: {field} has {len(getattr(branch, field))} entries for {length} tokens")
    if length == 0:
        raise ValueError(f"{name} has no tokens")
    if branch.target[0]:
        raise ValueError(f"{name}: position 0 cannot be a target, nothing comes before it")
    if branch.token_ids.min() < 0:
        raise ValueError(f"{name} has a negative token id")
    if not (branch.temperature > 0 and np.isfinite(branch.temperature)):
        raise ValueError(f"{name}: the sampling temperature must be positive to train on, got {branch.temperature}")
    values = np.concatenate([branch.sampler_logprobs[branch.target], branch.weights[branch.target]])
    if not (np.isfinite(values).all() and np.isfinite(branch.advantage)):
        raise ValueError(f"{name} has a non-finite sampler log-prob, weight or advantage")


def every_position(branch: TrainingBranch, index: int) -> TrainingBranch:
    """The same tokens with every position but the first as a target, named by `index`."""
    length = len(branch.token_ids)
    return replace(
        branch,
        group_id="",
        rollout_id=f"{index:09d}",
        branch=index,
        target=np.arange(length) > 0,
        sampler_logprobs=np.zeros(length, np.float32),
        weights=np.zeros(length, np.float32),
        advantage=0.0,
    )


class _Order:
    """Branches in lexicographic order of their ids; `rank` counts in that order."""

    def __init__(self, ids: Sequence[TokenIds], share_prefixes: bool) -> None:
        # Big-endian unsigned bytes compare like the ids do, and a prefix sorts before what extends it.
        keys = [np.asarray(array).astype(">u4").tobytes() for array in ids]
        self.branch_at = sorted(range(len(ids)), key=lambda index: (keys[index], index))
        self.rank_of = [0] * len(ids)
        for rank, index in enumerate(self.branch_at):
            self.rank_of[index] = rank
        self.lengths = np.array([len(ids[index]) for index in self.branch_at], np.int64)
        common = np.zeros(len(ids), np.int64)  # [rank] tokens shared with the branch one rank before
        if share_prefixes:
            for rank in range(1, len(ids)):
                common[rank] = _common_prefix(ids[self.branch_at[rank - 1]], ids[self.branch_at[rank]])
        self._minima = [common]  # sparse table: level k holds minima over windows of 2 ** k
        while (1 << len(self._minima)) <= len(ids):
            below, half = self._minima[-1], 1 << (len(self._minima) - 1)
            self._minima.append(np.minimum(below[: len(below) - half], below[half:]))

    def common_tokens(self, low: Indices, high: Indices) -> Indices:
        """Shared prefix lengths of branches at ranks `low` < `high`, elementwise: minima over (low, high]."""
        spans = high - low
        levels = np.frexp(spans.astype(np.float64))[1] - 1  # floor(log2)
        out = np.empty(len(low), np.int64)
        for level in sorted(set(levels.tolist())):  # np.unique would import numpy.ma, 20 ms
            here = levels == level
            table = self._minima[level]
            out[here] = np.minimum(table[low[here] + 1], table[high[here] + 1 - (1 << level)])
        return out

    def unique_tokens(self, ranks: Indices) -> int:
        """Nodes of the trie over the branches at these ranks (ascending)."""
        return int(self.lengths[ranks].sum() - self.common_tokens(ranks[:-1], ranks[1:]).sum())


def _common_prefix(first: TokenIds, second: TokenIds) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length


def _blocks(branches: list[TrainingBranch], order: _Order, budget_tokens: int, unit: Unit) -> list[Indices]:
    """Groups, or where too large their rollouts, or their branches: ascending ranks, each within the budget."""
    blocks: list[Indices] = []
    for group in _members(range(len(branches)), lambda index: branches[index].group_id):
        ranks = _ranks(order, group)
        if order.unique_tokens(ranks) <= budget_tokens:
            blocks.append(ranks)
            continue
        rollouts = [_ranks(order, r) for r in _members(group, lambda index: branches[index].rollout_id)]
        for rollout in sorted(rollouts, key=lambda ranks: int(ranks[0])):
            tokens = order.unique_tokens(rollout)
            if tokens <= budget_tokens:
                blocks.append(rollout)
                continue
            rollout_id = branches[order.branch_at[rollout[0]]].rollout_id
            if unit == "rollout":
                raise ValueError(
                    f"rollout {rollout_id} has {tokens} unique tokens and is one GSPO unit, more than a micro-step "
                    f'holds ({budget_tokens}): raise train.micro_step_tokens or set train.unit = "branch"'
                )
            for rank in rollout:
                if order.lengths[rank] > budget_tokens:
                    raise ValueError(
                        f"branch {branches[order.branch_at[rank]].branch} of rollout {rollout_id} has "
                        f"{order.lengths[rank]} tokens, more than a micro-step holds ({budget_tokens}): raise "
                        "train.micro_step_tokens to at least that, or lower model.context_length"
                    )
                blocks.append(np.array([rank]))
    return blocks


def _members(indices: Iterable[int], key) -> list[list[int]]:
    """Indices grouped by key, groups in the order of their keys."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(key(index), []).append(index)
    return [groups[name] for name in sorted(groups)]


def _ranks(order: _Order, indices: Iterable[int]) -> Indices:
    return np.array(sorted(order.rank_of[index] for index in indices), np.int64)


def _fill(blocks: list[Indices], order: _Order, budget_tokens: int) -> list[Indices]:
    """Ranks of each micro-step, ascending: largest first, best fit by added tokens among the latest started ones."""
    filled: list[Indices] = []
    sizes: list[int] = []
    for tokens, block in sorted(((order.unique_tokens(block), block) for block in blocks), key=lambda pair: -pair[0]):
        best, best_size, best_added = -1, tokens, budget_tokens + 1
        for index in range(max(0, len(filled) - _OPEN_MICRO_STEPS), len(filled)):
            size = order.unique_tokens(np.sort(np.concatenate([filled[index], block])))
            if size <= budget_tokens and size - sizes[index] < best_added:
                best, best_size, best_added = index, size, size - sizes[index]
        if best < 0:
            filled.append(block)
            sizes.append(best_size)
        else:
            filled[best] = np.sort(np.concatenate([filled[best], block]))
            sizes[best] = best_size
    return filled


def _build(branches: list[TrainingBranch], order: _Order, ranks: Indices, unit: Unit) -> PackedMicroStep:
    """The trie over the branches at these ranks, and its loss rows."""
    common = np.concatenate([[0], order.common_tokens(ranks[:-1], ranks[1:])])
    tokens, positions, parents, starts = [], [], [], []
    paths: dict[int, Indices] = {}  # branch index -> packed indices of its tokens
    above = np.empty(0, np.int64)
    size = 0
    for rank, shared in zip(ranks, common, strict=True):
        index = order.branch_at[rank]
        ids = branches[index].token_ids
        fresh = np.arange(size, size + len(ids) - shared)
        if len(fresh):
            tokens.append(ids[shared:])
            positions.append(np.arange(shared, len(ids)))
            parents.append(np.concatenate([above[shared - 1 : shared] if shared else [-1], fresh[:-1]]))
            starts.append(size)
        size += len(fresh)
        above = paths[index] = np.concatenate([above[:shared], fresh])
    parent = np.concatenate(parents).astype(np.int64)
    start, end, segment_parent = _segments(parent, np.array(starts))
    indices = sorted(paths)  # branches were sorted by (rollout_id, branch)
    rows, num_units = _rows(branches, indices, paths, unit)
    return PackedMicroStep(
        token_ids=np.concatenate(tokens).astype(np.int32),
        position=np.concatenate(positions),
        parent=parent,
        segment_start=start,
        segment_end=end,
        segment_parent=segment_parent,
        branches=tuple(
            BranchKey(group_id=b.group_id, rollout_id=b.rollout_id, branch=b.branch)
            for b in (branches[index] for index in indices)
        ),
        branch_leaf=np.array([paths[index][-1] for index in indices], np.int64),
        rows=rows,
        num_units=num_units,
        num_branch_tokens=int(order.lengths[ranks].sum()),
    )


def _segments(parent: Indices, branch_starts: Indices) -> tuple[Indices, Indices, Indices]:
    """Maximal chains: cut where a branch's own tokens begin after a fork, and behind every token that forks."""
    num_children = np.bincount(parent[parent >= 0], minlength=len(parent))
    is_start = np.zeros(len(parent), bool)
    is_start[branch_starts] = True
    is_start |= (parent < 0) | (num_children[parent] > 1)
    # A branch that only extends a shorter one goes on in that one's chain.
    is_start &= (parent < 0) | (num_children[parent] > 1) | (parent != np.arange(len(parent)) - 1)
    start = np.flatnonzero(is_start)
    end = np.append(start[1:], len(parent))
    above = parent[start]
    segment_parent = np.where(above >= 0, np.searchsorted(start, above, side="right") - 1, -1)
    return start, end, segment_parent


def _rows(
    branches: list[TrainingBranch], indices: list[int], paths: dict[int, Indices], unit: Unit
) -> tuple[LossRows, int]:
    units: dict[tuple[str, int], int] = {}
    child, counts, unit_of, logprob, weight = [], [], [], [], []
    for index in indices:
        branch = branches[index]
        at = np.flatnonzero(branch.target)
        child.append(paths[index][at])
        counts.append(len(at))
        key = (branch.rollout_id, branch.branch if unit == "branch" else -1)
        unit_of.append(units.setdefault(key, len(units)))
        logprob.append(branch.sampler_logprobs[at])
        weight.append(branch.weights[at])
    rows = LossRows(
        child=np.concatenate(child),
        branch=np.repeat(np.arange(len(indices)), counts),
        unit=np.repeat(np.array(unit_of, np.int64), counts),
        sampler_logprob=np.concatenate(logprob).astype(np.float32),
        weight=np.concatenate(weight).astype(np.float32),
        advantage=np.repeat(np.array([branches[i].advantage for i in indices], np.float32), counts),
        temperature=np.repeat(np.array([branches[i].temperature for i in indices], np.float32), counts),
    )
    return rows, len(units)
