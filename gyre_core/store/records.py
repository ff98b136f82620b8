"""What a step's commit says, enough to replay the step and to resume after it.

A StepRecord is plain data. It becomes the row of the table `steps`, with a short form in the manifest for readers that
only want to know where a run stands.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from gyre_core.errors import StoreError
from gyre_core.store.manifest import plain_json
from gyre_core.store.schema import SCHEMAS
from gyre_core.types import Json

MicroStep = tuple[tuple[str, int], ...]  # (rollout_id, branch) in the packed order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step: what was trained, with which weights, seeds and denominators.

    Example: StepRecord(step=3, version_before=3, version_after=4, groups_trained=("s0003-p07",), num_rollouts=8)
    """

    step: int  # from 0
    version_before: int  # policy version that the step's gradients were taken at
    version_after: int  # policy version after the step
    groups_trained: tuple[str, ...] = ()
    groups_dropped: Mapping[str, str] = field(default_factory=dict)  # group id -> reason
    rollouts_dropped: Mapping[str, str] = field(default_factory=dict)  # rollout id -> reason
    outcomes: Mapping[str, int] = field(default_factory=dict)  # outcome -> rollouts
    seeds: Mapping[str, int] = field(default_factory=dict)  # name -> seed
    micro_steps: tuple[MicroStep, ...] = ()  # in the order they were accumulated
    denominators: Mapping[str, float] = field(default_factory=dict)  # e.g. {"rollouts": 48}
    stats: Mapping[str, Any] = field(default_factory=dict)  # loss, grad_norm, times, ...
    checkpoint: str = ""  # where the state after this step lies; "" when none was written
    extra: Mapping[str, Any] = field(default_factory=dict)  # whatever else a writer wants kept

    def summary(self) -> Json:
        """The manifest's short form."""
        return {
            "step": self.step,
            "version_before": self.version_before,
            "version_after": self.version_after,
            "num_groups_trained": len(self.groups_trained),
            "num_groups_dropped": len(self.groups_dropped),
            "outcomes": plain_json(self.outcomes, "outcomes"),
            "checkpoint": self.checkpoint,
        }


def steps_table(records: list[StepRecord]) -> pa.Table:
    """Rows of the table `steps`; ValueError for values that JSON cannot hold (non-finite numbers become null)."""
    rows = [
        {
            "step": record.step,
            "version_before": record.version_before,
            "version_after": record.version_after,
            "checkpoint": record.checkpoint,
            "groups_trained": list(record.groups_trained),
            "record": json.dumps(plain_json(asdict(record), "step record"), sort_keys=True),
        }
        for record in records
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMAS["steps"])


def step_records(table: pa.Table) -> list[StepRecord]:
    """The inverse of `steps_table`; StoreError for a row that is no step record."""
    records = []
    for text in table.column("record").to_pylist():
        try:
            fields = json.loads(text)
            fields["groups_trained"] = tuple(fields["groups_trained"])
            fields["micro_steps"] = tuple(
                tuple((rollout_id, branch) for rollout_id, branch in micro_step) for micro_step in fields["micro_steps"]
            )
            records.append(StepRecord(**fields))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"a row of the table steps is no step record: {error}") from error
    return records
