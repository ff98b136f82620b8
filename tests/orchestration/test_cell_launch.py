"""Cell hosts that Prefect workers start: placed by work queue, watched by state, ended by cancelling."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from gyre_core.cells.client import CellClient
from gyre_core.cells.settings import CellSettings
from gyre_core.errors import GyreError
from gyre_core.process import free_port
from tasks.cell_launch import WorkerLauncher
from tests.support.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration

POOL = "test-cells"
HERE = "127.0.0.2"  # an address of this machine that stands for another one


@pytest.fixture
def worker(tmp_path: Path, prefect_api: None) -> Iterator[None]:
    """A process worker for the queue of one machine."""
    environment = {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--work-queue", HERE]
    with (tmp_path / "worker.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=Path(__file__).parents[2])
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def settings(folder: Path, model: Path, host: str) -> CellSettings:
    return CellSettings(
        cell_id="cell-0",
        host=host,
        port=free_port(),
        secret="secret-of-the-cell",
        model_path=model,
        context_length=128,
        slots=1,
        seed=0,
        work_dir=folder,
        engine=None,
    )


def until(condition: object, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False


@pytest.mark.timeout(280)
def test_cell_runs_on_its_machines_worker_and_ends_when_it_is_stopped(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    launch = WorkerLauncher(pool=POOL, run_id="r1", work=tmp_path / "work", logs=tmp_path)
    request.getfixturevalue("worker")
    wanted = settings(tmp_path, save_tiny_model(tmp_path / "model"), HERE)
    process = launch(wanted)
    client = CellClient(f"http://{HERE}:{wanted.port}", wanted.secret)

    def answers() -> bool:
        assert process.running(), process.log_path.read_text() if process.log_path.exists() else "ended"
        try:
            return client.status()["state"] == "rollout"
        except GyreError:
            return False

    try:
        assert until(answers, 200), "the cell never answered"
        host_pid = client.status()["pid"]
        assert process.pid not in (0, os.getpid(), host_pid), "the flow run's process, the host's parent"
    finally:
        process.stop(grace_s=5.0)
        client.close()
    assert not process.running() and process.exit_code == 1, "cancelled"
    assert until(lambda: not Path(f"/proc/{host_pid}").exists(), 30), "the host ends with its flow run"
    assert not (tmp_path / "work" / "cell-0.launch.json").exists(), "its secrets are gone"


def test_cell_that_no_worker_takes_is_gone_when_it_is_stopped(tmp_path: Path) -> None:
    launch = WorkerLauncher(pool=POOL, run_id="r2", work=tmp_path / "work", logs=tmp_path)
    process = launch(settings(tmp_path, tmp_path, "192.0.2.1"))
    assert process.running() and process.exit_code is None and process.pid == 0
    process.stop(grace_s=0.0)
    with get_client(sync_client=True) as client:
        found = [
            run
            for run in client.read_flow_runs()
            if run.name == "r2 / cell-0" or run.parameters.get("name") == "r2 / cell-0"
        ]
    assert [run.state_name for run in found] == ["Cancelled"]
    assert "secret-of-the-cell" not in found[0].model_dump_json(), "no secret passes through Prefect"
