"""Continuing a run: with the configuration it was started with, but for what may change on the way.

Enters: a configuration, the run's name, overrides. Leaves: the run's own configuration. What a run learns from never
changes: an override that would change it is refused. A deployment repeats the overrides that it started the run with;
it leaves those out (`is_resumable`).
"""

from collections.abc import Sequence

from gyre_core.config import RunConfig, parse_run_config
from gyre_core.errors import ConfigError, StoreError
from gyre_core.run_folder import RunFolder, list_runs
from gyre_core.store.run_store import open_run_store

# How long a run goes on and what it may use, never what it learns from.
RESUMABLE_KEYS = (
    "train.steps",
    "rollout.slots",
    "evaluate.",
    "prefect.",
    "engine.",
    "store.min_free_bytes",
    "grading.keep_",
)


def resumed_config(config: RunConfig, run_id: str | None, overrides: Sequence[str]) -> tuple[str, RunConfig]:
    """The run to continue (the newest of its name when none is given) and its configuration; raises ConfigError."""
    if run_id is None:
        known = list_runs(config.runs_dir, config.name)
        if not known:
            raise ConfigError(f"no run of {config.name!r} in {config.runs_dir} to resume; start one without --resume")
        run_id = known[-1]
    overrides = [override for override in overrides if not override.strip().startswith("runs_dir")]  # found it already
    for override in overrides:
        if not is_resumable(override):
            raise ConfigError(
                f"--set {override} would change what run {run_id} learns from; on --resume only "
                f"{', '.join(key.rstrip('.') for key in RESUMABLE_KEYS)} may change. Start a new run instead"
            )
    folder = RunFolder.open(config.runs_dir, run_id)
    stored = folder.config().model_dump(mode="json")
    return run_id, parse_run_config(stored, base_dir=folder.path, source=str(folder.path), overrides=overrides)


def is_resumable(override: str) -> bool:
    """Whether a `key.path=value` override may be given to a run that goes on."""
    return override.strip().startswith(RESUMABLE_KEYS)


def is_finished(folder: RunFolder, config: RunConfig) -> bool:
    """Whether every step of `config` is committed and the last evaluation too; reads the run's store."""
    try:
        _, store = open_run_store(folder)
    except StoreError:
        return False  # killed before it had a store, or the store is away: going on will tell
    steps = store.commits("step")
    done = int(steps[-1].record["version_after"]) if steps else 0
    return done >= config.train.steps and any(commit.record["tag"] == "after" for commit in store.commits("evaluation"))
