"""The guard between Gyre and a server: nothing outlives it, whatever dies first. Small shell programs stand in."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre_core.engine.sglang import GUARD

# Starts a grandchild, tells both pids and its temporary folder, and waits.
PROGRAM = """
import os, subprocess, sys, time
grandchild = subprocess.Popen(["sleep", "600"])
line = f"{os.getpid()} {grandchild.pid} {os.environ['TMPDIR']}"
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(line)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def guarded(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", str(GUARD), *command], stdin=subprocess.PIPE)


def wait_for(condition: object, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def start_family(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """A guard, the pids of the program and its child, and the folder they were given."""
    note = tmp_path / "note"
    guard = guarded(sys.executable, "-c", PROGRAM, str(note))
    wait_for(note.exists, "the program did not start")
    first, second, folder = note.read_text().split()
    return guard, [int(first), int(second)], Path(folder)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_guard_pipe_closed_kills_the_whole_group_and_cleans_up(tmp_path: Path) -> None:
    guard, pids, folder = start_family(tmp_path)
    assert folder.is_dir()
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(20) == 128 + signal.SIGKILL
    assert gone(pids)
    assert not folder.exists()


def test_guard_terminated_kills_the_whole_group(tmp_path: Path) -> None:
    guard, pids, folder = start_family(tmp_path)
    guard.terminate()
    guard.wait(20)
    assert gone(pids)
    assert not folder.exists()
    guard.stdin.close()  # type: ignore[union-attr]


def test_guard_killed_takes_the_program_with_it(tmp_path: Path) -> None:
    guard, pids, folder = start_family(tmp_path)
    try:
        guard.kill()
        guard.wait(20)
        wait_for(lambda: gone(pids[:1]), "the program outlived its guard")
    finally:
        if psutil.pid_exists(pids[1]):
            os.kill(pids[1], signal.SIGKILL)  # a sleep does not ask to die with its parent, as SGLang's workers do
        guard.stdin.close()  # type: ignore[union-attr]
        shutil.rmtree(folder)  # a killed guard cannot


def test_guard_parent_killed_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "note"
    parent_code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-I", "-S", str(GUARD), sys.executable, "-c", PROGRAM, str(note)]
    with subprocess.Popen([sys.executable, "-c", parent_code, *command], stdout=subprocess.PIPE) as parent:
        guard_pid = int(parent.stdout.readline())  # type: ignore[union-attr]
        wait_for(note.exists, "the program did not start")
        parent.kill()
    first, second, _ = note.read_text().split()
    wait_for(lambda: gone([guard_pid, int(first), int(second)]), "processes outlived the parent")


@pytest.mark.parametrize("code", [0, 3])
def test_guard_program_ends_gives_its_exit_code(code: int) -> None:
    guard = guarded(sys.executable, "-c", f"raise SystemExit({code})")
    assert guard.wait(20) == code
    guard.stdin.close()  # type: ignore[union-attr]
