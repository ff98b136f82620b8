"""What a cell host leaves behind when it is killed is found by its mark and ended, and nothing else is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.cells.fleet_launch import MARK, LocalLauncher, end_leftovers, marked
from tests.support.members import until

SLEEPER = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)"


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    mark = LocalLauncher(work=tmp_path, logs=tmp_path).mark("cell-0")
    yield mark
    end_leftovers(mark, grace_s=0.0)


def test_leftovers_child_of_a_dead_host_is_found_by_its_mark_and_ended(mark: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env={**os.environ, MARK: mark})
    parent.wait()
    until(lambda: len(marked(mark)) == 1)
    assert end_leftovers(mark, grace_s=0.0) == 1
    assert marked(mark) == []


def test_leftovers_that_end_by_themselves_are_waited_for_and_stopped_ones_killed_at_once(mark: str) -> None:
    ending = subprocess.Popen([sys.executable, "-c", "input()"], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE)
    stopped = subprocess.Popen([sys.executable, "-c", SLEEPER], env={**os.environ, MARK: mark})
    until(lambda: len(marked(mark)) == 2)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert ending.stdin is not None
    ending.stdin.close()
    assert end_leftovers(mark, grace_s=60.0) == 1
    assert stopped.wait() == -signal.SIGKILL
    assert ending.wait() == 1  # end of file, by itself


def test_leftovers_of_another_cell_or_run_are_left_alone(mark: str, tmp_path: Path) -> None:
    other = LocalLauncher(work=tmp_path / "other", logs=tmp_path).mark("cell-0")
    same_run = LocalLauncher(work=tmp_path, logs=tmp_path).mark("cell-1")
    assert len({mark, other, same_run}) == 3
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], env={**os.environ, MARK: same_run})
    try:
        until(lambda: marked(same_run) == [process.pid])
        assert end_leftovers(mark, grace_s=0.0) == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
