"""A committed step as its store tells it: the record, its groups' rollouts and branches, the settings in force."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyre_core.config import RunConfig, SelectionConfig
from gyre_core.errors import StoreError
from gyre_core.replay.section import ReplaySection, read_section
from gyre_core.selection.batch import GroupBranches, build_branches
from gyre_core.store import Commit, StepRecord, Store, StoredRollout
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Grade, RolloutSpec, TrainingBranch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredGroup:
    """One group of a step, dropped ones included.

    Example: step.groups[0].rollouts[0].grade.reward
    """

    group_id: str
    commit: Commit
    rollouts: tuple[StoredRollout, ...]
    branches: tuple[TrainingBranch, ...]  # as they were selected

    @property
    def temperature(self) -> float:
        return float(self.commit.record["temperature"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredStep:
    """One step. `section` is None for a step of a Gyre that wrote none.

    Example: read_stored_step(store, config, label=3).groups
    """

    record: StepRecord
    section: ReplaySection | None
    selection: SelectionConfig  # in force when the step was taken
    max_staleness: int
    groups: tuple[StoredGroup, ...]  # by id

    @property
    def label(self) -> int:
        """The step's number for people, from 1."""
        return self.record.step + 1

    def rollouts(self) -> Iterator[tuple[StoredGroup, StoredRollout]]:
        """Every rollout with its group."""
        return ((group, rollout) for group in self.groups for rollout in group.rollouts)

    def select(
        self, group: StoredGroup, *, selection: SelectionConfig | None = None, grades: dict[str, Grade] | None = None
    ) -> GroupBranches:
        """Advantages and branches of a group computed again, with other settings or other grades."""
        grades = grades or {}
        members = [
            _Member(rollout.spec, rollout.trajectory, grades.get(rollout.spec.rollout_id, rollout.grade))
            for rollout in group.rollouts
        ]
        return build_branches(
            members,
            selection=selection or self.selection,
            run_seed=self.record.seeds["run"],
            trainer_version=self.record.version_before,
            max_staleness=self.max_staleness,
            temperature=group.temperature,
        )


class _Member:
    """A member of a group, perhaps with another grade."""

    def __init__(self, spec: RolloutSpec, trajectory: Trajectory, grade: Grade) -> None:
        self.spec, self.trajectory, self.grade = spec, trajectory, grade


def read_step_records(store: Store) -> tuple[StepRecord, ...]:
    """A run's step records, in order; StoreError when it has none."""
    records = tuple(sorted(store.read_steps(), key=lambda record: record.step))
    if not records:
        raise StoreError(f"{store.storage.url} holds no step yet: there is nothing to replay")
    return records


def find_record(records: Sequence[StepRecord], label: int) -> StepRecord:
    """The record of step `label` (from 1, as `gyre inspect` counts); StoreError with the steps that there are."""
    found = [record for record in records if record.step + 1 == label]
    if not found:
        first, last = records[0].step + 1, records[-1].step + 1
        raise StoreError(f"there is no step {label}: the run has steps {first} to {last} (`gyre inspect` lists them)")
    return found[-1]


def read_stored_step(store: Store, config: RunConfig, record: StepRecord) -> StoredStep:
    """Read a step's groups; StoreError when one is missing, damaged or inconsistent.

    A step without a replay section has the settings of the run's configuration, which may not change on a resume.
    """
    section = read_section(record)
    commits = store.commits()
    groups = []
    for group_id, seq in sorted(record.extra.get("groups", {}).items()):
        if not 0 <= seq < len(commits) or commits[seq].record.get("group_id") != group_id:
            raise StoreError(f"step {record.step + 1} names commit {seq} for group {group_id}, which it is not")
        commit = commits[seq]
        groups.append(
            StoredGroup(
                group_id=group_id,
                commit=commit,
                rollouts=tuple(store.read_rollouts(commit)),
                branches=tuple(store.read_branches(commit)),
            )
        )
    return StoredStep(
        record=record,
        section=section,
        selection=section.selection if section else config.selection,
        max_staleness=section.max_staleness if section else config.scheduler.staleness,
        groups=tuple(groups),
    )
