"""What a flow run of a deployment finds out before it does anything, and how it ends with its worker.

Enters: a configuration file, a run's name, the deployment it belongs to. Leaves: whether to start, go on, or leave it.
Invariants: a run that exists goes on with its own configuration; a run that crashes again and again without a new step
is given up; a flow run never outlives the worker that started it, so that its place is free for the next one.
"""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import deployment
from prefect.types._datetime import DateTime, create_datetime_instance

from gyre_core.config import RunConfig, load_run_config
from gyre_core.errors import GyreError, StoreError
from gyre_core.resume import is_resumable, resumed_config
from gyre_core.run_folder import RunFolder
from gyre_core.store.run_store import open_run_store

logger = logging.getLogger(__name__)

_WATCH_S = 1.0  # between two looks at the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """What a flow run of the deployment `train` is to do.

    Example: plan_training(Path("run.toml"), "nightly", []).resume
    """

    config: RunConfig
    folder: RunFolder
    resume: bool  # the run exists


def plan_training(config_path: Path, run: str, overrides: list[str]) -> PlannedTraining:
    """Start the run, or go on with its own configuration; raises ConfigError."""
    config = load_run_config(config_path, overrides)
    folder = RunFolder(config.runs_dir / run)
    if not (folder.path / "run.json").is_file():
        return PlannedTraining(config=config, folder=folder, resume=False)
    _, config = resumed_config(config, run, [override for override in overrides if is_resumable(override)])
    return PlannedTraining(config=config, folder=folder, resume=True)


def newest_checkpoint_of(config: RunConfig, run: str) -> Path | None:
    """The checkpoint that the run's newest committed step names, None while it has none."""
    folder = RunFolder(config.runs_dir / run)
    if not (folder.path / "run.json").is_file():
        return None
    try:
        _, store = open_run_store(folder)
    except StoreError:
        return None
    step = store.latest("step")
    return None if step is None else folder.checkpoints / str(step.record["checkpoint"])


def refuse_endless_crashes(folder: RunFolder, max_crashes: int) -> None:
    """Raise GyreError when this deployment crashed `max_crashes` times since the run's newest step was committed.

    The flow run then fails, which the automation that restarts crashed runs leaves alone.
    """
    deployment_id = _own_deployment()
    if deployment_id is None or not (folder.path / "run.json").is_file():
        return
    try:
        _, store = open_run_store(folder)
        step = store.latest("step")
    except StoreError:
        step = None
    since_s = step.created_s if step is not None else float(folder.identity()["created_s"])
    crashed = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        start_time=FlowRunFilterStartTime(after_=_utc(since_s)),
    )
    with get_client(sync_client=True) as client:
        crashes = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
            flow_run_filter=crashed,
            limit=max_crashes,
        )
    if len(crashes) >= max_crashes:
        raise GyreError(
            f"run {folder.run_id} crashed {len(crashes)} times since its newest step was committed; mend what its logs "
            "name, then run the deployment with a larger max_crashes, or delete its crashed flow runs"
        )


def _utc(epoch_s: float) -> DateTime:
    return cast(DateTime, create_datetime_instance(datetime.fromtimestamp(epoch_s, UTC)))


def _own_deployment() -> UUID | None:
    found = deployment.id
    return None if found is None else UUID(str(found))


def pause_own_schedules(reason: str) -> None:
    """Switch off the schedules of the deployment that this flow run belongs to."""
    deployment_id = _own_deployment()
    if deployment_id is None:
        return
    with get_client(sync_client=True) as client:
        for schedule in client.read_deployment_schedules(deployment_id):
            if schedule.active:
                client.update_deployment_schedule(deployment_id, schedule.id, active=False)
                logger.info("%s: its schedule is switched off", reason)


def end_with_worker() -> None:
    """From now on this process ends (SIGTERM) when the worker that started it has ended. Only in a worker's process."""
    worker = os.getppid()
    if os.environ.get("PREFECT__FLOW_RUN_ID") is None or worker <= 1 or _watched.is_set():
        return
    _watched.set()

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(_WATCH_S)
        logger.warning("the worker is gone: this flow run ends")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="worker-watch", daemon=True).start()


_watched = threading.Event()
