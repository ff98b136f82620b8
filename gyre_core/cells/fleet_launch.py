"""How one cell host's process is started, and that nothing of it outlives it.

Enters: CellSettings. Leaves: a `HostProcess`. Every process of a cell carries a mark in its environment, which its
children inherit; so whatever a host that crashed or was killed left behind is found again, also by the next run of the
same folder: its engine's guard ends the engine by itself, what is stopped or stays is killed. Shared memory of dead
processes goes with the next buffer that is made (transfer/shared_memory.py).
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import xxhash

from gyre_core.cells.settings import CellSettings
from gyre_core.process import ChildProcess, python_command

logger = logging.getLogger(__name__)

MARK = "GYRE_CELL"  # environment variable: which run's which cell a process belongs to
LEFTOVER_GRACE_S = 12.0  # an engine's guard waits 10 s for the kernel (engine/guard.py)


class HostProcess(Protocol):
    """A running cell host, wherever it runs."""

    @property
    def pid(self) -> int:
        """For people and logs."""
        ...

    @property
    def log_path(self) -> Path:
        """Where it says what went wrong."""
        ...

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs, or when that is not known."""
        ...

    def running(self) -> bool:
        """Whether it has not ended. It may hang."""
        ...

    def stop(self, *, grace_s: float) -> None:
        """Ask it to end, kill it after `grace_s`; returns when it and all that it started are gone. May be repeated."""
        ...


Launch = Callable[[CellSettings], HostProcess]


class LocalLauncher:
    """Starts cell hosts as child processes of this one.

    Example: launch = LocalLauncher(work=Path("work"), logs=Path("logs")); process = launch(settings)
    """

    def __init__(self, *, work: Path, logs: Path, env: Mapping[str, str] | None = None) -> None:
        self._work, self._logs, self._env = work, logs, dict(env or {})

    def mark(self, cell_id: str) -> str:
        """The value of `GYRE_CELL` in every process of this cell."""
        return f"{xxhash.xxh3_64_hexdigest(str(self._work.absolute()).encode())}/{cell_id}"

    def __call__(self, settings: CellSettings) -> HostProcess:
        """Start it, after ending what a predecessor may have left."""
        mark = self.mark(settings.cell_id)
        end_leftovers(mark, grace_s=0.0)
        return LocalHost(settings, work=self._work, logs=self._logs, env={**self._env, MARK: mark})


class LocalHost:
    """A host on this machine. It ends when this process ends, whatever ends it."""

    def __init__(self, settings: CellSettings, *, work: Path, logs: Path, env: Mapping[str, str]) -> None:
        self._mark = env[MARK]
        self._file = work / f"{settings.cell_id}.json"
        write_secret(self._file, settings.model_dump_json())
        self._child = ChildProcess(
            settings.cell_id,
            python_command("gyre_core.cells", "--settings", str(self._file)),
            log_path=logs / f"{settings.cell_id}.log",
            env=env,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def log_path(self) -> Path:
        return self._child.log_path

    @property
    def exit_code(self) -> int | None:
        return None if self._child.running() else self._child.wait()

    def running(self) -> bool:
        return self._child.running()

    def stop(self, *, grace_s: float) -> None:
        self._child.stop(grace_s=grace_s)
        end_leftovers(self._mark, grace_s=LEFTOVER_GRACE_S)
        self._file.unlink(missing_ok=True)


def write_secret(path: Path, text: str) -> None:
    """A file that we alone can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def marked(mark: str) -> list[int]:
    """Our processes that carry this mark, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and _state(int(entry)) != "Z":
                    found.append(int(entry))
    return found


def end_leftovers(mark: str, *, grace_s: float) -> int:
    """Wait until no process carries the mark; kill those that are stopped, and after `grace_s` all. Returns how many.

    Processes that the kernel does not let go for 10 s after their SIGKILL are left to it.
    """
    deadline = time.monotonic() + grace_s
    killed: set[int] = set()
    while left := marked(mark):
        late = time.monotonic() >= deadline
        for pid in left:
            if pid not in killed and (late or _state(pid) in "Tt"):
                logger.warning("ending process %d, which a cell host left behind (%s)", pid, mark)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if time.monotonic() > deadline + 10.0:
            break
        time.sleep(0.02)
    return len(killed)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
