"""The engine's key leaves a cell host in one place only: the answer to an authenticated /status."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_core.cells.app import create_app
from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings


class Engine:
    """What a host asks of its engine here."""

    api_key, url = "key-of-the-engine", "http://127.0.0.1:1"

    def running(self) -> bool:
        return True


async def test_engine_key_is_in_the_status_for_the_bearer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CellSettings(
        cell_id="c", port=1, secret="s", model_path=tmp_path, context_length=8, slots=1, seed=0, work_dir=tmp_path
    )
    host = CellHost(settings)
    host._engine = Engine()  # type: ignore[assignment]
    monkeypatch.setattr("gyre_core.cells.app.CellHost", lambda _: host)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(settings)), base_url="http://cell") as client:
        assert (await client.get("/status")).status_code == 401
        bearer: dict[str, Any] = {"headers": {"authorization": "Bearer s"}}
        status = (await client.get("/status", **bearer)).json()
        assert (status["engine_url"], status["engine_key"]) == (Engine.url, Engine.api_key)
        for verb in ("/role", "/train/reset", "/publish", "/train/optimizer_step"):
            body = {"to": "train", "epoch": 9}
            assert Engine.api_key not in (await client.post(verb, json=body, **bearer)).text
    assert Engine.api_key not in str(host.describe())
