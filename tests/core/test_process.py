"""Child processes: they end with their parent, and their failures tell what the log says."""

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre_core.errors import EngineError
from gyre_core.process import ChildProcess, free_port, listen, log_tail, secret_file

CHILD = """
import signal
from gyre_core.process import end_with_parent
end_with_parent()
print("up", flush=True)
signal.pause()
"""
PARENT = """
import sys, signal
from pathlib import Path
from gyre_core.process import ChildProcess
child = ChildProcess("child", [sys.executable, "-c", sys.argv[1]], log_path=Path(sys.argv[2]))
print(child.pid, flush=True)
signal.pause()
"""


def wait_until(condition, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_child_stop_ends_it_and_its_group(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    child = ChildProcess("child", [sys.executable, "-c", CHILD], log_path=log)
    assert wait_until(lambda: "up" in log_tail(log))
    child.stop()
    assert not child.running()


def test_child_parent_killed_child_ends(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(log)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert wait_until(lambda: "up" in log_tail(log))
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not alive(pid))


def test_child_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    program = "import sys; print('no such model'); sys.exit(3)"
    child = ChildProcess("engine", [sys.executable, "-c", program], log_path=tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"engine ended with exit code 3 [\s\S]*no such model"):
        child.wait_until(lambda: False, timeout_s=20, error=EngineError)
    child.stop()


def test_child_never_ready_is_told_by_time(tmp_path: Path) -> None:
    child = ChildProcess("engine", [sys.executable, "-c", CHILD], log_path=tmp_path / "engine.log")
    with pytest.raises(EngineError, match=r"was not ready after 0\.2 s"):
        child.wait_until(lambda: False, timeout_s=0.2, error=EngineError)
    child.stop()


def test_log_tail_missing_file_is_empty(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none.log") == ""


def test_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_listen_connection_made_while_the_server_is_away_is_served_by_the_next(tmp_path: Path) -> None:
    program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).accept()[0].sendall(b'served')"
    with listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            command = [sys.executable, "-c", program, str(listener.fileno())]
            child = ChildProcess("server", command, log_path=tmp_path / "log", pass_fds=(listener.fileno(),))
            assert client.recv(6) == b"served"
            assert child.wait() == 0
            child.stop()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", listener.getsockname()[1])


def test_secret_file_is_ours_alone_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.json"
    with pytest.raises(RuntimeError), secret_file(path, "secret"):
        assert path.read_text() == "secret" and path.stat().st_mode & 0o777 == 0o600
        raise RuntimeError
    assert not path.exists()


_ARENAS = """
import sys, threading, time
from gyre_core.process import limit_malloc_arenas
if sys.argv[1] == "limited":
    assert limit_malloc_arenas(2)
def work():
    kept = [bytearray(300) for _ in range(5000)]
    time.sleep(0.3)
threads = [threading.Thread(target=work) for _ in range(40)]
for thread in threads:
    thread.start()
heaps = 0
for line in open("/proc/self/maps"):
    fields = line.split()
    heaps += len(fields) < 6 and int(fields[0].partition("-")[0], 16) % (64 << 20) == 0  # glibc aligns its heaps so
print(heaps)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_the_heaps_that_are_allowed():
    found = {
        mode: int(subprocess.run([sys.executable, "-c", _ARENAS, mode], capture_output=True, text=True).stdout)
        for mode in ("limited", "default")
    }
    assert found["limited"] <= 2 < found["default"], found
