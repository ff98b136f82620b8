"""A step trained again: the same weights, micro-steps, order, denominators and learning rate must give the same bits.

A step that several cells shared has an account: which session computed which micro-steps, and in which order their
sums were added. Sums in fp32 depend on that order, so it is followed: the core's micro-steps go straight into the sum,
each other session's are summed from zero and then added (`sum_begin`, `sum_end`). That is exact where all cells
computed with the same kernels and threads, which equal machines and settings do; with others it differs in rounding.

Enters: stored steps, a cell that holds a trainer. Leaves: the weights' digests, stored and trained again, and where a
checkpoint is there the largest difference. A step whose first weights have no checkpoint any more is reached by
training the steps before it again, from an older checkpoint or the run's first weights (train.keep_checkpoints).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre_core.config import TrainConfig
from gyre_core.errors import GyreError, StoreError
from gyre_core.replay.section import ReplaySection, read_section
from gyre_core.replay.stored import StoredStep, find_record
from gyre_core.store import StepRecord
from gyre_core.store.records import MicroStep
from gyre_core.train.queue_records import ACCOUNT, StepAccount
from gyre_core.types import Json, TrainingBranch


class TrainCell(Protocol):
    """The verbs of a cell's control API that training needs (gyre_core/cells/client.py)."""

    def status(self) -> dict[str, Any]: ...
    def role(self, to: str, *, epoch: int) -> dict[str, Any]: ...
    def reset_gradients(self) -> None: ...
    def micro_step(self, branches: Sequence[TrainingBranch]) -> dict[str, Any]: ...
    def optimizer_step(
        self, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]: ...
    def skip_step(self, *, policy_version: int) -> dict[str, Any]: ...
    def weights(self) -> dict[str, Any]: ...
    def compare_checkpoint(self, path: str) -> dict[str, Any]: ...
    def sum_begin(self) -> None: ...
    def sum_end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainPlan:
    """Which steps to train again, and from where.

    Example: plan_retrain(records, folder.checkpoints, label=3).checkpoint
    """

    records: tuple[StepRecord, ...]  # in order; the last one is the step asked for
    sections: tuple[ReplaySection, ...]
    checkpoint: Path | None  # to start from; None: the run's first weights
    compare: Path | None  # the asked step's checkpoint; None when it is not there any more

    @property
    def first_version(self) -> int:
        return self.records[0].version_before

    @property
    def train(self) -> TrainConfig:
        """The settings to build the trainer with: the asked step's, on as many threads as it had."""
        section = self.sections[-1]
        return section.train.model_copy(update={"threads": int(section.back_end.get("threads", 0))})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedStep:
    """One step's digests. Example: RetrainedStep(label=1, stored="3f..", again="3f..", micro_steps=6, seconds=2.5)"""

    label: int
    stored: str
    again: str
    micro_steps: int
    seconds: float  # of the micro-steps

    @property
    def equal(self) -> bool:
        return self.stored == self.again


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainReport:
    """What training again gave.

    Example: retrain(cell, plan, steps).equal
    """

    started_from: str
    steps: tuple[RetrainedStep, ...]
    checkpoint: Json | None  # train.stats.StateDifference; None without a checkpoint to compare with
    back_end: Mapping[str, Any]
    back_end_changes: Mapping[str, Any]  # name -> [stored, now]

    @property
    def equal(self) -> bool:
        """Every weight of the asked step, and where its checkpoint is there its optimizer's moments, bit by bit."""
        found = self.checkpoint or {}
        return self.steps[-1].equal and not found.get("different_weights") and not found.get("different_moments")

    def as_json(self) -> Json:
        return {
            "equal": self.equal,
            "digest_stored": self.steps[-1].stored,
            "digest_again": self.steps[-1].again,
            "max_abs_difference": self.checkpoint["max_abs_weights"] if self.checkpoint else None,
            "started_from": self.started_from,
            "steps": [
                {
                    "step": step.label,
                    "digest_stored": step.stored,
                    "digest_again": step.again,
                    "equal": step.equal,
                    "micro_steps": step.micro_steps,
                    "seconds": round(step.seconds, 3),
                }
                for step in self.steps
            ],
            "checkpoint": self.checkpoint,
            "back_end": dict(self.back_end),
            "back_end_changes": dict(self.back_end_changes),
        }


def plan_retrain(records: Sequence[StepRecord], checkpoints: Path, *, label: int) -> RetrainPlan:
    """Find the nearest state at or before the step. Raises StoreError for steps that lack what training again needs."""
    target = find_record(records, label)
    wanted = [target]
    before = {record.version_after: record for record in records}
    while wanted[0].version_before > 0 and _checkpoint(checkpoints, before, wanted[0].version_before) is None:
        version = wanted[0].version_before
        if version not in before:
            raise StoreError(f"no step of the run made version {version}, which step {wanted[0].step + 1} began with")
        wanted.insert(0, before[version])
    sections = []
    for record in wanted:
        section = read_section(record)
        if section is None or not section.weights_after or not section.weights_before:
            raise StoreError(
                f"step {record.step + 1} cannot be trained again: its record has no replay section (digests, threads, "
                "versions), because an older Gyre wrote it. The other kinds of replay work on it"
            )
        sections.append(section)
    return RetrainPlan(
        records=tuple(wanted),
        sections=tuple(sections),
        checkpoint=_checkpoint(checkpoints, before, wanted[0].version_before),
        compare=_checkpoint(checkpoints, before, target.version_after),
    )


def retrain(cell: TrainCell, plan: RetrainPlan, steps: Iterable[StoredStep]) -> RetrainReport:
    """Train the plan's steps, as they come, again on a cell that holds its first state, and compare.

    Raises StoreError when the first weights are not those that the run had, or a stored branch is missing; GyreError
    when this Gyre packs a micro-step otherwise.
    """
    cell.role("train", epoch=cell.status()["epoch"])
    first = cell.weights()
    expected = plan.sections[0].weights_before
    started_from = str(plan.checkpoint.name) if plan.checkpoint else "the run's first weights (model.path)"
    if first["weights_digest"] != expected:
        raise StoreError(
            f"{started_from} is not what step {plan.records[0].step + 1} began with: its weights have the digest "
            f"{first['weights_digest']}, the step's record says {expected}; was it replaced?"
        )
    done = [_retrain_step(cell, section, step) for section, step in zip(plan.sections, steps, strict=True)]
    stored = plan.sections[-1].back_end
    now = first["back_end"]
    names = sorted(stored.keys() | now.keys())
    changes = {name: [stored.get(name), now.get(name)] for name in names if stored.get(name) != now.get(name)}
    return RetrainReport(
        started_from=started_from,
        steps=tuple(done),
        checkpoint=cell.compare_checkpoint(str(plan.compare)) if plan.compare else None,
        back_end=now,
        back_end_changes=changes,
    )


def _retrain_step(cell: TrainCell, section: ReplaySection, step: StoredStep) -> RetrainedStep:
    record = step.record
    branches = {(branch.rollout_id, branch.branch): branch for group in step.groups for branch in group.branches}
    cell.reset_gradients()
    seconds = 0.0
    number = 0
    for own, micro_steps in _sums(record):
        if not own:
            cell.sum_begin()
        for micro_step in micro_steps:
            missing = [key for key in micro_step if key not in branches]
            if missing:
                raise StoreError(f"step {step.label}, micro-step {number}: the store lacks branch {missing[0]}")
            result = cell.micro_step([branches[key] for key in micro_step])
            packed = [tuple((str(rollout_id), int(branch)) for rollout_id, branch in part) for part in result["keys"]]
            if packed != [micro_step]:
                raise GyreError(
                    f"step {step.label}, micro-step {number}: this Gyre packs it as {packed}, not as stored"
                )
            seconds += float(result.get("seconds", 0.0))
            number += 1
        if not own:
            cell.sum_end()
    if record.micro_steps:
        cell.optimizer_step(
            num_rollouts=int(record.denominators["rollouts"]),
            policy_version=record.version_after,
            learning_rate=section.learning_rate,
        )
    else:
        cell.skip_step(policy_version=record.version_after)
    again = cell.weights()["weights_digest"]
    return RetrainedStep(
        label=step.label,
        stored=section.weights_after,
        again=again,
        micro_steps=len(record.micro_steps),
        seconds=seconds,
    )


def _sums(record: StepRecord) -> list[tuple[bool, tuple[MicroStep, ...]]]:
    """Micro-steps that were summed together, and whether straight into the step's sum; as they were added."""
    if ACCOUNT not in record.extra:
        return [(True, tuple(record.micro_steps))]
    try:
        account = StepAccount.from_json(record.extra[ACCOUNT])
        sums = [(part.owner, tuple(account.branches[name] for name in part.micro_steps)) for part in account.sums]
    except (KeyError, ValueError) as error:
        raise StoreError(f"step {record.step + 1}: its account cannot be read: {error}") from error
    if sorted(part for _, parts in sums for part in parts) != sorted(record.micro_steps):
        raise StoreError(f"step {record.step + 1}: its account and its list of micro-steps differ")
    return sums


def _checkpoint(checkpoints: Path, made_by: Mapping[int, StepRecord], version: int) -> Path | None:
    """The checkpoint of a version, None when it is not there (any more)."""
    record = made_by.get(version)
    if record is None or not record.checkpoint:
        return None
    path = checkpoints / record.checkpoint
    return path if path.is_dir() else None
