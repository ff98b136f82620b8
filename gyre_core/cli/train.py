"""`gyre train` and `gyre evaluate`: find or make the run, show it in Prefect, run the flow."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gyre_core.config import RunConfig, load_run_config
from gyre_core.errors import ConfigError
from gyre_core.resume import resumed_config
from gyre_core.run_folder import RunFolder


def run_training(
    config_path: Path,
    *,
    run_id: str | None,
    resume: bool,
    overrides: Sequence[str],
    quiet: bool,
    max_wall_s: float | None = None,
) -> dict[str, Any]:
    """Run or continue a training, within a time box when one is given; returns the summary."""
    config = load_run_config(config_path, overrides)
    if resume:
        run_id, config = resumed_config(config, run_id, overrides)
    else:
        run_id = run_id or time.strftime(f"{config.name}-%Y%m%d-%H%M%S")

    def call() -> dict[str, Any]:
        from flows.rollout import task_runner_of
        from flows.train import train

        sized = train.with_options(task_runner=task_runner_of(config))
        return sized(config, run_id, resume=resume, quiet=quiet, max_wall_s=max_wall_s)

    return _in_prefect(config, call, quiet=quiet)


def run_evaluation(
    config_path: Path, *, from_run: str | None, checkpoint: Path | None, overrides: Sequence[str], quiet: bool
) -> dict[str, Any]:
    """Held-out reward of a model; returns it with its counts."""
    config = load_run_config(config_path, overrides)
    if from_run is not None:
        if checkpoint is not None:
            raise ConfigError("give --run or --checkpoint, not both")
        checkpoint = newest_checkpoint(RunFolder.open(config.runs_dir, from_run))
    if checkpoint is not None and not checkpoint.is_dir():
        raise ConfigError(f"no checkpoint folder {checkpoint}")
    if config.data.heldout is None:
        raise ConfigError("data.heldout is not set: there is nothing to evaluate on")
    run_id = time.strftime(f"{config.name}-eval-%Y%m%d-%H%M%S")
    path = str(checkpoint.resolve()) if checkpoint is not None else None

    def call() -> dict[str, Any]:
        from flows.evaluate import evaluate

        return evaluate(config, run_id, checkpoint=path, quiet=quiet)

    return _in_prefect(config, call, quiet=quiet)


def newest_checkpoint(folder: RunFolder) -> Path:
    """The newest checkpoint of a run; raises ConfigError when it has none."""
    found = sorted(folder.checkpoints.glob("version-*"))
    if not found:
        raise ConfigError(f"run {folder.run_id} has no checkpoint yet")
    return found[-1]


def _in_prefect(config: RunConfig, call: Callable[[], dict[str, Any]], *, quiet: bool) -> dict[str, Any]:
    from gyre_core.engine.launch import check_install, find_engine_python, inspect_python
    from gyre_core.grading.inputs import check_inputs

    check_inputs(config)  # before anything starts: bad input must not cost a server's boot
    if config.emulate is None:
        check_install(inspect_python(find_engine_python(config.engine)))
    return in_prefect(config, call, quiet=quiet)


def in_prefect(config: RunConfig, call: Callable[[], dict[str, Any]], *, quiet: bool) -> dict[str, Any]:
    """Call a flow with a Prefect server around it: the configuration's, a live one of the runs folder, or its own."""
    from tasks.prefect_server import ensure_server

    for name in ("gyre_core", "tasks", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)  # to the UI; the terminal shows errors only
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    server = ensure_server(config.prefect, config.runs_dir)
    if not quiet:
        sys.stderr.write(f"Prefect UI: {server.ui_url} (after the run: make ui)\n")
    try:
        return call()
    finally:
        _flush_prefect_logs()
        server.stop()


def _flush_prefect_logs() -> None:
    """Log lines still on their way to the API must arrive before its server ends."""
    if "prefect" in sys.modules and os.environ.get("PREFECT_API_URL"):
        from tasks.prefect_server import flush_logs

        flush_logs()
