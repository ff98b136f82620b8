"""Flow runs of killed processes: Prefect cannot know that they are dead, the run's owner can."""

import logging

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed

logger = logging.getLogger(__name__)


def close_dead_runs(run_id: str) -> int:
    """Mark earlier flow runs of `run_id` that still seem to run as crashed; returns how many.

    The caller owns the run's folder, so no other process can be running it.
    """
    current = flow_run.get_id()
    unfinished = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])),
    )
    closed = 0
    with get_client(sync_client=True) as client:
        for dead in client.read_flow_runs(flow_run_filter=unfinished):
            if str(dead.id) != str(current):
                state = Crashed(message="its process ended; the run was resumed by another flow run")
                client.set_flow_run_state(dead.id, state, force=True)
                closed += 1
    if closed:
        logger.info("%d flow run(s) of %s were left by killed processes: marked as crashed", closed, run_id)
    return closed
