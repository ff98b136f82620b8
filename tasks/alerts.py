"""Warnings of a run as Prefect events; infra/automations.yaml says what happens then."""

import logging

from prefect.events import emit_event

from gyre_core.alerts import heldout_warning, outcomes_warning
from gyre_core.store import StepRecord, Store

logger = logging.getLogger(__name__)

HELDOUT_FELL = "gyre.heldout.fell"
OUTCOMES_BAD = "gyre.outcomes.bad"


def warn_of_evaluations(run_id: str, store: Store) -> None:
    """Emit `gyre.heldout.fell` when the newest committed evaluation is clearly below the best one before it."""
    records = [commit.record for commit in store.commits("evaluation") if commit.record["reward"] is not None]
    if records:
        num_rewards = sum(records[-1]["outcomes"].values())
        _warn(run_id, HELDOUT_FELL, heldout_warning([float(record["reward"]) for record in records], num_rewards))


def warn_of_outcomes(run_id: str, record: StepRecord) -> None:
    """Emit `gyre.outcomes.bad` when a quarter of a step's rollouts or more were excluded."""
    _warn(run_id, OUTCOMES_BAD, outcomes_warning(record.outcomes, record.rollouts_dropped))


def _warn(run_id: str, event: str, message: str | None) -> None:
    if message is None:
        return
    logger.warning("%s", message)
    resource = {"prefect.resource.id": f"gyre.run.{run_id}", "prefect.resource.name": run_id}
    emit_event(event=event, resource=resource, payload={"run": run_id, "message": message})
