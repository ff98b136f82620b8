"""A publication that fails does not end the run: it is tried again, on a new engine when the old one was stopped."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gyre_core.cells.host import PUBLISH_ATTEMPTS, CellHost
from gyre_core.cells.settings import CellSettings
from gyre_core.config.models import TransferConfig
from gyre_core.errors import TransferError
from gyre_core.transfer.weights import PublishReport


class Engine:
    """An engine that can be stopped and waited for."""

    def __init__(self, alive: bool = True) -> None:
        self.alive = alive
        self.waited = 0

    def running(self) -> bool:
        return self.alive

    def wait_ready(self, timeout_s: float) -> float:
        self.waited += 1
        return timeout_s


class Publisher:
    """Fails as often as planned; a failure stops the engine or leaves it."""

    def __init__(self, engine: Engine, plan: list[str], backend: str) -> None:
        self.engine, self.plan, self.backend = engine, plan, backend
        self.closed = False

    async def publish(self, tensors: Iterable[Any], version: int) -> PublishReport:
        outcome = self.plan.pop(0)
        if outcome == "stopped":
            self.engine.alive = False
        if outcome != "ok":
            raise TransferError(f"version {version}: {outcome}")
        return PublishReport(
            version=version,
            backend="local",
            reason=self.backend,
            size_bytes=1,
            checksum="c",
            seconds=0.0,
            paused_s=0.0,
        )

    def close(self) -> None:
        self.closed = True


class Trainer:
    def export_hf(self) -> list[Any]:
        return []


def host_with(plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> CellHost:
    settings = CellSettings(
        cell_id="c",
        port=1,
        secret="s",
        model_path=tmp_path,
        context_length=8,
        slots=1,
        seed=0,
        work_dir=tmp_path,
        transfer=TransferConfig(backend=backend),  # type: ignore[arg-type]
        policy_version=4,
    )
    host = CellHost(settings)

    def start_engine() -> Engine:
        host._engine = Engine()  # type: ignore[assignment]
        return host._engine  # type: ignore[return-value]

    monkeypatch.setattr(host, "_start_engine", start_engine)
    monkeypatch.setattr(host, "_make_publisher", lambda engine, transfer: Publisher(engine, plan, transfer.backend))
    host._trainer = Trainer()  # type: ignore[assignment]
    host._publisher = host._make_publisher(host._start_engine(), settings.transfer)
    return host


async def test_publish_engine_stopped_by_a_failure_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_with(["stopped", "ok"], tmp_path, monkeypatch, "auto")
    first = host._engine
    report = await host.publish()
    assert report["version"] == 4 and report["failures"] == ["version 4: stopped"]
    assert host._engine is not first and host._engine.waited == 1  # type: ignore[union-attr]
    assert report["reason"] == "auto"  # the second try goes the same way


async def test_publish_old_weights_kept_is_tried_again_on_the_same_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_with(["kept", "ok"], tmp_path, monkeypatch, "auto")
    first = host._engine
    assert len((await host.publish())["failures"]) == 1
    assert host._engine is first


@pytest.mark.parametrize(("backend", "last"), [("auto", "local"), ("mooncake", "mooncake"), ("local", "local")])
async def test_publish_last_try_goes_through_files_unless_mooncake_is_demanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, last: str
) -> None:
    host = host_with(["stopped", "kept", "ok"], tmp_path, monkeypatch, backend)
    report = await host.publish()
    assert report["reason"] == last and len(report["failures"]) == 2


async def test_publish_every_try_failed_raises_and_says_the_last_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_with(["stopped"] * PUBLISH_ATTEMPTS, tmp_path, monkeypatch, "auto")
    with pytest.raises(TransferError, match="version 4: stopped"):
        await host.publish()
    assert host._published is None
