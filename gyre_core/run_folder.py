"""A run's folder: what lies where, who owns it, which configuration it was started with.

    runs/<run>/run.json          identity and configuration, written once
    runs/<run>/owner.lock        held (flock) by the one process that runs it; says who
    runs/<run>/store/            trajectories, grades, steps (unless store.url points elsewhere)
    runs/<run>/checkpoints/      version-00003/ ...
    runs/<run>/exports/          version-00010/ ...: Hugging Face folders (train.export_every)
    runs/<run>/logs/ work/ journal/ tensorboard/ metrics.jsonl
    runs/prefect/                the Prefect database that all runs of this folder share

Invariant: at most one owner. The kernel drops the lock when the owner dies, a kill -9 included.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre_core.config import RunConfig, parse_run_config
from gyre_core.errors import ConfigError, RunOwnedError

_RUN_ID = re.compile(r"^[a-z0-9][a-z0-9._-]{0,95}$")


class RunFolder:
    """Paths and identity of one run.

    Example: RunFolder.create(config, run_id="quickstart-20261130-101500")
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.store_url = str(path / "store")
        self.checkpoints = path / "checkpoints"
        self.exports = path / "exports"
        self.logs = path / "logs"
        self.work = path / "work"
        self.journal = path / "journal"

    @classmethod
    def create(cls, config: RunConfig, run_id: str) -> "RunFolder":
        """Make a new run's folder; raises ConfigError when the name is taken or unusable."""
        if not _RUN_ID.match(run_id):
            raise ConfigError(f"run name {run_id!r}: use lower-case letters, digits, '.', '_' and '-', 96 at most")
        folder = cls(config.runs_dir / run_id)
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"run {run_id!r} exists in {config.runs_dir}; continue it with "
                f"`gyre train CONFIG --resume --run {run_id}` or give another --run NAME"
            ) from None
        identity = {"run_id": run_id, "created_s": time.time(), "config": config.model_dump(mode="json")}
        _write_whole(folder.path / "run.json", json.dumps(identity, indent=1).encode())
        for part in (folder.checkpoints, folder.logs, folder.work, folder.journal):
            part.mkdir()
        return folder

    @classmethod
    def open(cls, runs_dir: Path, run_id: str) -> "RunFolder":
        """An existing run's folder; raises ConfigError with the runs that there are."""
        folder = cls(runs_dir / run_id)
        if not _RUN_ID.match(run_id) or not (folder.path / "run.json").is_file():
            known = ", ".join(list_runs(runs_dir)) or "none yet"
            raise ConfigError(f"no run {run_id!r} in {runs_dir} (runs there: {known})")
        return folder

    def identity(self) -> dict[str, Any]:
        """What run.json holds: run_id, created_s, config."""
        return json.loads((self.path / "run.json").read_text(encoding="utf-8"))

    def config(self) -> RunConfig:
        """The configuration the run was started with."""
        tree = self.identity()["config"]
        tree["runs_dir"] = str(self.path.parent)
        return parse_run_config(tree, base_dir=self.path, source=str(self.path / "run.json"))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the run; raises RunOwnedError when another process does."""
        descriptor = os.open(self.path / "owner.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                raise RunOwnedError(
                    f"run {self.run_id} is being run by another process ({owner}); wait for it or stop it first"
                ) from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"pid {os.getpid()}".encode())
            yield
        finally:
            os.close(descriptor)


def list_runs(runs_dir: Path, name: str | None = None) -> list[str]:
    """Run ids in a folder, oldest first; only those of one config name when it is given."""
    found: list[tuple[float, str]] = []
    for path in runs_dir.glob("*/run.json"):
        try:
            identity = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        if name is None or identity.get("config", {}).get("name") == name:
            found.append((float(identity.get("created_s", 0.0)), path.parent.name))
    return [run_id for _, run_id in sorted(found)]


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
