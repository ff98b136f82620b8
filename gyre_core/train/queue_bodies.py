"""The branches behind the micro-steps of one step: packed, kept, split. In memory, or in the step's journal.

Enters: branches of graded groups. Leaves: micro-steps as Arrow IPC, the names of what is in them. Invariant: a split
keeps every branch of the micro-step, once.
"""

from collections.abc import Sequence

from gyre_core.train.packing import pack_branches
from gyre_core.train.queue_journal import StepJournal
from gyre_core.train.queue_records import BranchName, QueueRules
from gyre_core.transfer.branches import branches_from_ipc, branches_to_ipc
from gyre_core.types import TrainingBranch


class MicroStepBodies:
    """Example: bodies = MicroStepBodies(QueueRules(micro_step_tokens=4096), None); bodies.keep("g0.0", branches)"""

    def __init__(self, rules: QueueRules, journal: StepJournal | None) -> None:
        self._rules = rules
        self._journal = journal
        self._bodies: dict[str, bytes] = {}
        self.names: dict[str, tuple[BranchName, ...]] = {}  # micro-step -> its branches

    def pack(self, branches: Sequence[TrainingBranch], budget: int) -> list[tuple[list[TrainingBranch], int]]:
        """Branches by micro-step, with the tokens of each."""
        by_name = {(branch.rollout_id, branch.branch): branch for branch in branches}
        packed = pack_branches(
            branches,
            budget,
            unit=self._rules.unit,
            share_prefixes=self._rules.share_prefixes,
            skip_zero_advantage=not self._rules.zero_advantage_trains,
        )
        return [([by_name[(key.rollout_id, key.branch)] for key in part.branches], part.num_tokens) for part in packed]

    def keep(self, micro_step: str, branches: Sequence[TrainingBranch]) -> None:
        """Keep what a micro-step computes; raises TrainError when the disk refuses."""
        body = branches_to_ipc(branches)
        self.names[micro_step] = names_of(branches)
        if self._journal is not None:
            self._journal.put(micro_step, body)
        else:
            self._bodies[micro_step] = body

    def body(self, micro_step: str) -> bytes:
        """The branches as Arrow IPC."""
        return self._journal.get(micro_step) if self._journal is not None else self._bodies[micro_step]

    def restore(self, micro_step: str) -> None:
        """Read the names of a micro-step that the journal keeps."""
        self.names[micro_step] = names_of(branches_from_ipc(self.body(micro_step)))

    def split(self, micro_step: str, budget: int) -> list[tuple[str, int]]:
        """Smaller ones (name, tokens) that together hold the same; empty when it cannot be split."""
        branches = branches_from_ipc(self.body(micro_step))
        parts = self.pack(branches, max(budget, self._largest_unit(branches)))
        if len(parts) < 2:
            return []
        assert sorted(self.names[micro_step]) == sorted(name for part, _ in parts for name in names_of(part))
        named = [(f"{micro_step}.{index}", tokens) for index, (_, tokens) in enumerate(parts)]
        for (name, _), (part, _) in zip(named, parts, strict=True):
            self.keep(name, part)
        return named

    def _largest_unit(self, branches: Sequence[TrainingBranch]) -> int:
        """Tokens of the largest piece that must stay whole."""
        if self._rules.unit == "branch":
            return max(len(branch.token_ids) for branch in branches)
        rollouts: dict[str, list[TrainingBranch]] = {}
        for branch in branches:
            rollouts.setdefault(branch.rollout_id, []).append(branch)
        return max(
            sum(tokens for _, tokens in self.pack(own, sum(len(branch.token_ids) for branch in own)))
            for own in rollouts.values()
        )


def names_of(branches: Sequence[TrainingBranch]) -> tuple[BranchName, ...]:
    """Rollout and branch of each."""
    return tuple((branch.rollout_id, branch.branch) for branch in branches)
