"""Cells on other machines: each host is a flow run that a Prefect worker of its machine takes.

    fleet -> WorkerLauncher --deployment, queue named as the machine's address--> worker -> flows/cell.py -> host

Enters: CellSettings whose `host` is the machine's address. Leaves: a `HostProcess` that the fleet watches and ends like
a local one. What it needs: the run's folder on a file system that the machines share, and on each machine a
process worker of `scheduler.work_pool` that serves the work queue named as its address. No secret passes through
Prefect: the flow run gets the path of a file that the run's user alone can read.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.flows import load_flow_from_entrypoint
from prefect.states import Cancelled, Cancelling
from prefect.types.entrypoint import EntrypointType

from gyre_core.cells.fleet_launch import HostProcess, LocalLauncher, write_secret
from gyre_core.cells.settings import CellSettings, read_cell_settings
from gyre_core.errors import EngineError, GyreError, SetupError

logger = logging.getLogger(__name__)

ENTRYPOINT = "flows.cell.cell"
_LOOK_S = 1.0  # between two looks at a flow run's state
_CANCEL_S = 45.0  # a worker looks for cancelled runs every few seconds, a host has 20 s to end
_POLL_S = 0.2  # between two looks at the host's process


class WorkerLauncher:
    """Starts cell hosts through a work pool.

    Example: launch = WorkerLauncher(pool="gyre-cells", run_id="r1", work=Path("work"), logs=Path("logs"))
    """

    def __init__(self, *, pool: str, run_id: str, work: Path, logs: Path) -> None:
        """Makes the pool and the deployment where they are not there yet."""
        self._run_id, self._work, self._logs = run_id, work, logs
        with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process", description="cell hosts"))
        deployment = load_flow_from_entrypoint(ENTRYPOINT, use_placeholder_flow=False).to_deployment(
            name=pool, work_pool_name=pool, entrypoint_type=EntrypointType.MODULE_PATH
        )
        if not isinstance(deployment, RunnerDeployment):
            raise SetupError("cells are deployed from ordinary code, not from inside an event loop")
        deployment.apply()
        self._deployment = f"cell/{pool}"

    def __call__(self, settings: CellSettings) -> HostProcess:
        """Ask for it; raises EngineError when the server does not take the flow run."""
        file = self._work / f"{settings.cell_id}.launch.json"
        write_secret(file, settings.model_dump_json())
        name = f"{self._run_id} / {settings.cell_id}"
        try:
            flow_run: Any = run_deployment(
                self._deployment,
                parameters={"name": name, "settings_file": str(file), "logs": str(self._logs)},
                work_queue_name=settings.host,
                timeout=0,
                as_subflow=False,
            )
        except Exception as error:
            raise EngineError(
                f"{settings.cell_id} could not be asked for through {self._deployment}: {error}"
            ) from error
        return WorkerHost(flow_run.id, name=name, file=file, log_path=self._logs / f"{settings.cell_id}.log")


class WorkerHost:
    """A cell host behind its flow run."""

    def __init__(self, flow_run_id: UUID, *, name: str, file: Path, log_path: Path) -> None:
        self._id, self._name, self._file, self._log_path = flow_run_id, name, file, log_path
        self._state: State | None = None
        self._looked_s = -_LOOK_S

    @property
    def pid(self) -> int:
        """Of the flow run's process, on its own machine; 0 before a worker has taken it."""
        with get_client(sync_client=True) as client:
            told = client.read_flow_run(self._id).infrastructure_pid or ""
        return int(told.rpartition(":")[2] or 0)

    @property
    def log_path(self) -> Path:
        return self._log_path

    @property
    def exit_code(self) -> int | None:
        """Known by its state alone: 0 completed, 1 failed or crashed, None while it runs."""
        state = self._look()
        if state is None or not state.is_final():
            return None
        return 0 if state.is_completed() else 1

    def running(self) -> bool:
        """Whether it has not ended. A server that does not answer is no reason to think that."""
        state = self._look()
        return state is None or not state.is_final()

    def stop(self, *, grace_s: float) -> None:
        """Cancel the flow run; returns when the worker has ended it. One that no worker has taken is gone at once."""
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self._id).state
            if state is not None and not state.is_final():
                taken = state.is_running() or state.is_pending()
                client.set_flow_run_state(self._id, Cancelling() if taken else Cancelled(), force=not taken)
                deadline_s = time.monotonic() + grace_s + _CANCEL_S
                while taken and not self._ended(client.read_flow_run(self._id).state):
                    if time.monotonic() > deadline_s:
                        logger.warning("%s was cancelled and has not ended: is a worker there?", self._name)
                        break
                    time.sleep(_LOOK_S)
        self._file.unlink(missing_ok=True)

    def _ended(self, state: State | None) -> bool:
        return state is not None and state.is_final()

    def _look(self) -> State | None:
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            try:
                with get_client(sync_client=True) as client:
                    self._state = client.read_flow_run(self._id).state
            except Exception as error:
                logger.warning("the state of %s is not known now: %r", self._name, error)
        return self._state


def host_cell(settings_file: Path, logs: Path, *, name: str) -> None:
    """Run a cell host here until it ends; ends it when this ends, whatever ends it. Raises GyreError when it fails."""
    settings = read_cell_settings(settings_file)
    process = LocalLauncher(work=settings_file.parent, logs=logs)(settings)
    logger.info("%s runs as process %d, log %s", name, process.pid, process.log_path)
    try:
        while process.running():
            time.sleep(_POLL_S)
    finally:
        process.stop(grace_s=20.0)
    if process.exit_code:
        raise GyreError(f"{name} ended with exit code {process.exit_code}: see {process.log_path}")
