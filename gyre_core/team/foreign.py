"""A small process between Gyre and a program that is not Gyre's: the program ends with whoever started it.

Run as `python -m gyre_core.team.foreign [--user NAME] [--signal INT] [--grace-s 10] -- COMMAND...` with standard input
on the parent's pipe. When the pipe closes (the parent died or asks) or on SIGTERM the program gets its own signal for a
clean end, and SIGKILL for its whole process group after the grace. Should this process be killed, the kernel sends the
program that signal. The exit code is the program's (128 + signal when killed).
"""

import argparse
import contextlib
import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def foreign_command(
    command: list[str], *, user: str | None = None, stop_signal: signal.Signals = signal.SIGTERM, grace_s: float = 10.0
) -> list[str]:
    """The command line that runs `command` behind this module."""
    options = ["--signal", str(int(stop_signal)), "--grace-s", f"{grace_s:g}"]
    options += ["--user", user] if user is not None else []
    return [sys.executable, "-m", "gyre_core.team.foreign", *options, "--", *command]


def main(argv: list[str]) -> int:
    """Run the command until it ends or must end."""
    parser = argparse.ArgumentParser(prog="python -m gyre_core.team.foreign")
    parser.add_argument("--user", help="whose rights the program has; only root can give any")
    parser.add_argument("--signal", type=int, default=int(signal.SIGTERM), help="what ends the program cleanly")
    parser.add_argument("--grace-s", type=float, default=10.0, help="time for that before SIGKILL")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: stopping.append(received))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    program = _start(options.command, options.user, options.signal)
    while program.poll() is None and not stopping:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        if 0 in readable and not os.read(0, 4096):
            break
    if program.poll() is None:
        program.send_signal(options.signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(options.grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    code = program.wait()
    return 128 - code if code < 0 else code


def rights_of(user: str | None) -> dict[str, Any]:
    """What subprocess needs to start a program with a user's rights; nothing when we cannot give any."""
    if user is None or os.geteuid() != 0:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(user, entry.pw_gid)}


def _start(command: list[str], user: str | None, stop_signal: int) -> "subprocess.Popen[Any]":
    libc = ctypes.CDLL(None, use_errno=True)
    # After the change of user: the kernel forgets this setting when the user changes.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, stop_signal, 0, 0, 0),
        **rights_of(user),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
