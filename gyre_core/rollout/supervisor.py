"""Runs one launcher to its end: deadline, output, and the certainty that nothing of it is left.

Enters: a Launch, a time limit, where the log goes. Leaves: an Ended, with measured times. Invariants: when
`supervise` returns or raises (cancellation included), every process of the PID namespace is gone: process 1's pidfd
has reported its end, which the kernel delays until all other members are dead. A full pipe never blocks a sandbox;
output beyond the limit is read and dropped.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_core.clock import Clock
from gyre_core.errors import SandboxError
from gyre_core.rollout.backends import Launch
from gyre_core.rollout.reaper import launch_group

logger = logging.getLogger(__name__)

SETUP_LIMIT_S = 60.0  # from the launcher's start to the command's; a loaded machine needs well under a second
DEATH_LIMIT_S = 30.0  # after SIGKILL; only a process stuck in the kernel (dead network file system) takes longer
DRAIN_LIMIT_S = 2.0  # for output in the pipe after the last process is gone
TAIL_CHARS = 2000
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launcher ended.

    Example: Ended(exit_code=0, timed_out=False, error="", output_tail="", started_s=0.0, finished_s=1.0, duration_s=1)
    """

    exit_code: int | None  # of the command; None when it was killed or never ran
    timed_out: bool
    error: str  # why no command ran, else empty
    output_tail: str
    started_s: float
    finished_s: float
    duration_s: float


class BoundedLog:
    """The first and the last half of a stream: the first written at once, the last at `close`.

    Errors of the disk are logged once and end the writing, never the run.
    """

    def __init__(self, path: Path | None, limit_bytes: int) -> None:
        self._path = path
        self._half = max(limit_bytes // 2, 4 * TAIL_CHARS)
        self._tail = bytearray()
        self.total_bytes = 0
        self._file = None
        if path is not None:
            with self._guard():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        head = data[: max(0, self._half - self.total_bytes)]
        self.total_bytes += len(data)
        if head:
            self._put(head)
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def tail_text(self) -> str:
        """The last characters of the stream; bytes that are no UTF-8 are replaced."""
        return bytes(self._tail[-4 * TAIL_CHARS :]).decode(errors="replace")[-TAIL_CHARS:]

    def close(self) -> None:
        rest = self.total_bytes - self._half
        if rest > 0:
            tail = bytes(self._tail[-min(rest, self._half) :])
            if rest > len(tail):
                self._put(b"\n[... %d bytes left out ...]\n" % (rest - len(tail)))
            self._put(tail)
        if self._file is not None:
            self._file.close()

    def _put(self, data: bytes) -> None:
        if self._file is not None:
            with self._guard():
                self._file.write(data)

    @contextlib.contextmanager
    def _guard(self):
        try:
            yield
        except OSError as error:
            logger.warning("log %s ends early: %s", self._path, error)
            if self._file is not None:
                self._file.close()
            self._file = None


class _Launcher:
    """A started launcher and its descriptors; all methods belong to the event loop's thread."""

    def __init__(self, make_launch: Callable[[int, int], Launch], log: BoundedLog) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._status = b""
        self.child_pidfd = -1
        self.exit_code: int | None = None
        self.ready = asyncio.Event()
        self.status_known = asyncio.Event()  # process 1 is known, or nothing more will be said
        self.ended = asyncio.Event()  # the launcher itself
        self.child_ended = asyncio.Event()
        self.output_ended = asyncio.Event()
        self._output_fd, output_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(output_w, True)
        self._status_fd, status_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sync, sync_inside = socket.socketpair()
        self._sync.setblocking(False)
        payload_fd = os.memfd_create("gyre-sandbox", os.MFD_CLOEXEC)
        self._pidfd = -1
        try:
            self._group = launch_group()
            launch = make_launch(status_w, sync_inside.fileno())
            with open(payload_fd, "wb", closefd=False) as payload:
                payload.write(launch.payload)
            os.lseek(payload_fd, 0, os.SEEK_SET)
            self.process = subprocess.Popen(
                [part.replace("{fd}", str(payload_fd)) if part == "{fd}" else part for part in launch.argv],
                stdin=subprocess.DEVNULL,
                stdout=output_w,
                stderr=output_w,
                pass_fds=(status_w, sync_inside.fileno(), payload_fd),
                env={},
                cwd="/",
                process_group=self._group,
            )
            self._pidfd = os.pidfd_open(self.process.pid)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(output_w)
            os.close(status_w)
            os.close(payload_fd)
            sync_inside.close()
        self._loop.add_reader(self._output_fd, self._on_output)
        self._loop.add_reader(self._status_fd, self._on_status)
        self._loop.add_reader(self._sync.fileno(), self._on_sync)
        self._loop.add_reader(self._pidfd, self._on_end)

    def go(self) -> None:
        with contextlib.suppress(OSError):
            self._sync.send(b"g")

    def kill(self) -> None:
        """SIGKILL to process 1 of the namespace (the kernel kills the rest with it) and to the launcher."""
        for pidfd in (self.child_pidfd, self._pidfd):
            if pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        for fd in (self._output_fd, self._status_fd, self._pidfd, self.child_pidfd):
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._loop.remove_reader(self._sync.fileno())
        self._sync.close()

    def _on_output(self) -> None:
        try:
            data = os.read(self._output_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.write(data)
        else:
            self._loop.remove_reader(self._output_fd)
            self.output_ended.set()

    def read_status(self) -> None:
        """Take in what the launcher has said so far; it may have ended before the loop saw its last words."""
        while not self.status_known.is_set() or self.exit_code is None:
            try:
                data = os.read(self._status_fd, _READ_BYTES)
            except BlockingIOError:
                return
            self._take_status(data)
            if not data:
                return

    def _on_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._take_status(os.read(self._status_fd, _READ_BYTES))

    def _take_status(self, data: bytes) -> None:
        if not data:
            self._loop.remove_reader(self._status_fd)
            self.status_known.set()
            return
        self._status += data
        *documents, self._status = self._status.split(b"\n")
        for document in documents:
            values = json.loads(document)
            self.exit_code = values.get("exit-code", self.exit_code)
            if "child-pid" in values:
                self._watch_child(int(values["child-pid"]))

    def _watch_child(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.child_ended.set()
        else:
            if _group_of(pid) == self._group:
                self.child_pidfd = pidfd
                self._loop.add_reader(pidfd, self._on_child_end)
            else:  # it ended, and its number went to another process
                os.close(pidfd)
                self.child_ended.set()
        self.status_known.set()

    def _on_child_end(self) -> None:
        self._loop.remove_reader(self.child_pidfd)
        self.child_ended.set()

    def _on_sync(self) -> None:
        self._loop.remove_reader(self._sync.fileno())
        with contextlib.suppress(OSError):
            if self._sync.recv(64):
                self.ready.set()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.process.wait()
        self.ended.set()


async def supervise(
    make_launch: Callable[[int, int], Launch],
    *,
    timeout_s: float,
    log_path: Path | None,
    log_bytes: int,
    clock: Clock,
) -> Ended:
    """Run a launcher; `make_launch(status_fd, sync_fd)` gives its command line.

    The time limit counts from the command's start, not from the sandbox's. Raises SandboxError when a killed process
    does not die, OSError or ValueError when the launcher cannot be started at all.
    """
    log = BoundedLog(log_path, log_bytes)
    try:
        launcher = _Launcher(make_launch, log)
    except BaseException:
        log.close()
        raise
    started_s, started = clock.now_s(), clock.monotonic_s()
    timed_out, error = False, ""
    try:
        try:
            await first_of(launcher.ready, launcher.ended, timeout_s=SETUP_LIMIT_S)
            if launcher.ready.is_set():
                started_s, started = clock.now_s(), clock.monotonic_s()
                launcher.go()
                timed_out = not await first_of(launcher.ended, timeout_s=timeout_s)
            elif not launcher.ended.is_set():
                error = f"the sandbox was not built within {SETUP_LIMIT_S:g} s"
        finally:
            duration_s = clock.monotonic_s() - started
            await _end(launcher)
        if not launcher.ready.is_set():
            error = error or "the sandbox could not be built"
            error = f"{error}: {log.tail_text().strip() or 'no output'}"
        return Ended(
            exit_code=None if timed_out or error else launcher.exit_code,
            timed_out=timed_out,
            error=error,
            output_tail=log.tail_text(),
            started_s=started_s,
            finished_s=started_s + duration_s,
            duration_s=duration_s,
        )
    finally:
        launcher.close()
        log.close()


async def first_of(*events: asyncio.Event, timeout_s: float) -> bool:
    """Wait until one of the events is set; False when the time ran out first."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for wait in waits:
            wait.cancel()


async def _end(launcher: _Launcher) -> None:
    """Kill what is left and wait for it; a cancellation in between is put off until it is done."""
    ending = asyncio.ensure_future(_kill_and_wait(launcher))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            if ending.cancelled():
                raise
            cancelled = error
        except SandboxError:
            break
    ending.result()
    if cancelled is not None:
        raise cancelled


async def _kill_and_wait(launcher: _Launcher) -> None:
    if not launcher.ended.is_set():
        # Process 1 must be known before its launcher is killed: one that is not armed yet would be left waiting.
        await first_of(launcher.status_known, launcher.ended, timeout_s=DEATH_LIMIT_S)
    launcher.read_status()
    launcher.kill()
    deaths = [launcher.ended]
    if launcher.child_pidfd >= 0:
        deaths.append(launcher.child_ended)
    for death in deaths:
        if not await first_of(death, timeout_s=DEATH_LIMIT_S):
            raise SandboxError(
                f"processes of the sandbox with launcher {launcher.process.pid} are still there {DEATH_LIMIT_S:g} s "
                "after SIGKILL; a file system that does not answer is the usual cause"
            )
    await first_of(launcher.output_ended, timeout_s=DRAIN_LIMIT_S)


def _group_of(pid: int) -> int:
    """The process group of a process, -1 when it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
