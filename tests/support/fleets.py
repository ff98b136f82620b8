"""A fleet of fast cell hosts (tests/support/fast_host.py) in real processes behind a real proxy, with live calls.

The hosts are forked from a server that has imported everything: one starts in about 0.1 s.
"""

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gyre_core.cells.client import CellClient
from gyre_core.cells.fleet import CellFleet
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config.models import SchedulerConfig, TrainConfig
from gyre_core.errors import GyreError
from gyre_core.process import free_port
from gyre_core.proxy.pool import ProxyPool, Shards
from gyre_core.proxy.settings import HarnessName, SamplingSettings
from gyre_core.proxy.supervisor import RestartBudget
from gyre_core.types import TrainingBranch
from tests.support.members import SECRET, until

T = TypeVar("T")
SLOTS = 4

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.fast_host", "pytest"])


class ForkedHost:
    """A fake host's process; a `HostProcess`."""

    def __init__(self, settings: CellSettings, log_path: Path) -> None:
        from tests.support.fast_host import serve

        self.log_path = log_path
        self._process = _context.Process(target=serve, args=(settings.model_dump_json(), str(log_path)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def running(self) -> bool:
        return self._process.is_alive()

    def stop(self, *, grace_s: float) -> None:
        self._process.kill()
        self._process.join()


class FastLauncher:
    """Starts fake hosts; `refuse` makes starts of a cell fail."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: list[str] = []
        self.refuse: set[str] = set()

    def __call__(self, settings: CellSettings) -> ForkedHost:
        self.started.append(settings.cell_id)
        if settings.cell_id in self.refuse:
            raise GyreError(f"{settings.cell_id} may not start")
        return ForkedHost(settings, self._logs / f"{settings.cell_id}.log")


class FleetUnderTest:
    """The fleet under test and what a test does to its cells."""

    def __init__(self, fleet: CellFleet, launcher: FastLauncher, shards: Shards, folder: Path) -> None:
        self.fleet, self.launcher, self._shards, self._folder = fleet, launcher, shards, folder
        self.events: list[dict[str, Any]] = []
        self.calls_loop = LoopThread()
        self._clients: tuple[ProxyPool, httpx.AsyncClient] | None = None
        fleet.on_event(lambda event: self.events.append(dict(event)))

    def cell(self, cell_id: str) -> CellClient:
        """The cell's control API now."""
        return next(cell for cell in self.fleet._cells if cell.cell_id == cell_id).client()

    def pid(self, cell_id: str) -> int:
        pid = self.fleet.pids[cell_id]
        assert pid is not None
        return pid

    def status(self, cell_id: str) -> dict[str, Any]:
        """Its status, and what the test's own routes say."""
        cell = self.cell(cell_id)
        return {**cell.status(), **cell._call("GET", "/fake/see")}

    def block(self, cell_id: str, at: str) -> None:
        """The cell stops when it comes to this place; an empty name lets it go on."""
        self.cell(cell_id)._call("POST", "/fake/block", json={"at": at})

    def hold(self, after: int | None) -> None:
        """Engines stop each call after so many tokens, or go on."""
        for cell_id in self.fleet.pids:
            with contextlib.suppress(GyreError):
                self.cell(cell_id)._call("POST", "/fake/hold", json={"after": after})

    def blocked(self, cell_id: str, at: str) -> None:
        """Wait until it has stopped there."""
        until(lambda: self.status(cell_id)["blocked"] == at)

    def signal(self, cell_id: str, number: int) -> int:
        pid = self.pid(cell_id)
        os.kill(pid, number)
        return pid

    def states(self) -> dict[str, str]:
        return {view.cell_id: view.state.value for view in self.fleet.views()}

    def event(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def whole(self, **roles: str) -> bool:
        """Every cell is where it should be, in rollout unless told otherwise."""
        wanted = {cell_id: roles.get(cell_id.replace("-", "_"), "rollout") for cell_id in self.fleet.pids}
        return self.states() == wanted

    def calls(self, number: int, *, tag: str = "u") -> list[Future[str]]:
        """So many calls of sessions of their own, running or waiting when this returns."""
        return [self.calls_loop.submit(self._call(f"{tag}{index}")) for index in range(number)]

    def running(self, number: int) -> None:
        """Wait until so many calls are held on the engines."""

        def held() -> bool:
            counts = 0
            for cell_id in self.fleet.pids:
                with contextlib.suppress(GyreError):
                    counts += len(self.status(cell_id)["running"])
            return counts >= number

        until(held)

    def call(self, text: str) -> str:
        """One greedy call; its reply's text."""
        return self.calls_loop.submit(self._call(text)).result()

    async def _call(self, text: str) -> str:
        if self._clients is None:
            self._clients = ProxyPool(self._shards), httpx.AsyncClient(timeout=90.0, trust_env=False, verify=False)
        pool, client = self._clients
        session = await pool.create_session(
            rollout_id=f"r-{text}",
            sampling=SamplingSettings(temperature=0.0),
            harness=HarnessName(name="quickstart-agent", version="1"),
        )
        body = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
        headers = {"x-api-key": session.api_key}
        answer = await client.post(f"{session.base_url}/v1/messages", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        trajectory = await pool.seal(session.session_id)
        await pool.delete(session.session_id)
        assert [call.index for call in trajectory.calls] == [0], "a call was lost or made twice"
        return answer.json()["content"][0]["text"]

    async def aclose(self) -> None:
        """Close what the calls used."""
        if self._clients is not None:
            for part in self._clients:
                await part.aclose()

    def train(self, step: int, groups: Mapping[str, Sequence[TrainingBranch]]) -> dict[str, Any]:
        """What a flow does for one step, over the core's deaths, until its state is saved; returns the step."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            generation = self.fleet.core_generation
            try:
                core = self.fleet.core
                core.train_open(step=step, policy_version=step)
                for name, branches in groups.items():
                    core.train_group(name, branches)
                core.train_seal(num_rollouts=2 * len(groups))
                while generation == self.fleet.core_generation:
                    if (result := core.train_finish(wait_s=1.0)) is not None:
                        path = self._folder / f"version-{step + 1}-{generation}"
                        core.save_checkpoint(str(path), {})
                        core.finish_checkpoint()
                        self.fleet.set_checkpoint(path, step + 1)
                        return result
            except GyreError:
                self.fleet.check()
                time.sleep(0.05)
        raise AssertionError("the step did not end")

    def start_training(self, step: int, groups: Mapping[str, Sequence[TrainingBranch]]) -> "Future[dict[str, Any]]":
        return in_thread(self.train, step, groups)


@contextlib.contextmanager
def fast_fleet(
    folder: Path,
    shards: Shards,
    *,
    cells: int = 3,
    restarts: int = 20,
    dead_after_s: float = 60.0,
    port: int = 0,
    **scheduler: Any,
) -> Iterator[FleetUnderTest]:
    """A started fleet whose engines take calls."""
    members = MembersSettings(secret=SECRET, port=free_port())
    launcher = FastLauncher(folder)
    settings = [
        CellSettings(
            cell_id=f"cell-{index}",
            port=port or free_port(),
            secret="replaced",
            model_path=folder,
            context_length=4096,
            slots=SLOTS,
            seed=0,
            work_dir=folder / f"cell-{index}",
            train=TrainConfig(micro_step_tokens=16, clip_low=0.5, clip_high=0.5),
            members=members if index == 0 and cells > 1 else None,
            core_url=f"http://{members.host}:{members.port}" if index else None,
            core_secret=members.secret if index else "",
        )
        for index in range(cells)
    ]
    fleet = CellFleet(
        settings,
        shards=shards,
        logs=folder,
        work=folder,
        scheduler=SchedulerConfig(cells=cells, heartbeat_s=0.1, dead_after_s=dead_after_s, **scheduler),
        launch=launcher,
        budget=RestartBudget(restarts=restarts),
    )
    with fleet:
        fleet.open()
        with under_test(fleet, launcher, shards, folder) as cells:
            yield cells


@contextlib.contextmanager
def under_test(fleet: CellFleet, launcher: FastLauncher, shards: Shards, folder: Path) -> Iterator[FleetUnderTest]:
    """What a test uses of a started fleet."""
    cells = FleetUnderTest(fleet, launcher, shards, folder)
    try:
        yield cells
    finally:
        cells.calls_loop.close(cells.aclose())


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what still runs, do this, end."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        self.submit(end()).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def in_thread(work: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Run it beside the test; a test that fails does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
