"""A small process between Gyre and an inference server: no server outlives the process that started it.

Run as `python -I -S guard.py COMMAND...` with standard input on the parent's pipe. It starts the command in a process
group and a temporary folder of their own, and kills the whole group with SIGKILL when the pipe closes (the parent died
or asks), on SIGTERM, or when the command ends. It waits until every process of the group is gone, removes the folder
and the shared memory that they had mapped, and ends with the command's exit code. Should the guard itself be killed,
the kernel kills the command, and SGLang's workers with it (they ask for that themselves).

Standard library only, and no import of Gyre: it must start in milliseconds and hold a few megabytes.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_TIMEOUT_S = 10.0  # SIGKILLed processes vanish in milliseconds; one that hangs in the kernel is left to init
SHARED_MEMORY = re.compile(r"/dev/shm/(?:sglang_loads_|sem\.mp-|sgl_shm|psm_)\S+")


def main(command: list[str]) -> int:
    """Run `command` until it ends or must end; returns its exit code (128 + signal when killed)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # workers whose parent died are reaped here, so we see them go
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A short path: SGLang puts Unix sockets there, whose names may have 107 characters.
    folder = tempfile.mkdtemp(prefix="gyre-engine-")
    shared: set[str] = set()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        while child.poll() is None and not stopping:
            readable, _, _ = select.select([0, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
            if 0 in readable and not os.read(0, 4096):
                break
        shared = shared_memory_of(child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        reap(child.pid)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in shared:
            with contextlib.suppress(OSError):
                os.unlink(path)
    return 128 - code if code < 0 else code


def shared_memory_of(group: int) -> set[str]:
    """Shared-memory files of SGLang that processes of the group have mapped; SIGKILL would leave them behind."""
    paths: set[str] = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry)) == group:
                with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as maps:
                    paths.update(match.group() for line in maps if (match := SHARED_MEMORY.search(line)))
    return paths


def reap(group: int) -> None:
    """Collect orphans until the group is empty."""
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
