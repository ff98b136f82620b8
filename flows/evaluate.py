"""Held-out evaluation: every held-out problem, `evaluate.samples` rollouts each, at the policy that is published.

Inside a run it is part of the flow `train`; `gyre evaluate` runs it alone as the flow `evaluate`.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from flows.rollout import TASK_RUNNER, run_groups
from gyre_core.config import RunConfig
from gyre_core.rollout.dispatch import plan_groups
from tasks.context import RunContext
from tasks.runs import open_run
from tasks.summary import Evaluation, report_evaluation, stored_evaluation


@flow(
    name="evaluate",
    flow_run_name="{run_id}",
    task_runner=TASK_RUNNER,
    validate_parameters=False,
    persist_result=False,
)
def evaluate(config: RunConfig, run_id: str, checkpoint: str | None = None, quiet: bool = False) -> dict[str, Any]:
    """Held-out reward of the config's model, or of a checkpoint; a run folder of its own keeps the trajectories."""
    path = Path(checkpoint) if checkpoint else None
    with open_run(config, Path(config.runs_dir), run_id, resume=False, quiet=quiet, checkpoint=path) as run:
        result = evaluate_heldout(run, "only", policy_version=run.policy_version)
        return {
            "run": run.folder.run_id,
            "heldout": result.reward,
            "problems": result.num_problems,
            "rollouts": result.outcomes,
            "policy_version": result.policy_version,
        }


def evaluate_heldout(run: RunContext, tag: str, *, policy_version: int) -> Evaluation:
    """Mean reward over the included held-out rollouts; read back when an earlier process of this run measured it."""
    known = stored_evaluation(run, tag)
    if known is not None:
        return known
    samples = run.config.evaluate.samples
    groups = plan_groups(
        sorted(run.heldout),
        prefix=f"heldout-{tag}",
        step=-1,
        group_size=samples,
        seed=run.config.seed,
        policy_version=policy_version,
    )
    run.progress.begin(f"held-out evaluation, {tag}", num_rollouts=samples * len(groups))
    return report_evaluation(run, tag, policy_version, list(run_groups(run, groups)))
