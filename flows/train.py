"""The flow `train`: one run of training, resumable at any step.

    for each step:
        dispatch_rollouts -> RolloutStream (execute, grade, process, complete) --groups--> stream_train
                             rebalance_cells moves cells beside both           --> publish_weights -> commit_step

Who waits for whom: training takes each group as it becomes whole, on the cells that the scheduler moves to it while the
others still serve; the optimizer step waits for the step's last group, publication for the optimizer step, the next
dispatch for the commit. With `scheduler.staleness` = k the rollouts of the k next steps run meanwhile. What a killed
process leaves is whole: groups are committed as they complete, the step as its last act; resuming reads both and goes
on with what is missing.
"""

import logging
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture

from flows.evaluate import evaluate_heldout
from flows.rollout import TASK_RUNNER, RolloutStream, stream_of
from gyre_core.config import RunConfig
from gyre_core.errors import GyreError
from gyre_core.store import StepRecord
from gyre_core.time_box import TimeBox
from tasks.context import Box, RunContext
from tasks.publishing import commit_step, publish_weights
from tasks.rollouts import batches_ahead, dispatch_rollouts, next_rollouts
from tasks.runs import open_run
from tasks.scheduling import rebalance_cells
from tasks.spans import record_step
from tasks.summary import report_step, report_totals, run_summary
from tasks.task_runner import forget_task_states
from tasks.training import Inbox, TrainedStep, stream_train
from tasks.trajectories import CompleteGroup, stored_groups

logger = logging.getLogger(__name__)


@flow(
    name="train",
    flow_run_name="{run_id}",
    task_runner=TASK_RUNNER,
    validate_parameters=False,
    persist_result=False,
)
def train(
    config: RunConfig, run_id: str, resume: bool = False, quiet: bool = False, max_wall_s: float | None = None
) -> dict[str, Any]:
    """Train from the run's last committed step to `train.steps`; returns the summary that `gyre train` prints.

    With `max_wall_s` the run stops at the step boundary after which another step would not end in time; `finished`
    tells whether it got to its end, and resuming it goes on.
    """
    started = time.monotonic()
    box = TimeBox(max_wall_s)
    with open_run(config, Path(config.runs_dir), run_id, resume=resume, quiet=quiet) as run:
        report_totals(run)
        if run.policy_version == 0:
            evaluate_heldout(run, "before", policy_version=0)
        finished = True
        for step in range(run.policy_version, config.train.steps):
            finished = box.has_room()
            if not finished:
                break
            train_step(run, step)
        if finished:
            evaluate_heldout(run, "after", policy_version=config.train.steps)
        report_totals(run)
        return {**run_summary(run), "finished": finished, "wall_s": round(time.monotonic() - started, 1)}


def train_step(run: RunContext, step: int) -> StepRecord:
    """One step, from dispatch to commit. Rollouts of later steps may be dispatched with it, and go on after it."""
    label = step + 1
    started, started_s = time.monotonic(), time.time()
    stream, scheduling = stream_of(run), run.scheduling
    batches = [dispatch_batch(run, stream, batch, label) for batch in batches_ahead(run, step)]
    ids = batches[0]
    scheduling.begin_step(
        step,
        groups=len(ids),
        next_ready=sum(map(stream.num_complete, batches[1:])),
        pending_dispatch=next_rollouts(run, step),
    )
    inbox = Inbox()
    try:
        rebalancing = stream.beside(rebalance_cells.submit(run, label))
        training = stream.beside(stream_train.submit(run, label, Box(inbox)))
        groups: list[CompleteGroup] = []
        for group in stream.groups(ids):
            groups.append(group)
            inbox.put(group)
            scheduling.burst.group_ready()
        inbox.close()
        rollout_s = time.monotonic() - started
        while True:
            run.progress.begin(f"step {label}: training")
            trained = stream.result(training)
            run.progress.begin(f"step {label}: publishing")
            generation = run.services.fleet.core_generation
            try:
                published = stream.result(stream.beside(publish_weights.submit(run, label, trained)))
                break
            except GyreError as error:
                if run.services.fleet.core_generation == generation:
                    raise
                logger.warning("step %d is trained again: the core died before it was saved (%s)", label, error)
                training = train_again(run, stream, label, groups)
        record = commit_step(
            run, label, Box(groups), trained, published, rollout_s=rollout_s, step_s=time.monotonic() - started
        ).value
        scheduling.burst.end()
        stream.result(rebalancing)
    except BaseException:
        scheduling.stop()  # else the tasks beside would wait for ever, and this flow for them
        inbox.close()
        raise
    record_step(run, record, groups, started_s)
    report_step(run, record)
    forget_task_states()
    every = run.config.evaluate.every
    if every and label % every == 0 and label < run.config.train.steps:
        evaluate_heldout(run, f"step-{label}", policy_version=label)
    return record


def train_again(
    run: RunContext, stream: RolloutStream, label: int, groups: list[CompleteGroup]
) -> PrefectFuture[Box[TrainedStep]]:
    """Train a step's groups once more, from the weights that the step began with."""
    run.cell_version = run.policy_version
    run.scheduling.burst.reopen(groups=len(groups))
    inbox = Inbox()
    for group in groups:
        inbox.put(group)
    inbox.close()
    return stream.beside(stream_train.submit(run, label, Box(inbox)))


def dispatch_batch(run: RunContext, stream: RolloutStream, batch: int, label: int) -> list[str]:
    """Dispatch the groups of step `batch` that are neither stored nor under way; returns the ids of all its groups."""
    planned = dispatch_rollouts(run, batch, label).value
    ids = [group[0].group_id for group in planned]
    if not any(stream.knows(group_id) for group_id in ids):
        stored = stored_groups(run, batch)
        stream.put(stored.values())
        missing = [group for group in planned if group[0].group_id not in stored]
        run.progress.begin(f"step {label}: rollouts", num_rollouts=sum(len(group) for group in missing))
        stream.add(missing)
    return ids
