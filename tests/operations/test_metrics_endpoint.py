"""The Prometheus endpoint over HTTP, and what each process shows there."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.testclient import TestClient

from gyre_core.metrics import MetricsWriter
from gyre_core.metrics_endpoint import VARIABLE, Sample, add_metrics, exposition, metrics_token, serve_metrics
from gyre_core.metrics_samples import cell_samples, prometheus_name, proxy_samples


def scrape(folder: Path, *, token: str | None = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of the folder's one target, as Prometheus finds and reads it."""
    (path,) = (folder / "targets").glob("*.json")
    ((target,),) = [entry["targets"] for entry in json.loads(path.read_text())]
    given = token if token is not None else metrics_token(folder)
    request = urllib.request.Request(f"http://{target}/metrics", headers={"Authorization": f"Bearer {given}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_not_served_unless_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with serve_metrics("flow", lambda: []) as url:
        assert url is None


def test_run_scalars_are_scraped_with_their_newest_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "metrics"
    monkeypatch.setenv(VARIABLE, str(folder))
    with MetricsWriter(tmp_path / "runs" / "r1") as metrics:
        metrics.write(0, {"reward/mean": 0.25, "rollout/duration_s": 12.0})
        metrics.write(1, {"reward/mean": 0.5, "train/loss": float("nan")})
        found = scrape(folder)
        (path,) = (folder / "targets").glob("*.json")
        assert json.loads(path.read_text())[0]["labels"] == {"process": "flow", "run": "r1"}
    assert found == {
        ("gyre_step", ()): 1.0,
        ("gyre_reward_mean", ()): 0.5,
        ("gyre_rollout_duration_seconds", ()): 12.0,
    }
    assert not list((folder / "targets").glob("*.json")), "a process that ended is no target"


def test_scrape_without_the_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with serve_metrics("flow", lambda: [Sample(name="gyre_secret", value=1)]):
        assert (tmp_path / "token").stat().st_mode & 0o077 == 0
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(tmp_path, token="guessed")
        assert scrape(tmp_path) == {("gyre_secret", ()): 1.0}


def test_process_that_cannot_tell_is_busy_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    answers = iter([RuntimeError("dictionary changed size"), [Sample(name="gyre_x", value=2)]])

    def collect() -> list[Sample]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serve_metrics("proxy", collect):
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape(tmp_path)
        assert scrape(tmp_path) == {("gyre_x", ()): 2.0}


def test_targets_of_killed_processes_go_when_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "targets").mkdir()
    no_process = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    (tmp_path / "targets" / f"r1-flow-{no_process}.json").write_text("[]")
    with serve_metrics("flow", lambda: [], run="r2"):
        assert [path.name.rpartition("-")[0] for path in (tmp_path / "targets").iterdir()] == ["r2-flow"]


def test_application_is_scraped_in_its_own_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    app = Starlette()
    loops: list[object] = []

    def collect() -> list[Sample]:
        loops.append(asyncio.get_running_loop())
        return [Sample(name="gyre_proxy_sessions", value=3)]

    add_metrics(app, "proxy", collect)
    with TestClient(app):
        assert scrape(tmp_path) == {("gyre_proxy_sessions", ()): 3.0}
    assert len(loops) == 1


def test_proxy_and_cell_samples_from_their_status() -> None:
    status = {
        "sessions": 4,
        "in_flight": 2,
        "policy_version": None,
        "counters": {"calls_moved": 5},
        "engines": [{"url": "http://a", "slots": 8, "busy": 2, "version": 3, "rank": 0}],
    }
    found = {(sample.name, tuple(sample.labels.values())): sample.value for sample in proxy_samples(status)}
    assert found["gyre_proxy_sessions", ()] == 4 and found["gyre_proxy_policy_version", ()] == 0
    assert found["gyre_proxy_events", ("calls_moved",)] == 5
    assert found["gyre_proxy_engine_busy", ("http://a",)] == 2
    cell = {"cell_id": "cell-1", "state": "training", "epoch": 7, "policy_version": 3, "step": {"pending": 2}}
    shown = {(sample.name, sample.labels.get("state")): sample.value for sample in cell_samples(cell)}
    assert shown["gyre_cell_state", "training"] == 1 and shown["gyre_cell_state", "rollout"] == 0
    assert shown["gyre_cell_step_pending", None] == 2 and shown["gyre_cell_step_leased", None] == 0


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("rollout/duration_s", "gyre_rollout_duration_seconds"),
        ("select/tokens_trained_count", "gyre_select_tokens_trained"),
        ("train/grad_norm", "gyre_train_grad_norm"),
        ("train/flops_per_s", "gyre_train_flops_per_second"),
    ],
)
def test_prometheus_name_has_prometheus_units(name: str, shown: str) -> None:
    assert prometheus_name(name) == shown


def test_exposition_escapes_labels() -> None:
    text, kind = exposition([Sample(name="gyre_x", value=1, labels={"engine": 'a"b\nc'})])
    assert b'gyre_x{engine="a\\"b\\nc"} 1.0' in text and kind.startswith("text/plain")
