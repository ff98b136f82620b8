"""The section `replay` of a step's record: what the run's configuration and machine were when the step was taken.

The rest of what a replay needs is in the record and in the groups' commits: rollouts, selections, the order of
micro-steps, denominators, seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gyre_core.config import RunConfig, SelectionConfig, TrainConfig
from gyre_core.errors import StoreError
from gyre_core.store import StepRecord
from gyre_core.types import Json

REPLAY = "replay"  # its key in StepRecord.extra
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySection:
    """What a step was taken with.

    Example: read_section(record).learning_rate
    """

    train: TrainConfig  # loss, packing, optimizer
    selection: SelectionConfig
    max_staleness: int
    learning_rate: float  # this step's
    weights_before: str  # digest of the trainer's weights
    weights_after: str
    back_end: Mapping[str, Any]  # versions, device, threads


def replay_section(
    config: RunConfig,
    *,
    learning_rate: float,
    weights_before: str,
    weights_after: str,
    back_end: Mapping[str, Any],
) -> Json:
    """The section as plain JSON."""
    return {
        "version": _VERSION,
        "train": config.train.model_dump(mode="json"),
        "selection": config.selection.model_dump(mode="json"),
        "max_staleness": config.scheduler.staleness,
        "learning_rate": learning_rate,
        "weights_before": weights_before,
        "weights_after": weights_after,
        "back_end": dict(back_end),
    }


def read_section(record: StepRecord) -> ReplaySection | None:
    """The section of a step, None for a step of a Gyre that wrote none; StoreError for one that cannot be read."""
    section = record.extra.get(REPLAY)
    if section is None:
        return None
    try:
        if section["version"] != _VERSION:
            raise ValueError(f"it has version {section['version']!r}, this Gyre reads version {_VERSION}")
        return ReplaySection(
            train=TrainConfig.model_validate(section["train"]),
            selection=SelectionConfig.model_validate(section["selection"]),
            max_staleness=int(section["max_staleness"]),
            learning_rate=float(section["learning_rate"]),
            weights_before=str(section["weights_before"]),
            weights_after=str(section["weights_after"]),
            back_end=dict(section["back_end"]),
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise StoreError(f"step {record.step}: its replay section cannot be read: {error}") from error
