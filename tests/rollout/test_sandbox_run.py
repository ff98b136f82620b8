"""How a sandboxed command ends: exit codes, time limit, bounds, cancellation, death of its starter."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

import gyre_core.rollout.sandbox as sandbox_module
from gyre_core.errors import SandboxError
from gyre_core.rollout.sandbox import Sandbox, choose_backend, probe_backend
from tests.support.sandboxes import new_marker, processes_with

# Ignores SIGTERM, leaves its session, and keeps children: what killing a process group leaves behind.
STUBBORN = """
trap '' TERM
setsid bash -c 'sleep 1000; :' "$0" &
(setsid bash -c 'sleep 1000; :' "$0" &)
touch /app/started
"""


def stubborn(marker: str, then: str) -> list[str]:
    return ["bash", "-c", STUBBORN + then, marker]


async def poll(condition, *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "code"), [("true", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exit 125", 125)]
)
async def test_run_exit_code_is_the_commands(sandbox: Sandbox, workspace: Path, script: str, code: int):
    result = await sandbox.run(["bash", "-c", script], workspace=workspace, timeout_s=30)
    assert (result.exit_code, result.timed_out, result.error) == (code, False, "")
    assert result.finished_s - result.started_s == pytest.approx(result.duration_s, abs=1e-5)


async def test_run_command_that_does_not_exist_ends_with_127(sandbox: Sandbox, workspace: Path):
    result = await sandbox.run(["no-such-program"], workspace=workspace, timeout_s=30)
    assert result.exit_code == 127
    assert "no-such-program" in result.log_tail


async def test_run_without_a_workspace_is_an_error_not_an_exception(sandbox: Sandbox, tmp_path: Path):
    (tmp_path / "link").symlink_to("/etc")
    for workspace in (tmp_path / "missing", tmp_path / "link"):
        result = await sandbox.run(["true"], workspace=workspace, timeout_s=30)
        assert result.exit_code is None and "workspace" in result.error


async def test_run_sandbox_that_cannot_be_built_is_an_error(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    result = await sandbox.run(["true"], workspace=workspace, timeout_s=30, read_only=[(tmp_path / "no", "/in")])
    assert result.exit_code is None and "could not be built" in result.error and "No such file" in result.error


async def test_run_without_room_for_its_folders_is_an_error(
    sandbox: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sandbox_module.tempfile, "mkdtemp", refuse)
    result = await sandbox.run(["true"], workspace=workspace, timeout_s=30)
    assert "No space left on device" in result.error


@pytest.mark.parametrize("mode", ["000", "700"])
async def test_run_in_a_workspace_that_its_agent_shut(sandbox: Sandbox, workspace: Path, mode: str):
    (workspace / "answer").write_text("42")
    await sandbox.run(["chmod", mode, "/app"], workspace=workspace, timeout_s=30)
    result = await sandbox.run(["cat", "answer"], workspace=workspace, timeout_s=30)
    assert (result.exit_code, result.log_tail) == (0, "42")


@pytest.mark.parametrize("argument", ["x" * 200_000, "nul\0byte"], ids=["too long", "nul"])
async def test_run_impossible_argument_is_an_error(sandbox: Sandbox, workspace: Path, argument: str):
    result = await sandbox.run(["echo", argument], workspace=workspace, timeout_s=30)
    assert result.exit_code != 0
    assert result.error or "Argument list too long" in result.log_tail


async def test_run_time_limit_kills_everything(sandbox: Sandbox, workspace: Path):
    marker = new_marker()
    result = await sandbox.run(stubborn(marker, "wait"), workspace=workspace, timeout_s=0.4)
    assert processes_with(marker) == []
    assert result.timed_out and result.exit_code is None
    assert 0.4 <= result.duration_s < 5
    assert (workspace / "started").exists(), "the workspace stays"


async def test_run_background_processes_end_with_the_command(sandbox: Sandbox, workspace: Path):
    marker = new_marker()
    result = await sandbox.run(stubborn(marker, "exit 0"), workspace=workspace, timeout_s=30)
    assert processes_with(marker) == []
    assert result.exit_code == 0 and result.duration_s < 10


async def test_run_cancelled_kills_and_raises(sandbox: Sandbox, workspace: Path):
    marker = new_marker()
    task = asyncio.create_task(sandbox.run(stubborn(marker, "wait"), workspace=workspace, timeout_s=60))
    await poll((workspace / "started").exists)
    assert processes_with(marker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_with(marker) == []
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


async def test_run_cancelled_at_any_moment_of_its_start_leaves_nothing(sandbox: Sandbox, workspace: Path):
    marker = new_marker()
    for delay_s in (0, 0, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03):
        task = asyncio.create_task(sandbox.run(stubborn(marker, "wait"), workspace=workspace, timeout_s=60))
        await asyncio.sleep(delay_s)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert processes_with(marker) == []


STARTER = """
import asyncio, sys
from pathlib import Path
from gyre_core.rollout.sandbox import Sandbox

async def main(backend, folder, marker, argv):
    sandbox = Sandbox(backend)
    runs = []
    for number in range(8):
        workspace = Path(folder, str(number), "workspace")
        workspace.mkdir(parents=True)
        runs.append(asyncio.ensure_future(sandbox.run(argv, workspace=workspace, timeout_s=600)))
    await asyncio.gather(*runs)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
"""


@pytest.mark.parametrize("num_started", [8, 1], ids=["all running", "some still starting"])
async def test_run_starter_killed_leaves_nothing(sandbox: Sandbox, tmp_path: Path, num_started: int):
    marker = new_marker()
    command = [sys.executable, "-c", STARTER, sandbox.backend, str(tmp_path), marker, *stubborn(marker, "wait")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    starter = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        await poll(lambda: len(list(tmp_path.glob("*/workspace/started"))) >= num_started)
        starter.send_signal(signal.SIGKILL)
    finally:
        starter.kill()
        starter.wait()
    await poll(lambda: processes_with(marker) == [])


FORKS = """
import os, time
forks = 0
try:
    while forks < 500:
        if os.fork() == 0:
            time.sleep(60)
        forks += 1
except OSError as error:
    print(forks, error.errno)
"""


async def test_run_processes_are_bounded(new_sandbox, workspace: Path):
    argv = [sys.executable, "-I", "-S", "-c", FORKS]
    result = await new_sandbox(processes=40).run(argv, workspace=workspace, timeout_s=60)
    count, error_number = result.log_tail.split()
    assert 30 <= int(count) < 40 and int(error_number) == errno.EAGAIN


async def test_run_fork_bomb_ends_at_the_time_limit(new_sandbox, workspace: Path):
    marker = new_marker()
    script = f"bomb() {{ bomb | bomb & }}; bomb; sleep 100 # {marker}"
    result = await new_sandbox(processes=60).run(["bash", "-c", script], workspace=workspace, timeout_s=0.5)
    assert result.timed_out and processes_with(marker) == []


async def test_run_file_size_is_bounded(new_sandbox, workspace: Path):
    script = "dd if=/dev/zero of=/app/big bs=64k count=1000; echo $?; head -c 9000000 /dev/zero > /tmp/big; echo $?"
    result = await new_sandbox(file_bytes=2**20, tmp_bytes=2**19).run(
        ["bash", "-c", script], workspace=workspace, timeout_s=30
    )
    assert (workspace / "big").stat().st_size == 2**20
    assert [line for line in result.log_tail.splitlines() if line.isdigit()] == ["153", "1"], "SIGXFSZ; no space left"


async def test_run_output_is_bounded_and_never_blocks(new_sandbox, workspace: Path, tmp_path: Path):
    log = tmp_path / "logs" / "run.log"
    script = "echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last 1>&2"
    result = await new_sandbox(log_bytes=100_000).run(
        ["bash", "-c", script], workspace=workspace, timeout_s=60, log_path=log
    )
    assert result.exit_code == 0
    assert len(result.log_tail) == 2000 and result.log_tail.endswith("x\nlast\n")
    text = log.read_text()
    assert text.startswith("first\n") and text.endswith("x\nlast\n")
    left_out = len("first\n") + 30_000_000 + len("\nlast\n") - 100_000
    assert f"[... {left_out} bytes left out ...]" in text and len(text) < 100_100


async def test_run_short_output_is_kept_whole(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    log = tmp_path / "run.log"
    result = await sandbox.run(["printf", "caf\\303\\251 \\377"], workspace=workspace, timeout_s=30, log_path=log)
    assert result.log_tail == "café \ufffd"
    assert log.read_bytes() == b"caf\xc3\xa9 \xff"


async def test_run_log_that_cannot_be_written_does_not_matter(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = await sandbox.run(["echo", "hi"], workspace=workspace, timeout_s=30, log_path=tmp_path / "file" / "log")
    assert (result.exit_code, result.log_tail) == (0, "hi\n")


async def test_run_many_at_once(sandbox: Sandbox, tmp_path: Path):
    folders = [tmp_path / str(number) / "workspace" for number in range(24)]
    for folder in folders:
        folder.mkdir(parents=True)
    runs = [
        sandbox.run(["bash", "-c", "echo $1 > /app/out; exit $1", "x", str(n)], workspace=f, timeout_s=60)
        for n, f in enumerate(folders)
    ]
    results = await asyncio.gather(*runs)
    assert [result.exit_code for result in results] == list(range(24))
    assert [(folder / "out").read_text() for folder in folders] == [f"{n}\n" for n in range(24)]


def test_run_works_in_a_thread_and_under_uvloop(sandbox: Sandbox, workspace: Path):
    results = []

    def work() -> None:
        results.append(asyncio.run(sandbox.run(["true"], workspace=workspace, timeout_s=30)))
        results.append(uvloop.run(sandbox.run(["sleep", "100"], workspace=workspace, timeout_s=0.2)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].exit_code == 0 and results[1].timed_out


async def test_run_descriptors_are_given_back(sandbox: Sandbox, workspace: Path):
    await sandbox.run(["true"], workspace=workspace, timeout_s=30)
    before = len(os.listdir("/proc/self/fd"))
    for timeout_s in (30, 30, 0.01):
        await sandbox.run(["sleep", "0.05"], workspace=workspace, timeout_s=timeout_s)
    assert len(os.listdir("/proc/self/fd")) == before


DEEP_FOLDERS = """
import os
os.chdir("/home/agent")
for _ in range(1200):  # deeper than Python's recursion limit
    os.mkdir("d")
    os.chdir("d")
"""


async def test_run_deep_folders_of_an_agent_are_removed(sandbox: Sandbox, workspace: Path):
    argv = [sys.executable, "-I", "-S", "-c", DEEP_FOLDERS]
    result = await sandbox.run(argv, workspace=workspace, timeout_s=30)
    assert result.exit_code == 0, result.log_tail
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


def test_probe_without_bubblewrap_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sandbox_module, "probe_backend", probe_backend.__wrapped__)
    assert "apt-get install bubblewrap" in sandbox_module.probe_backend("bubblewrap")
    with pytest.raises(SandboxError, match=r"bubblewrap: .*not installed"):
        choose_backend("bubblewrap")
    if not probe_backend("namespaces"):
        assert choose_backend("auto") == "namespaces"
