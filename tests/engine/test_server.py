"""A server's life, with a small program in the place of SGLang."""

import json
import stat
import sys
from pathlib import Path

import psutil
import pytest

from gyre_core.config.models import EngineConfig
from gyre_core.engine.sglang import SGLangServer
from gyre_core.errors import EngineError, SetupError
from tests.support.tiny_model import save_tiny_model

FOUND = {
    "sglang": "0.5.23",
    "plugin": "0.1.0",
    "torch": "2.13.0+cpu",
    "mooncake": False,
    "mooncake_error": "none here",
}


def interpreter(folder: Path, script: str, **found: object) -> Path:
    """A program that answers the inspection as told, and runs `script` when it is to serve."""
    folder.mkdir(exist_ok=True)
    path = folder / "python"
    answer = json.dumps(FOUND | found)
    path.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{answer}'; exit; fi\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def make_server(tmp_path: Path, script: str, **found: object) -> SGLangServer:
    config = EngineConfig(python=interpreter(tmp_path, script, **found))
    model = save_tiny_model(tmp_path / "model")
    return SGLangServer(config, model, context_length=64, slots=1, log_path=tmp_path / "engine.log")


def test_server_that_ends_while_it_starts_says_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("RuntimeError: of an earlier run\n")
    server = make_server(tmp_path, "echo \"ModuleNotFoundError: No module named 'zmq'\" >&2; exit 1")
    server.start()
    with pytest.raises(EngineError, match="run `make engine`") as caught:
        server.wait_ready()
    assert "No module named 'zmq'" in str(caught.value)
    assert "earlier run" not in str(caught.value)
    assert not server.running()
    server.stop()


def test_server_that_is_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    server = make_server(tmp_path, "exec sleep 600")
    server.start()
    assert server.running()
    with pytest.raises(EngineError, match=r"not ready after 0\.3 s"):
        server.wait_ready(0.3)
    assert not server.running()


# A server that answers everything with 200 and an empty object, whatever the key.
OPEN_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_server_that_answers_without_its_key_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "open.py").write_text(OPEN_SERVER)
    server = make_server(tmp_path, f'exec {sys.executable} -I -S {tmp_path / "open.py"} "$@"')
    server.start()
    with pytest.raises(EngineError, match="without its key"):
        server.wait_ready(30)
    assert not server.running()


def test_server_has_a_key_of_its_own_outside_its_command_line(tmp_path: Path) -> None:
    servers = [make_server(tmp_path / name, 'echo "$@"; exec sleep 600') for name in "ab"]
    assert servers[0].api_key != servers[1].api_key
    assert all(len(server.api_key) >= 43 for server in servers), "256 random bits"
    servers[0].start()
    processes = [psutil.Process(servers[0].pid), *psutil.Process(servers[0].pid).children(recursive=True)]
    assert not any(servers[0].api_key in " ".join(process.cmdline()) for process in processes)
    servers[0].stop()


def test_server_started_twice_is_refused(tmp_path: Path) -> None:
    server = make_server(tmp_path, "exec sleep 600")
    server.start()
    with pytest.raises(EngineError, match="running already"):
        server.start()
    server.stop()
    server.stop()  # stopping again is harmless
    server.start()  # and it can start anew
    server.stop()


def test_server_without_mooncake_starts_without_remote_weights(tmp_path: Path) -> None:
    server = make_server(tmp_path, 'echo "$@"; exec sleep 600')
    assert not server.remote_weights
    server.start()
    with pytest.raises(EngineError) as caught:
        server.wait_ready(0.3)
    assert "--model-path" in str(caught.value)
    assert "remote-instance" not in (tmp_path / "engine.log").read_text()


def test_server_on_an_unfit_environment_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make engine"):
        make_server(tmp_path, "exit 0", plugin=None)
