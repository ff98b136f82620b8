"""Does a stored step follow from what is stored beside it? Advantages, selection, weights and packing are computed
again and compared bit by bit.

Enters: a stored step. Leaves: one sentence for each difference; none means that the step can be told again.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from gyre_core.replay.stored import StoredGroup, StoredStep
from gyre_core.selection.batch import GroupBranches
from gyre_core.train.packing import pack_for_training
from gyre_core.train.queue_records import ACCOUNT
from gyre_core.types import Json, TrainingBranch

_ARRAYS = ("token_ids", "target", "sampler_logprobs", "weights")
_VALUES = ("group_id", "role", "advantage", "temperature", "min_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a check compared and found.

    Example: check_step(step).differences == ()
    """

    num_groups: int
    num_rollouts: int
    num_branches: int
    num_targets: int
    num_micro_steps: int
    differences: tuple[str, ...]

    def as_json(self) -> Json:
        return {
            "groups": self.num_groups,
            "rollouts": self.num_rollouts,
            "branches": self.num_branches,
            "targets": self.num_targets,
            "micro_steps": self.num_micro_steps,
            "differences": list(self.differences),
        }


def check_step(step: StoredStep) -> CheckReport:
    """Compute a step's data again from its trees and grades."""
    record = step.record
    found: list[str] = []
    included = 0
    trained: list[str] = []
    dropped: dict[str, str] = {}
    left_out: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for group in step.groups:
        built = step.select(group)
        found += _compare_branches(group, built)
        rewards = {rollout.spec.rollout_id: rollout.grade.reward for rollout in group.rollouts}
        if rewards != group.commit.record["rewards_by_rollout"]:
            found.append(f"group {group.group_id}: its commit's rewards are not those of its rollouts")
        outcomes.update(rollout.grade.outcome.value for rollout in group.rollouts)
        left_out.update(built.left_out)
        if built.dropped_reason is None:
            trained.append(group.group_id)
            included += built.num_included
        else:
            dropped[group.group_id] = built.dropped_reason
    for what, stored, again in (
        ("trained groups", sorted(record.groups_trained), sorted(trained)),
        ("dropped groups", dict(record.groups_dropped), dropped),
        ("rollouts that are left out", dict(record.rollouts_dropped), left_out),
        ("outcomes", dict(record.outcomes), dict(outcomes)),
        ("included rollouts (the denominator)", record.denominators.get("rollouts"), included),
        ("micro-steps", *_micro_steps(step)),
    ):
        if again is not None and stored != again:
            found.append(f"{what}: the step says {_short(stored)}, its trees give {_short(again)}")
    branches = [branch for group in step.groups for branch in group.branches]
    return CheckReport(
        num_groups=len(step.groups),
        num_rollouts=sum(len(group.rollouts) for group in step.groups),
        num_branches=len(branches),
        num_targets=sum(int(branch.target.sum()) for branch in branches),
        num_micro_steps=len(record.micro_steps),
        differences=tuple(found),
    )


def differing_fields(first: TrainingBranch, second: TrainingBranch) -> list[str]:
    """Names of the fields in which two branches are not equal, arrays bit by bit."""
    names = [name for name in _VALUES if getattr(first, name) != getattr(second, name)]
    return names + [
        name
        for name in _ARRAYS
        if not np.array_equal(getattr(first, name).view(np.uint8), getattr(second, name).view(np.uint8))
    ]


def _compare_branches(group: StoredGroup, built: GroupBranches) -> list[str]:
    stored = {(branch.rollout_id, branch.branch): branch for branch in group.branches}
    again = {(branch.rollout_id, branch.branch): branch for branch in built.branches}
    found = []
    for key in sorted(stored.keys() | again.keys()):
        name = f"branch {key[1]} of {key[0]}"
        if key not in again:
            found.append(f"{name} is stored and would not be selected")
        elif key not in stored:
            found.append(f"{name} is not stored and would be selected")
        elif names := differing_fields(stored[key], again[key]):
            found.append(f"{name}: {', '.join(names)} differ")
    return found


def _micro_steps(step: StoredStep) -> tuple[list[Any], list[Any] | None]:
    """The micro-steps as stored, and as packing gives them (None without the settings it was done with).

    Cells that share a step split its last micro-steps by their speeds: then which branches they hold is compared.
    """
    stored: list[Any] = list(step.record.micro_steps)
    if step.section is None:
        return stored, None
    train = step.section.train
    packed: list[Any] = []
    for group in step.groups:
        if group.group_id in step.record.groups_trained:
            for part in pack_for_training(group.branches, train):
                packed.append(tuple((key.rollout_id, key.branch) for key in part.branches))
    if ACCOUNT in step.record.extra:
        return sorted(chain.from_iterable(stored)), sorted(chain.from_iterable(packed))
    return stored, packed


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."
