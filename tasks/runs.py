"""Opening a run: everything is checked before anything starts, then built once.

Order: folder and its lock, problems, store, sandbox, then the processes (proxy, cell). A run that is opened again
starts from its last committed step: version, checkpoint and groups come from the store, never from memory or guesses.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre_core.config import RunConfig
from gyre_core.errors import StoreError
from gyre_core.grading.inputs import check_inputs
from gyre_core.grading.manifest import folders_of
from gyre_core.metrics import MetricsWriter, Sink
from gyre_core.process import limit_malloc_arenas
from gyre_core.proxy.journal import journal_rollout
from gyre_core.rollout.environment import open_environment
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.tracing.spans import Tracing
from tasks.context import RunContext
from tasks.prefect_runs import close_dead_runs
from tasks.progress import RunProgress
from tasks.reporting import RunReporter
from tasks.scheduling import Scheduling
from tasks.services import running_services, tracing_settings
from tasks.work_pools import WorkPools

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(
    config: RunConfig, runs_dir: Path, run_id: str, *, resume: bool, quiet: bool, checkpoint: Path | None = None
) -> Iterator[RunContext]:
    """Build a run's context and its processes; all are gone when the block ends, whatever ends it."""
    limit_malloc_arenas()
    folder = RunFolder.open(runs_dir, run_id) if resume else RunFolder.create(config, run_id)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.owned())
        problems, heldout = check_inputs(config)
        store = Store.open(config.store.url or folder.store_url, min_free_bytes=config.store.min_free_bytes)
        steps = store.commits("step")
        policy_version = int(steps[-1].record["version_after"]) if steps else 0
        if steps:
            checkpoint = folder.checkpoints / str(steps[-1].record["checkpoint"])
            if not checkpoint.is_dir():
                raise StoreError(
                    f"the last committed step of {run_id} names the checkpoint {checkpoint}, which is not there; "
                    "restore it, or start a new run"
                )
        if resume:
            close_dead_runs(run_id)
        _clear_leftovers(folder)
        sandbox = open_environment(config.rollout, hidden=hidden_folders(config, folder), emulate=config.emulate)
        progress = stack.enter_context(RunProgress(run_id, num_steps=config.train.steps, quiet=quiet))
        progress.resume_at(policy_version)
        progress.note(
            f"run {run_id}: {len(problems)} training and {len(heldout)} held-out problems, {sandbox.backend}; "
            + (f"resuming after step {policy_version}" if resume else "starting engine, trainer and proxy")
        )
        metrics = stack.enter_context(MetricsWriter(folder.path, sinks=metric_sinks(config, folder)))
        services = stack.enter_context(
            running_services(config, folder, policy_version=policy_version, checkpoint=checkpoint)
        )
        reporter = RunReporter(run_id, num_steps=config.train.steps)
        pools = stack.enter_context(contextlib.closing(WorkPools.open()))
        scheduling = Scheduling(config, services.fleet, reporter, pools=pools)
        run = RunContext(
            config=config,
            folder=folder,
            store=store,
            problems=problems,
            heldout=heldout,
            services=services,
            sandbox=sandbox,
            progress=progress,
            reporter=reporter,
            scheduling=scheduling,
            metrics=metrics,
            tracing=stack.enter_context(Tracing(tracing_settings(config, folder), "flow")),
            policy_version=policy_version,
        )
        scheduling.open()
        reporter.store_link(config.store.url or folder.store_url)
        progress.note(f"{cells_text(config)} and proxy are ready")
        yield run


def metric_sinks(config: RunConfig, folder: RunFolder) -> list[Sink]:
    """Where the run's scalars go beside its folder; raises SetupError."""
    project = config.metrics.wandb_project
    if project is None:
        return []
    from gyre_core.metrics_wandb import WandbScalars

    kept_here: Any = {"rollout": {"harness": {"env"}}, "prefect": True, "store": True}  # may hold keys and hosts
    about = config.model_dump(mode="json", exclude=kept_here)
    return [WandbScalars(project, run_id=folder.run_id, folder=folder.path, config=about)]


def cells_text(config: RunConfig) -> str:
    """The run's cells in words."""
    cells = config.scheduler.cells
    return "engine, trainer" if cells == 1 else f"{cells} cells (an engine and a trainer each)"


def hidden_folders(config: RunConfig, folder: RunFolder) -> list[Path]:
    """What no agent may see, should a path that it may see hold it: answers, other rollouts and runs, the weights."""
    runs = folder.path.parent
    hidden = [folder.path, *(path.parent for path in runs.glob("*/run.json")), runs / "prefect", runs / "team"]
    hidden += [config.model.path, *folders_of(config.data.train)]
    if config.data.heldout is not None:
        hidden += folders_of(config.data.heldout)
    if config.store.url is not None and not config.store.url.startswith("s3://"):
        hidden.append(Path(config.store.url.removeprefix("file://")))
    return hidden


def _clear_leftovers(folder: RunFolder) -> None:
    """Workspaces and proxy sessions of rollouts that a killed process left: their groups were not committed.

    All journals go, whichever process wrote them: the run may go on with another number of processes, and what was not
    committed is dispatched afresh.
    """
    sessions = list(folder.journal.rglob("*.journal"))
    if sessions:
        rollouts = sorted(rollout for path in sessions if (rollout := journal_rollout(path)))
        logger.info(
            "dropped %d proxy sessions of rollouts that had not finished, which start afresh: %s%s",
            len(sessions),
            ", ".join(rollouts[:8]),
            ", ..." if len(rollouts) > 8 else "",
        )
    for path in (folder.work, folder.journal):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)
