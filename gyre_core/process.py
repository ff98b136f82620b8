"""Child processes that end when their parent ends, however the parent ends.

The parent keeps the write end of a pipe that is the child's standard input. The kernel closes it when the parent dies,
a `kill -9` included; the child's watcher thread reads end-of-file and asks its own process to stop. Unlike
PR_SET_PDEATHSIG this does not depend on which thread of the parent started the child.
"""

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gyre_core.errors import GyreError

logger = logging.getLogger(__name__)

_M_ARENA_MAX = -8  # of malloc.h
WATCH_FLAG = "GYRE_DIE_WITH_STDIN"  # set for children whose standard input is the parent's pipe


class ChildProcess:
    """One of Gyre's own programs, started in a session of its own with its output in a log file.

    Example: child = ChildProcess("proxy", [sys.executable, "-m", "gyre_core.proxy", ...], log_path=Path("proxy.log"))
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), WATCH_FLAG: "1"},
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait until it ends, whoever ends it; returns its exit code."""
        return self._process.wait()

    def wait_for(self, timeout_s: float) -> int | None:
        """Its exit code, as soon as it has ended; None when it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float, error: type[GyreError]) -> None:
        """Poll `ready` until it is true; raises `error` with the log's tail when the child dies or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running():
                raise error(
                    f"{self.name} ended with exit code {self._process.returncode} while starting; its log "
                    f"{self.log_path} ends with:\n{log_tail(self.log_path)}"
                )
            if time.monotonic() > deadline:
                raise error(
                    f"{self.name} was not ready after {timeout_s:g} s; its log {self.log_path} ends with:\n"
                    f"{log_tail(self.log_path)}"
                )
            time.sleep(0.05)

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Ask it to end, then kill its whole process group; returns when it is gone."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self.running():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def end_with_parent() -> None:
    """In a child: send SIGTERM to this process when the parent's pipe closes. Does nothing when not a ChildProcess."""
    if not os.environ.pop(WATCH_FLAG, ""):
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        logger.info("parent is gone: stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def limit_malloc_arenas(count: int = 2) -> bool:
    """Let this process's threads share so many of glibc's heaps; False where that cannot be said.

    By default each of 16 cores adds 8, and what many threads freed in each stays there: the flow of a run with 32
    rollouts a step grew by 2 MB a step, with two heaps by 0.5 MB (32 steps, measured). Call it before threads start.
    """
    try:
        return ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count) == 1
    except (AttributeError, OSError):  # another C library
        return False


def log_tail(path: Path, *, num_lines: int = 15, num_bytes: int = 65536) -> str:
    """Last lines of a log file, for error messages; empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - num_bytes))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line[:400] for line in text.splitlines()[-num_lines:])


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that takes connections, at any free port when `port` is 0; raises OSError.

    Connections wait in its queue while nobody accepts, so a parent that holds it can restart the child that serves it.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: else a reply's head and body meet Nagle and delayed ACK (measured 40 ms).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def secret_file(path: Path, text: str) -> Iterator[Path]:
    """A file with secrets: readable by us alone, and gone after the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        yield path
    finally:
        path.unlink(missing_ok=True)


def new_secret() -> str:
    """256 random bits for a control API's bearer token."""
    return secrets.token_urlsafe(32)


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of ours with this very interpreter."""
    return [sys.executable, "-m", module, *arguments]
