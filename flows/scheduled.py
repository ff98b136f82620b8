"""The flows as a team's server runs them: by schedule, by hand from the UI, again after a crash.

Their parameters are plain values or pydantic models, so the UI shows them as a form. They find out what there is to do
and then do what the flows `train`, `evaluate`, `replay` and `simulate` do, as one flow run.

    train     start the run, or go on where it stopped; nothing when it is finished or another process has it
    evaluate  held-out reward of a run's newest checkpoint, or of the configuration's model
    replay    a stored step told again
    simulate  what policies do as one parameter of a preset moves, before a cluster is paid for
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.states import Cancelled, Completed

from flows import evaluate as evaluations
from flows import replay as replays
from flows import simulate as simulations
from flows import train as trainings
from flows.rollout import TASK_RUNNER
from gyre_core.config import SelectionConfig, load_run_config
from gyre_core.errors import RunOwnedError
from gyre_core.resume import is_finished
from gyre_core.types import Json
from tasks.scheduled_runs import (
    end_with_worker,
    newest_checkpoint_of,
    pause_own_schedules,
    plan_training,
    refuse_endless_crashes,
)

logger = logging.getLogger(__name__)


@flow(name="train", flow_run_name="{run}", task_runner=TASK_RUNNER, persist_result=False)
def train(
    run: str,
    config: str,
    overrides: list[str] | None = None,
    max_wall_s: float | None = None,
    max_crashes: int = 5,
) -> Any:
    """Train run `run` from its last committed step.

    Args:
        run: the run's name; its folder lies in the configuration's runs_dir
        config: path of the configuration (TOML), as the worker sees it
        overrides: "key.path=value" each, of the run's start; later only what may change while a run goes on counts
        max_wall_s: stop at the step boundary that still fits into so many seconds; the next schedule goes on
        max_crashes: give up after so many crashes in a row without a new step
    """
    with _in_worker():
        path, given = Path(config), list(overrides or [])
        planned = plan_training(path, run, given)
        if planned.resume and is_finished(planned.folder, planned.config):
            pause_own_schedules(f"run {run} is finished")
            return Completed(message=f"run {run} is finished: all {planned.config.train.steps} steps are committed")
        refuse_endless_crashes(planned.folder, max_crashes)
        try:
            return trainings.train.fn(planned.config, run, resume=planned.resume, quiet=True, max_wall_s=max_wall_s)
        except RunOwnedError as error:
            return Cancelled(message=str(error))


@flow(name="evaluate", flow_run_name="{run} evaluation", task_runner=TASK_RUNNER, persist_result=False)
def evaluate(run: str, config: str, overrides: list[str] | None = None) -> Json:
    """Held-out reward of a run's newest checkpoint; of the configuration's model while it has none.

    Args:
        run: the run whose checkpoint is measured
        config: path of the configuration (TOML), as the worker sees it
        overrides: "key.path=value" each
    """
    with _in_worker():
        loaded = load_run_config(Path(config), overrides or [])
        checkpoint = newest_checkpoint_of(loaded, run)
        evaluation = time.strftime(f"{run}-eval-%Y%m%d-%H%M%S")
        path = None if checkpoint is None else str(checkpoint.resolve())
        return evaluations.evaluate.fn(loaded, evaluation, checkpoint=path, quiet=True)


@flow(name="replay", flow_run_name="{run} step {step} {mode}", task_runner=replays.TASK_RUNNER, persist_result=False)
def replay(
    run: str,
    step: int,
    mode: replays.Mode = "check",
    selection: SelectionConfig | None = None,
    problems: str | None = None,
    runs_dir: str = "runs",
) -> Json:
    """Tell a stored step again, without rollouts; nothing is written to the run's store.

    Args:
        run: the run
        step: its step, from 1
        mode: check, reselect (other selection), regrade (today's verifiers) or retrain (must give the same bits)
        selection: with reselect: the selection to compare with the stored one
        problems: with regrade: another folder of problems
        runs_dir: where the run's folder lies
    """
    with _in_worker():
        settings = [] if selection is None else _as_settings(selection)
        order = None if selection is None else ",".join(role.value for role in selection.role_order)
        return replays.replay.fn(
            run, step, mode, runs_dir=runs_dir, settings=settings, role_order=order, problems=problems
        )


@flow(
    name="simulate",
    flow_run_name="{preset} {parameter}",
    task_runner=simulations.TASK_RUNNER,
    persist_result=False,
)
def simulate(
    preset: Literal["terminal", "deepswe", "nl2repo-122b", "nl2repo-2.4t"] = "nl2repo-2.4t",
    parameter: str = "tail",
    values: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 3.0),
    steps: int = 12,
    seed: int = 0,
) -> Json:
    """Hours of every policy as one parameter moves; a table and a picture are the artifacts.

    Args:
        preset: the workload and cluster (docs/simulator.md)
        parameter: cells, tail, phi, or a field such as costs.beta_s or cluster.slots
        values: what it is set to, one after the other
        steps: optimizer steps that are simulated
        seed: of the rollouts that are drawn
    """
    with _in_worker():
        return simulations.simulate.fn(preset, parameter, tuple(values), steps=steps, seed=seed)


def _as_settings(selection: SelectionConfig) -> list[str]:
    return [f"{name}={value}" for name, value in selection.model_dump(exclude={"role_order"}).items()]


@contextmanager
def _in_worker() -> Iterator[None]:
    """A flow run of a worker ends with it, and shows Gyre's log lines."""
    for name in ("gyre_core", "tasks", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
    end_with_worker()
    yield
