"""Role changes of a cell host over its API: epochs, repeats, phases, and what each kind of cell does in them."""

import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_core.cells import app as cell_app
from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config.emulation import EmulationConfig
from gyre_core.config.models import TrainConfig
from gyre_core.errors import TransferError
from gyre_core.process import free_port
from gyre_core.train.emulated import EmulatedTrainer
from gyre_core.transfer.branches import branches_to_ipc
from gyre_core.transfer.weights import PublishReport
from tests.support.members import group

INSTANT = EmulationConfig(compression=1e12)


class Engine:
    """What a host asks of its engine here."""

    api_key, url = "key", "http://127.0.0.1:1"
    shares_memory = False

    def running(self) -> bool:
        return True

    def stop(self) -> None:
        pass


class Publisher:
    """Fails as often as asked; keeps what it was given."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.sums: list[float] = []
        self.failures = 0

    async def publish(self, tensors: Any, version: int) -> PublishReport:
        if self.failures:
            self.failures -= 1
            raise TransferError("the engine does not answer")
        self.versions.append(version)
        self.sums.append(sum(float(tensor.sum()) for _, tensor in tensors))
        return PublishReport(
            version=version, backend="local", reason="", size_bytes=1, checksum="c", seconds=0.0, paused_s=0.0
        )

    def close(self) -> None:
        pass


class Host(CellHost):
    """A real host; its trainer counts, its engine is there."""

    publisher: Publisher

    def _open_trainer(self) -> Any:
        return EmulatedTrainer(self.settings.train, INSTANT)

    def _start_engine(self) -> Any:
        self._engine = Engine()  # type: ignore[assignment]
        self.publisher = self._publisher = Publisher()  # type: ignore[assignment]
        return self._engine

    def _make_publisher(self, engine: Any, transfer: Any) -> Any:
        return self.publisher

    async def _mend_engine(self, *, last_try: bool) -> None:
        pass

    async def start(self) -> dict[str, float]:
        self._start_engine()
        found = await super().start()
        self._published = 0
        return found


class Cell:
    """One host and calls to it."""

    def __init__(self, host: Host, client: httpx.AsyncClient) -> None:
        self.host, self.client = host, client

    async def call(self, path: str, body: Any = None, *, status: int = 200, **query: Any) -> dict[str, Any]:
        named: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        reply = await self.client.post(path, params=query, timeout=60, **named)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def role(self, to: str, epoch: int, *, status: int = 200, **more: Any) -> dict[str, Any]:
        return await self.call("/role", {"to": to, "epoch": epoch, **more}, status=status)

    async def status(self) -> dict[str, Any]:
        return (await self.client.get("/status")).json()

    async def step(self, step: int) -> dict[str, Any]:
        """A whole step of one group."""
        await self.call("/train/open", {"step": step, "policy_version": step})
        await self.call("/train/group", branches_to_ipc(group(f"g{step}")), group_id=f"g{step}")
        await self.call("/train/seal", {"num_rollouts": 2})
        return await self.call("/train/finish", {"wait_s": 20.0})


@contextlib.asynccontextmanager
async def cell(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> AsyncIterator[Cell]:
    defaults: dict[str, Any] = {
        "cell_id": "cell-0",
        "port": 1,
        "secret": "s",
        "model_path": folder,
        "context_length": 8,
        "slots": 1,
        "seed": 0,
        "work_dir": folder,
        "engine": None,
        "train": TrainConfig(threads=1),
    }
    settings = CellSettings(**{**defaults, **changes})
    host = Host(settings)
    monkeypatch.setattr(cell_app, "_host", lambda _: host)
    app = cell_app.create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://cell", headers={"authorization": "Bearer s"}
        ) as client,
    ):
        yield Cell(host, client)


async def test_role_moves_have_epochs_and_answers_that_can_be_had_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell(tmp_path, monkeypatch) as c:
        first = await c.role("drain", 0)
        assert (first["state"], first["epoch"], first["kind"]) == ("draining", 1, "alone")
        assert await c.role("drain", 0) == first  # its answer was lost
        stale = await c.role("train", 0, status=400)
        assert stale["kind"] == "StaleEpochError"
        training = await c.role("train", 1)
        assert (training["state"], training["epoch"], set(training["phases"])) == ("training", 1, {"start"})
        assert await c.role("train", 1) == training
        back = await c.role("rollout", 1)
        assert (back["state"], back["epoch"], set(back["phases"])) == ("rollout", 2, {"hand_in"})
        assert await c.role("rollout", 1) == back
        assert (await c.role("drain", 1, status=400))["kind"] == "StaleEpochError"
        assert "cannot go from rollout" in (await c.role("rollout", 2, status=400))["error"]
        assert "use drain, train or rollout" in (await c.role("away", 2, status=400))["error"]
        straight = await c.role("train", 2)
        assert (straight["state"], straight["epoch"]) == ("training", 3)


async def test_role_move_that_is_given_up_cannot_be_finished_by_a_late_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell(tmp_path, monkeypatch) as c:
        await c.role("drain", 0)
        assert (await c.role("rollout", 1))["epoch"] == 2
        assert (await c.role("train", 1, status=400))["kind"] == "StaleEpochError"
        assert (await c.status())["state"] == "rollout"


async def test_role_core_serves_what_it_made_before_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cell(tmp_path, monkeypatch, members=MembersSettings(secret="m")) as c:
        await c.role("train", 0)
        done = await c.step(0)
        assert done["policy_version"] == 1 and done["account"]["groups"].keys() == {"g0"}
        status = await c.status()
        assert (status["policy_version"], status["served_version"], status["step"]["finished"]) == (1, 0, True)
        refused = await c.role("rollout", 1, status=500)
        assert "publish before returning to rollout" in refused["error"]
        assert (await c.status())["state"] == "training"
        c.host.publisher.failures = 3
        assert (await c.role("rollout", 1, status=500, policy_version=1))["kind"] == "TransferError"
        assert (await c.status())["state"] == "returning"
        back = await c.role("rollout", 1, policy_version=1)  # the same request again
        assert (back["state"], back["epoch"], back["served_version"]) == ("rollout", 2, 1)
        assert {"hand_in", "publish"} <= set(back["phases"])
        assert c.host.publisher.sums == [12.0]  # the targets of the group: the new weights
        assert (await c.call("/weights/refresh", {"policy_version": 1}))["refreshed"] is False
        unknown = await c.call("/weights/refresh", {"policy_version": 5}, status=400)
        assert "holds policy version 1, 5 is asked for" in unknown["error"]


async def test_role_core_that_returns_in_the_middle_of_a_step_keeps_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell(tmp_path, monkeypatch, members=MembersSettings(secret="m")) as c:
        await c.call("/train/open", {"step": 0, "policy_version": 0})
        await c.call("/train/group", branches_to_ipc(group("g0")), group_id="g0")
        await c.role("train", 0)
        while (await c.status())["step"]["completed"] < 1:
            pass
        refused = await c.call("/train/micro_step", branches_to_ipc(group("g9")), status=400)
        assert "has an open step" in refused["error"]
        await c.role("rollout", 1, policy_version=0)
        await c.call("/train/group", branches_to_ipc(group("g1")), group_id="g1")
        await c.call("/train/seal", {"num_rollouts": 4})
        assert (await c.call("/train/finish", {"wait_s": 0.0}, status=202)) == {"running": True}
        await c.role("train", 2)
        done = await c.call("/train/finish", {"wait_s": 20.0})
        assert len({part["session"] for part in done["account"]["sums"]}) == 1  # one session, one sum
        await c.call("/weights/refresh", {"policy_version": 1})
        assert c.host.publisher.sums == [24.0]


async def test_role_core_begins_with_a_step_that_is_opened_before_its_thread_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell(tmp_path, monkeypatch) as c:
        desk = c.host.desk
        assert desk is not None
        work, free = desk.work, threading.Event()

        def work_and_linger(pause: threading.Event) -> None:
            work(pause)
            assert free.wait(20.0)

        monkeypatch.setattr(desk, "work", work_and_linger)
        await c.role("train", 0)
        assert (await c.step(0))["policy_version"] == 1
        await c.call("/train/open", {"step": 1, "policy_version": 1})
        free.set()
        await c.call("/train/group", branches_to_ipc(group("g1")), group_id="g1")
        await c.call("/train/seal", {"num_rollouts": 2})
        assert (await c.call("/train/finish", {"wait_s": 5.0}))["policy_version"] == 2
        await c.call("/weights/refresh", {"policy_version": 2})
        assert c.host.publisher.sums == [24.0]


async def test_role_satellite_follows_leaves_and_serves_the_cores_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = MembersSettings(secret="m", port=free_port())
    url = f"http://127.0.0.1:{members.port}"
    async with contextlib.AsyncExitStack() as stack:
        core = await stack.enter_async_context(cell(tmp_path / "a", monkeypatch, members=members))
        satellite = await stack.enter_async_context(
            cell(tmp_path / "b", monkeypatch, cell_id="cell-1", core_url=url, core_secret="m")
        )
        assert (await satellite.status())["kind"] == "satellite"
        assert "opened on the core" in (await satellite.call("/train/seal", {"num_rollouts": 1}, status=400))["error"]
        await core.call("/train/open", {"step": 0, "policy_version": 0})
        for name in ("g0", "g1"):
            await core.call("/train/group", branches_to_ipc(group(name)), group_id=name)
        await satellite.role("drain", 0)
        assert set((await satellite.role("train", 1))["phases"]) == {"pull", "start"}
        while (await core.status())["step"]["completed"] < 2:
            pass
        back = await satellite.role("rollout", 1, policy_version=0)
        assert back["member"]["left"] == 1 and back["phases"].keys() >= {"hand_in", "pull"}
        await core.role("train", 0)
        await core.call("/train/seal", {"num_rollouts": 4})
        done = await core.call("/train/finish", {"wait_s": 20.0})
        assert [part["owner"] for part in done["account"]["sums"]] == [False]  # nothing twice, nothing lost
        assert (await core.call("/train/cut_off", {"trainer": "cell-1"}))["sessions"] == []
        report = await satellite.call("/weights/refresh", {"policy_version": 1})
        assert report["refreshed"] and (await satellite.status())["served_version"] == 1
        assert satellite.host.publisher.sums[-1] == 24.0
        assert (await satellite.call("/weights/refresh", {"policy_version": 1}))["refreshed"] is False
        late = await satellite.call("/weights/refresh", {"policy_version": 2}, status=500)
        assert late["kind"] == "TransferError" and "offers version 1, not 2" in late["error"]


async def test_role_satellite_whose_core_is_dead_comes_back_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with cell(tmp_path, monkeypatch, cell_id="cell-1", core_url=url, core_secret="m") as c:
        assert (await c.role("train", 0))["state"] == "training"  # it pulls as soon as there is a core
        assert (await c.role("rollout", 1, policy_version=0))["state"] == "rollout"  # which its engine serves
        assert "does not answer" in (await c.call("/weights/refresh", {"policy_version": 1}, status=500))["error"]


def test_settings_a_cell_is_a_core_or_a_satellite(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"cell_id": "c", "port": 1, "secret": "s", "model_path": tmp_path, "context_length": 8}
    with pytest.raises(ValueError, match="a core or a satellite"):
        CellSettings(
            **fields,
            slots=1,
            seed=0,
            work_dir=tmp_path,
            members=MembersSettings(secret="m"),
            core_url="http://127.0.0.1:1",
        )
