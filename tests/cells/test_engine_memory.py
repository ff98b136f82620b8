"""An engine on a device that it shares with the trainer gives its KV pool back while the cell trains."""

from pathlib import Path
from typing import Any

from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings
from gyre_core.scheduler.cell import CellState


class Engine:
    """Records what it is asked, with the cell's state at that moment."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory = shares_memory
        self.host: Any = None
        self.asked: list[tuple[str, CellState]] = []
        self.url, self.api_key = "http://127.0.0.1:1", "key"

    def running(self) -> bool:
        return True

    def client(self) -> "Engine":
        return self

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def release_kv_memory(self) -> None:
        self.asked.append(("release", self.host.status.state))

    async def resume_kv_memory(self) -> None:
        self.asked.append(("resume", self.host.status.state))


async def host_with(engine: Engine, folder: Path) -> CellHost:
    settings = CellSettings(
        cell_id="cell-0",
        port=1,
        secret="s",
        model_path=folder,
        context_length=64,
        slots=1,
        seed=0,
        work_dir=folder,
    )
    host = CellHost(settings)
    host._engine, engine.host = engine, host  # type: ignore[assignment]
    host._published = 0
    host.status = host.status.moved(CellState.ROLLOUT)
    return host


async def test_kv_memory_is_given_back_before_training_and_taken_before_serving(tmp_path: Path) -> None:
    engine = Engine(shares_memory=True)
    host = await host_with(engine, tmp_path)
    answer = await host.role("train", epoch=0)
    assert engine.asked == [("release", CellState.ROLLOUT)], "the trainer starts after it"
    assert "release" in answer["phases"]
    await host.role("rollout", epoch=answer["epoch"])
    assert engine.asked[1:] == [("resume", CellState.RETURNING)], "the engine serves after it"
    await host.role("drain", epoch=host.status.epoch)
    await host.role("rollout", epoch=host.status.epoch)
    assert len(engine.asked) == 2, "a move that was given up released nothing"


async def test_engine_with_memory_of_its_own_is_left_alone(tmp_path: Path) -> None:
    engine = Engine(shares_memory=False)
    host = await host_with(engine, tmp_path)
    answer = await host.role("train", epoch=0)
    await host.role("rollout", epoch=answer["epoch"])
    assert engine.asked == []
