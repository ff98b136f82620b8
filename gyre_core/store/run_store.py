"""The store of a run folder, for commands that read runs."""

from pathlib import Path

from gyre_core.config import RunConfig
from gyre_core.errors import ConfigError
from gyre_core.run_folder import RunFolder, list_runs
from gyre_core.store.store import Store


def newest_run(runs_dir: Path, run_id: str | None) -> RunFolder:
    """The named run, or the newest of the folder; raises ConfigError when there is none."""
    if run_id:
        return RunFolder.open(runs_dir, run_id)
    runs = list_runs(runs_dir)
    if not runs:
        raise ConfigError(f"no runs in {runs_dir}; make one with `make quickstart`, or give --runs-dir")
    return RunFolder.open(runs_dir, runs[-1])


def open_run_store(folder: RunFolder) -> tuple[RunConfig, Store]:
    """A run's configuration and its store, for reading."""
    config = folder.config()
    return config, Store.open(config.store.url or folder.store_url, read_only=True)
