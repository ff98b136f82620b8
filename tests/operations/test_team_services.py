"""PostgreSQL and the supervisor of a team's services, with real processes."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gyre_core.clock import ManualClock
from gyre_core.errors import SetupError
from gyre_core.process import free_port
from gyre_core.team.foreign import foreign_command
from gyre_core.team.postgres import Postgres, find_postgres, init_postgres
from gyre_core.team.supervisor import Service, Supervisor

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the user postgres can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-team-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def child_of(pid: int) -> psutil.Process:
    assert wait_until(lambda: bool(psutil.Process(pid).children()))
    return psutil.Process(pid).children()[0]


def test_foreign_program_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    code = f"""
import subprocess, time
subprocess.Popen({foreign_command([sys.executable, "-c", SLEEPER])!r}, stdin=subprocess.PIPE)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        wrapper = child_of(parent.pid)
        program = child_of(wrapper.pid)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not wrapper.is_running() or wrapper.status() == psutil.STATUS_ZOMBIE)
    assert wait_until(lambda: not program.is_running())


def test_foreign_program_ends_when_its_wrapper_is_killed() -> None:
    wrapper = subprocess.Popen(
        foreign_command([sys.executable, "-c", SLEEPER]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert wrapper.stdout is not None and wrapper.stdout.readline() == b"up\n"
    program = child_of(wrapper.pid)
    wrapper.kill()
    wrapper.wait()
    assert wait_until(lambda: not program.is_running())


def test_foreign_program_that_ignores_its_signal_is_killed_after_the_grace() -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
    wrapper = subprocess.Popen(
        foreign_command([sys.executable, "-c", stubborn], grace_s=0.2), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert wrapper.stdout is not None and wrapper.stdout.readline() == b"up\n"
    wrapper.communicate(timeout=30)  # closes the pipe
    assert wrapper.returncode == 128 + signal.SIGKILL


def test_supervisor_starts_a_killed_service_again_after_pauses_that_double(tmp_path: Path) -> None:
    clock = ManualClock()
    with Supervisor(clock=clock) as team:
        team.start(
            Service(
                name="sleeper",
                command=foreign_command([sys.executable, "-c", SLEEPER]),
                log_path=tmp_path / "sleeper.log",
                ready=lambda: True,
            )
        )
        pids = [team.pids()["sleeper"]]
        for pause_s in (1.0, 2.0):
            os.kill(pids[-1], signal.SIGKILL)
            assert wait_until(lambda: _ended(pids[-1]))
            team.tend()  # sees the end
            clock.advance(pause_s - 0.1)
            team.tend()
            assert team.pids()["sleeper"] == pids[-1], "not before the pause is over"
            clock.advance(0.1)
            team.tend()
            assert team.pids()["sleeper"] != pids[-1]
            pids.append(team.pids()["sleeper"])
        assert team.restarts == {"sleeper": 2}
    assert all(_ended(pid) for pid in pids)


def _ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_supervisor_service_that_never_gets_ready_is_an_error_with_its_log(tmp_path: Path) -> None:
    code = "print('no such setting', flush=True); raise SystemExit(3)"
    with Supervisor() as team, pytest.raises(SetupError, match=r"(?s)exit code 3.*no such setting"):
        team.start(
            Service(
                name="broken",
                command=[sys.executable, "-c", code],
                log_path=tmp_path / "broken.log",
                ready=lambda: False,
            )
        )


@pytest.mark.integration
def test_postgres_keeps_its_data_over_a_restart_and_asks_for_the_password(open_folder: Path) -> None:
    try:
        programs = find_postgres()
    except SetupError as error:
        pytest.skip(str(error))
    server = Postgres(programs=programs, data=open_folder / "postgres", port=free_port(), password="secret")
    assert init_postgres(server, scratch=open_folder)
    assert not init_postgres(server, scratch=open_folder), "its folder is there"
    for _ in range(2):
        with Supervisor() as team:
            team.start(
                Service(
                    name="postgres",
                    command=server.command(),
                    log_path=open_folder / "postgres.log",
                    ready=server.ready,
                    started=lambda: server.create_database("prefect"),
                )
            )
            assert server.size_bytes("prefect") > 1_000_000
            stranger = replace(server, password="guessed")
            with pytest.raises(SetupError, match="password authentication failed"):
                stranger.size_bytes("prefect")
        assert not (server.data / "postmaster.pid").exists(), "a clean end"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another user")
def test_postgres_folder_that_its_user_cannot_reach_is_named(tmp_path: Path) -> None:
    try:
        programs = find_postgres()
    except SetupError as error:
        pytest.skip(str(error))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = Postgres(programs=programs, data=closed / "postgres", port=free_port(), password="secret")
    with pytest.raises(SetupError, match=r"chmod o\+x .*"):
        init_postgres(server, scratch=tmp_path)


def test_flow_run_ends_when_its_worker_is_killed() -> None:
    flow_run = "from tasks.scheduled_runs import end_with_worker; end_with_worker(); " + SLEEPER
    worker = f"""
import os, subprocess, sys, time
environment = {{**os.environ, "PREFECT__FLOW_RUN_ID": "x"}}
child = subprocess.Popen([sys.executable, "-c", {flow_run!r}], stdout=subprocess.PIPE, env=environment)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
