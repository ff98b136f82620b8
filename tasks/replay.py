"""Tasks of the flow `replay`: each answers one question about a stored step. They read the run and write nothing to it.

Scratch files lie in a folder of the replay's own below the run's folder, which is gone afterwards.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from gyre_core.config import RunConfig, SelectionConfig
from gyre_core.errors import ConfigError
from gyre_core.grading.manifest import folders_of, load_problems
from gyre_core.grading.problems import Problem
from gyre_core.replay.check import CheckReport, check_step
from gyre_core.replay.regrade import Regrade, check_workspaces, regrade_rollout, stands_because
from gyre_core.replay.report import sheet_of
from gyre_core.replay.reselect import Reselection, reselect
from gyre_core.replay.retrain import RetrainReport, plan_retrain, retrain
from gyre_core.replay.stored import StoredStep, find_record, read_step_records, read_stored_step
from gyre_core.rollout.environment import Environment, open_environment
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store, StoredRollout
from gyre_core.store.run_store import open_run_store
from gyre_core.types import Json
from tasks.context import Box
from tasks.runs import hidden_folders
from tasks.trainer import running_trainer


class ReplayContext:
    """One replay's objects. The store is open for reading only."""

    def __init__(self, folder: RunFolder, config: RunConfig, store: Store, scratch: Path) -> None:
        self.folder, self.config, self.store, self.scratch = folder, config, store, scratch


@contextlib.contextmanager
def open_replay(runs_dir: Path, run: str) -> Iterator[ReplayContext]:
    """A run's store and a scratch folder; ConfigError or StoreError when there is no such run or it cannot be read."""
    folder = RunFolder.open(runs_dir, run)
    config, store = open_run_store(folder)
    scratch = Path(tempfile.mkdtemp(prefix="replay-", dir=folder.path))
    try:
        yield ReplayContext(folder, config, store, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@task(name="read_step", task_run_name="step {step} / read", cache_policy=NO_CACHE)
def read_step(context: ReplayContext, step: int) -> Box[StoredStep]:
    """The step `step` (from 1) with its groups."""
    record = find_record(read_step_records(context.store), step)
    return Box(read_stored_step(context.store, context.config, record), label=f"step {step}")


@task(name="check_step", task_run_name="{stored.label} / check", cache_policy=NO_CACHE)
def check_stored_step(stored: Box[StoredStep]) -> Box[CheckReport]:
    """Compute advantages, selection and packing again and compare."""
    return Box(check_step(stored.value))


@task(name="reselect_step", task_run_name="{stored.label} / reselect", cache_policy=NO_CACHE)
def reselect_step(context: ReplayContext, stored: Box[StoredStep], selection: SelectionConfig) -> Box[Reselection]:
    """Select with other settings and compare."""
    section = stored.value.section
    train = section.train if section else context.config.train
    return Box(reselect(stored.value, selection, train))


@task(name="prepare_regrade", task_run_name="{stored.label} / prepare", cache_policy=NO_CACHE)
def prepare_regrade(
    context: ReplayContext, stored: Box[StoredStep], problems_dir: str | None
) -> Box[tuple[dict[str, Problem], Environment]]:
    """The step's problems as they are now, and a sandbox; refuses a step without kept workspaces."""
    check_workspaces(stored.value)
    folder = Path(problems_dir) if problems_dir else context.config.data.train
    problems = {problem.problem_id: problem for problem in load_problems(folder)}
    needed = {rollout.spec.problem_id for _, rollout in stored.value.rollouts() if not stands_because(rollout)}
    missing = sorted(needed - problems.keys())
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} problem(s) of the step ({', '.join(missing[:3])} ...)")
    hidden = [*hidden_folders(context.config, context.folder), *folders_of(folder)]
    return Box((problems, open_environment(context.config.rollout, hidden=hidden)))


@task(name="regrade_rollout", task_run_name="{rollout.label} / regrade", cache_policy=NO_CACHE, tags=["grade"])
def regrade_stored_rollout(
    context: ReplayContext, rollout: Box[StoredRollout], prepared: Box[tuple[dict[str, Problem], Environment]]
) -> Box[Regrade]:
    """Restore the rollout's workspace and run its problem's verifier on it."""
    stored = rollout.value
    stands = stands_because(stored)
    if stands:
        return Box(Regrade(rollout_id=stored.spec.rollout_id, before=stored.grade, after=stored.grade, stands=stands))
    problems, sandbox = prepared.value

    async def work() -> Regrade:
        return await regrade_rollout(
            stored,
            context.store.get_blob(stored.workspace_ref),
            problems[stored.spec.problem_id],
            grading=context.config.grading,
            config=context.config.rollout,
            sandbox=sandbox,
            workdir=context.scratch / stored.spec.rollout_id,
        )

    return Box(asyncio.run(work()))


@task(name="retrain_step", task_run_name="step {step} / retrain", cache_policy=NO_CACHE)
def retrain_step(context: ReplayContext, step: int) -> Box[RetrainReport]:
    """Train the step again in a process of its own, from the nearest state before it."""
    plan = plan_retrain(read_step_records(context.store), context.folder.checkpoints, label=step)
    steps = (read_stored_step(context.store, context.config, record) for record in plan.records)
    with running_trainer(
        context.config,
        plan.train,
        work_dir=context.scratch,
        policy_version=plan.first_version,
        checkpoint=plan.checkpoint,
    ) as cell:
        return Box(retrain(cell, plan, steps))


@task(name="report_replay", task_run_name="step {step} / report", cache_policy=NO_CACHE)
def report_replay(result: Json, step: int) -> None:
    """What changed, as an artifact of the flow run."""
    key = result["run"].replace("_", "-").replace(".", "-")
    create_markdown_artifact(
        sheet_of(result).markdown(),
        key=f"{key}-replay-{result['mode']}",
        description=f"replay of step {step} of {result['run']}: {result['mode']}",
    )
