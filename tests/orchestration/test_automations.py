"""The automations of infra/ on a real Prefect server, until they have done what they say."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from gyre_core.process import free_port
from tasks.alerts import HELDOUT_FELL
from tasks.deployments import Choices, apply_automations, apply_deployments, read_deployments
from tasks.prefect_server import start_server

pytestmark = pytest.mark.integration

INFRA = Path(__file__).parents[2] / "infra"
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    """A server as runs start it: its services judge events, which the in-process one of other tests does not do."""
    server = start_server(tmp_path_factory.mktemp("prefect"), free_port(), timeout_s=180.0)
    try:
        with temporary_settings({PREFECT_API_URL: server.api_url}), get_client(sync_client=True) as client:
            yield client
            EventsWorker.instance().drain()
    finally:
        server.stop()


class Hook(http.server.BaseHTTPRequestHandler):
    """Takes what a webhook is sent."""

    got: list[Any]

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def webhook() -> Iterator[tuple[str, list[Any]]]:
    got: list[Any] = []
    handler = type("Listening", (Hook,), {"got": got})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/warn", got
        listening.shutdown()
        thread.join()


def wait_for(what: Any, *, between: Any = lambda: None) -> Any:
    """What `what` returns as soon as it is true; `between` two looks something may be done again."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < end_s, "the automation did not fire"
        between()
        time.sleep(1.0)
    return found


def quicker(name: str, folder: Path) -> Path:
    """The file with its proactive triggers at Prefect's shortest patience."""
    text = (INFRA / name).read_text()
    tree = yaml.safe_load(text)
    for automation in tree.get("automations", ()):
        if automation["trigger"]["posture"] == "Proactive":
            assert automation["trigger"]["within"] == 90
            automation["trigger"]["within"] = 10
    for deployment in tree.get("deployments", ()):
        for trigger in deployment.get("triggers", ()):
            trigger["within"] = 10
    changed = folder / name
    changed.write_text(yaml.safe_dump(tree))
    return changed


def test_warning_of_a_run_is_sent_to_the_webhook(server: SyncPrefectClient) -> None:
    with webhook() as (url, got):
        apply_automations(INFRA / "automations.yaml", notify_url=url)

        def warn() -> None:  # an automation that the server has not loaded yet hears nothing
            resource = {"prefect.resource.id": "gyre.run.nightly", "prefect.resource.name": "nightly"}
            emit_event(event=HELDOUT_FELL, resource=resource, payload={"run": "nightly", "message": "from 0.6 to 0.2"})

        (first, *_) = wait_for(lambda: got, between=warn)
    assert "from 0.6 to 0.2" in json.dumps(first)
    assert "gyre: held-out reward fell" in json.dumps(first)


def test_flow_run_without_a_heartbeat_is_crashed_and_its_deployment_starts_again(
    server: SyncPrefectClient, tmp_path: Path
) -> None:
    apply_automations(quicker("automations.yaml", tmp_path))
    chosen = Choices(run="nightly", config=tmp_path / "run.toml", runs_dir=tmp_path / "runs", pool="test-runs")
    entries = read_deployments(quicker("prefect.yaml", tmp_path), chosen)
    names = apply_deployments(entries, pool="test-runs")
    assert "train/nightly" in names
    deployment = server.read_deployment_by_name("train/nightly")
    made = server.create_flow_run_from_deployment(deployment.id, tags=["gyre", "gyre-run:nightly"])
    server.set_flow_run_state(made.id, Running(), force=True)
    tags = [
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
        for tag in ("gyre", "gyre-run:nightly")
    ]

    def beat() -> None:
        emit_event(
            event="prefect.flow-run.heartbeat",
            resource={"prefect.resource.id": f"prefect.flow-run.{made.id}", "prefect.resource.name": made.name},
            related=tags,
        )

    beat()
    last_beat_s = time.monotonic()

    def crashed() -> bool:
        state = server.read_flow_run(made.id).state
        return state is not None and state.is_crashed()

    def beat_again() -> None:  # the first may have come before the automation was loaded
        nonlocal last_beat_s
        if time.monotonic() - last_beat_s > 30.0:
            beat()
            last_beat_s = time.monotonic()

    wait_for(crashed, between=beat_again)
    state = server.read_flow_run(made.id).state
    assert state is not None and state.message == "no heartbeat for 90 s"

    def started_again() -> list[Any]:
        of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
        runs = server.read_flow_runs(deployment_filter=of_it)
        return [run for run in runs if run.id != made.id and run.created_by and run.created_by.type == "AUTOMATION"]

    (again, *_) = wait_for(started_again)
    assert again.deployment_id == deployment.id
    assert again.parameters["run"] == "nightly"
