"""Tasks that plan and run rollouts."""

import asyncio
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.proxy.pool import ProxyPool
from gyre_core.rollout.dispatch import plan_groups, problems_of_step
from gyre_core.rollout.runner import ExecutedRollout
from gyre_core.rollout.runner import execute_rollout as execute
from gyre_core.types import RolloutSpec
from tasks.context import Box, RunContext
from tasks.spans import record_executed


@task(name="dispatch_rollouts", task_run_name="step {step_label} / dispatch", cache_policy=NO_CACHE)
def dispatch_rollouts(run: RunContext, step: int, step_label: int) -> Box[list[tuple[RolloutSpec, ...]]]:
    """The groups of a step: which problems, how many rollouts, with which seeds, at which policy version."""
    config = run.config
    problem_ids = problems_of_step(
        [name for name in sorted(run.problems) for _ in range(run.problems[name].repeat)],
        seed=config.seed,
        step=step,
        groups_per_step=config.rollout.groups_per_step,
    )
    groups = plan_groups(
        problem_ids,
        prefix=f"s{step:04d}",
        step=step,
        group_size=config.rollout.group_size,
        seed=config.seed,
        policy_version=run.policy_version,
    )
    return Box(groups)


def batches_ahead(run: RunContext, step: int) -> range:
    """The steps whose rollouts are dispatched when step `step` begins: its own, and the next k."""
    return range(step, min(step + run.config.scheduler.staleness + 1, max(run.config.train.steps, step + 1)))


def next_rollouts(run: RunContext, step: int) -> int:
    """Rollouts that will be dispatched when step `step` has ended."""
    rollout = run.config.rollout
    more = step + 1 + run.config.scheduler.staleness < run.config.train.steps
    return rollout.group_size * rollout.groups_per_step if more else 0


@task(name="execute_rollout", task_run_name="{spec.label}", cache_policy=NO_CACHE, tags=["rollout"])
def execute_rollout(run: RunContext, spec: RolloutSpec) -> Box[ExecutedRollout]:
    """Run one harness in its sandbox against the proxy; a bad rollout comes back as data.

    A proxy that is gone for good is no rollout's fault: it raises ProxyError, which ends the run.
    """

    async def work() -> ExecutedRollout:
        async with ProxyPool(run.services.proxies) as proxy:
            return await execute(
                spec,
                run.problem(spec.problem_id),
                rollout=_sampled_at(run, spec),
                proxy=proxy,
                sandbox=run.sandbox,
                workdir=run.workspace_root(spec.rollout_id),
            )

    executed = asyncio.run(work())
    record_executed(run, executed)
    run.services.proxies.check()
    return Box(executed, label=spec.label)


def _sampled_at(run: RunContext, spec: RolloutSpec) -> Any:
    """The rollout section; evaluation samples at its own temperature."""
    if spec.step >= 0:
        return run.config.rollout
    return run.config.rollout.model_copy(update={"temperature": run.config.evaluate.temperature})
