"""A server's life, with a small program in the place of SGLang."""

import json
import stat
from pathlib import Path

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
