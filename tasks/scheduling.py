"""The task that moves cells between rollout and training: it asks the policy, and does what the plan says."""

import logging
from dataclasses import asdict

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.proxy.pool import ProxyPool
from gyre_core.proxy.settings import EngineEntry
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import POLICIES, CellView, Move, Snapshot
from tasks.context import Box, RunContext
from tasks.threads import run_async

logger = logging.getLogger(__name__)


@task(name="rebalance_cells", task_run_name="step {step_label} / rebalance", cache_policy=NO_CACHE)
def rebalance_cells(
    run: RunContext, step_label: int, *, dispatched: int, finished: int, ready_groups: int, untrained_groups: int
) -> Box[list[Move]]:
    """Apply the policy's moves to the cell; every move is an event with its reason. Returns the moves made."""
    status = run.services.cell.status()
    cell = CellView(cell_id=status["cell_id"], state=CellState(status["state"]), slots=run.config.rollout.slots)
    snapshot = Snapshot(
        cells=(cell,),
        dispatched=dispatched,
        finished=finished,
        ready_groups=ready_groups,
        untrained_groups=untrained_groups,
    )
    plan = POLICIES[run.config.scheduler.policy](snapshot)
    for refusal in plan.refusals:
        logger.info("step %d: %s stays, not to %s: %s", step_label, refusal.cell_id, refusal.to, refusal.reason)
    for move in plan.moves:
        _apply(run, move, epoch=status["epoch"])
        logger.info("step %d: %s to %s: %s", step_label, move.cell_id, move.to, move.reason)
    run.decisions.append(
        {
            "step": step_label - 1,
            "snapshot": asdict(snapshot),
            "moves": [asdict(move) for move in plan.moves],
            "refusals": [asdict(move) for move in plan.refusals],
        }
    )
    return Box(list(plan.moves))


def open_engines(run: RunContext) -> None:
    """Let the proxies send calls to the cell's engine, at the published version."""
    status = run.services.cell.status()
    slots = run.config.rollout.slots
    _set_engines(run, [EngineEntry(url=status["engine_url"], slots=slots, api_key=status["engine_key"])])


def _apply(run: RunContext, move: Move, *, epoch: int) -> None:
    if move.to == "train":
        _set_engines(run, [])  # no new calls before the cell is taken away
        run.mark_span("rollout")
    result = run.services.cell.role(move.to, epoch=epoch)
    if move.to == "rollout":
        open_engines(run)
        run.mark_span("training")
    run.reporter.role_change(move.cell_id, move.to, move.reason, epoch=result["epoch"])


def _set_engines(run: RunContext, engines: list[EngineEntry]) -> None:
    async def work() -> None:
        async with ProxyPool(run.services.proxies) as proxy:
            await proxy.set_engines(engines, policy_version=run.cell_version)

    run_async(work)
