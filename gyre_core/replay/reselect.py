"""A step's selection with other settings: what would be trained, how it would weigh, how long it would take.

Enters: a stored step and selection settings. Leaves: two summaries, as it was and as it would be. Rewards, advantages
and trees stay as they are stored, unless the settings themselves change advantages (min_group, advantage_eps).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gyre_core.config import SelectionConfig, TrainConfig
from gyre_core.errors import ConfigError
from gyre_core.replay.stored import StoredStep
from gyre_core.train.packing import pack_for_training
from gyre_core.types import Json, TrainingBranch

_SHORT_NAMES = {"J": "max_branches"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSummary:
    """What one selection of a step comes to.

    Example: summarise([group.branches for group in step.groups], train, tokens_per_s=900.0).targets
    """

    rollouts: int  # with a branch
    branches: int
    targets: int  # trained tokens
    tokens_in_branches: int  # summed over branches: what training without shared prefixes computes
    unique_tokens: int  # that training computes: packed, branches with advantage 0 left out
    micro_steps: int
    train_s: float | None  # forward and backward at the step's own speed; None when that is not stored
    branches_by_role: dict[str, int] = field(default_factory=dict)  # role of a branch: of its last node
    targets_by_role: dict[str, int] = field(default_factory=dict)
    weights_by_role: dict[str, float] = field(default_factory=dict)  # a rollout's weights sum to 1

    def as_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reselection:
    """Two selections of one step.

    Example: reselect(step, selection, train).after.branches
    """

    selection_before: SelectionConfig
    selection_after: SelectionConfig
    before: SelectionSummary
    after: SelectionSummary
    branches_kept: int  # equal tokens and targets in both
    rollouts_changed: int  # with other branches or targets
    groups_dropped_before: int
    groups_dropped_after: int

    def as_json(self) -> Json:
        return {
            "selection_before": self.selection_before.model_dump(mode="json"),
            "selection_after": self.selection_after.model_dump(mode="json"),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "branches_kept": self.branches_kept,
            "rollouts_changed": self.rollouts_changed,
            "groups_dropped_before": self.groups_dropped_before,
            "groups_dropped_after": self.groups_dropped_after,
        }


def parse_selection(base: SelectionConfig, settings: Sequence[str], role_order: str | None) -> SelectionConfig:
    """`base` with `NAME=VALUE` settings (J is max_branches) and a comma-separated role order; raises ConfigError."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = _SHORT_NAMES.get(name.strip(), name.strip())
        if not equals or name not in SelectionConfig.model_fields:
            known = ", ".join(["J", *SelectionConfig.model_fields])
            raise ConfigError(f"{setting!r} is no selection setting: write NAME=VALUE with one of {known}")
        changes[name] = value.split(",") if name == "role_order" else value.strip()
    if role_order is not None:
        changes["role_order"] = role_order.split(",")
    if "role_order" in changes:
        changes["role_order"] = [role.strip() for role in changes["role_order"]]
    try:
        return SelectionConfig.model_validate({**base.model_dump(), **changes}, strict=False)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"these selection settings cannot be used: {told}") from error


def reselect(step: StoredStep, selection: SelectionConfig, train: TrainConfig) -> Reselection:
    """Select a stored step again with other settings and compare; `train` says how branches are packed."""
    before = [group.branches for group in step.groups]
    built = [step.select(group, selection=selection) for group in step.groups]
    after = [group.branches for group in built]
    speed = _tokens_per_s(step)
    old, new = (_by_rollout([branch for group in groups for branch in group]) for groups in (before, after))
    names = old.keys() | new.keys()
    return Reselection(
        selection_before=step.selection,
        selection_after=selection,
        before=summarise(before, train, tokens_per_s=speed),
        after=summarise(after, train, tokens_per_s=speed),
        branches_kept=sum(len(old.get(name, set()) & new.get(name, set())) for name in names),
        rollouts_changed=sum(old.get(name) != new.get(name) for name in names),
        groups_dropped_before=len(step.record.groups_dropped),
        groups_dropped_after=sum(group.dropped_reason is not None for group in built),
    )


def summarise(
    groups: Sequence[Sequence[TrainingBranch]], train: TrainConfig, *, tokens_per_s: float | None
) -> SelectionSummary:
    """Count and pack the branches of a step's groups."""
    by_role: dict[str, Counter[str]] = {"branches": Counter(), "targets": Counter()}
    weights: dict[str, float] = {}
    branches = [branch for group in groups for branch in group]
    for branch in branches:
        by_role["branches"][branch.role.value] += 1
        by_role["targets"][branch.role.value] += int(branch.target.sum())
        weight = float(branch.weights.sum(dtype="float64"))
        weights[branch.role.value] = weights.get(branch.role.value, 0.0) + weight
    packed = [part for group in groups for part in pack_for_training(group, train)]
    unique_tokens = sum(part.num_tokens for part in packed)
    return SelectionSummary(
        rollouts=len({branch.rollout_id for branch in branches}),
        branches=len(branches),
        targets=sum(by_role["targets"].values()),
        tokens_in_branches=sum(len(branch.token_ids) for branch in branches),
        unique_tokens=unique_tokens,
        micro_steps=len(packed),
        train_s=round(unique_tokens / tokens_per_s, 3) if tokens_per_s else None,
        branches_by_role=dict(by_role["branches"]),
        targets_by_role=dict(by_role["targets"]),
        weights_by_role={role: round(weight, 6) for role, weight in weights.items()},
    )


def _tokens_per_s(step: StoredStep) -> float | None:
    """Unique tokens a second of the step's micro-steps, forward and backward."""
    tokens, seconds = (float(step.record.stats.get(name) or 0.0) for name in ("num_tokens", "duration_s"))
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _by_rollout(branches: Sequence[TrainingBranch]) -> dict[str, set[tuple[bytes, bytes]]]:
    found: dict[str, set[tuple[bytes, bytes]]] = {}
    for branch in branches:
        found.setdefault(branch.rollout_id, set()).add((branch.token_ids.tobytes(), branch.target.tobytes()))
    return found
