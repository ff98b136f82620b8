"""Tasks that grade rollouts."""

import asyncio
import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.rollout.runner import ExecutedRollout, FinishedRollout
from gyre_core.rollout.runner import grade_rollout as grade
from tasks.context import Box, RunContext
from tasks.spans import record_graded


@task(name="grade_rollout", task_run_name="{executed.label} / grade", cache_policy=NO_CACHE, tags=["grade"])
def grade_rollout(run: RunContext, executed: Box[ExecutedRollout]) -> Box[FinishedRollout]:
    """Run the problem's verifier on what the rollout left; a verifier that fails excludes the rollout with its
    reason.
    """
    rollout, started_s = executed.value, time.time()

    async def work() -> FinishedRollout:
        return await grade(
            rollout,
            run.problem(rollout.spec.problem_id),
            grading=run.config.grading,
            rollout=run.config.rollout,
            sandbox=run.sandbox,
            keeper=run.keeper,
        )

    finished = asyncio.run(work())
    record_graded(run, finished, started_s)
    run.progress.rollout_done(finished.grade.outcome.value, finished.grade.reward)
    return Box(finished, label=rollout.spec.label)
