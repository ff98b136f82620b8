"""Three real cells (SGLang engine, Megatron trainer) move both ways under live calls; a satellite is killed."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.cells.fleet import CellFleet
from gyre_core.cells.fleet_launch import LocalLauncher, marked
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config.models import EngineConfig, SchedulerConfig, TrainConfig
from gyre_core.process import free_port
from gyre_core.proxy.settings import ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
from gyre_core.scheduler.policy import Move
from tests.support.fleets import FastLauncher, FleetUnderTest, in_thread, under_test
from tests.support.members import SECRET, group, until
from tests.support.proxies import ADMIN_SECRET
from tests.support.tiny_model import CONTEXT_LENGTH, save_tiny_model

# Three engines boot for minutes on two busy cores.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_CELLS = 3
CALLERS = 4
GROUPS = {f"g{index}": group(f"g{index}", token=index, length=40) for index in range(6)}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[FleetUnderTest]:
    model = save_tiny_model(tmp_path / "model")
    members = MembersSettings(secret=SECRET, port=free_port())
    settings = [
        CellSettings(
            cell_id=f"cell-{index}",
            port=free_port(),
            secret="replaced",
            model_path=model,
            context_length=CONTEXT_LENGTH,
            slots=8,
            seed=0,
            work_dir=tmp_path,
            engine=EngineConfig(max_total_tokens=16384, boot_timeout_s=900.0),
            # A rate of 0: weights move, and outputs can be compared across versions.
            train=TrainConfig(learning_rate=0.0, threads=1, micro_step_tokens=64, clip_low=0.5, clip_high=0.5),
            members=members if index == 0 else None,
            core_url=f"http://127.0.0.1:{members.port}" if index else None,
            core_secret=SECRET if index else "",
        )
        for index in range(NUM_CELLS)
    ]
    proxy = ProxySettings(
        admin_secret=ADMIN_SECRET, model_path=model, context_length=CONTEXT_LENGTH, journal_dir=tmp_path / "journal"
    )
    with ProxySupervisor([proxy], work=tmp_path / "work", logs=tmp_path / "logs", env=ENVIRONMENT) as supervisor:
        supervisor.wait_ready()
        with CellFleet(
            settings,
            shards=supervisor.shards,
            logs=tmp_path / "logs",
            work=tmp_path / "work",
            scheduler=SchedulerConfig(cells=NUM_CELLS, heartbeat_s=0.5, dead_after_s=60.0),
            env=ENVIRONMENT,
        ) as fleet:
            fleet.open()
            with under_test(fleet, FastLauncher(tmp_path), supervisor.shards, tmp_path) as cells:
                yield cells


def test_real_cells_move_both_ways_under_live_calls_and_a_killed_satellite_comes_back(
    cells: FleetUnderTest, tmp_path: Path
) -> None:
    fleet = cells.fleet
    expected = [cells.call(f"u{index}") for index in range(CALLERS)]
    replies = [0] * CALLERS
    stop = threading.Event()

    def keep_calling(index: int) -> None:
        """One call after the other; each must be the undisturbed one."""
        while not stop.is_set():
            assert cells.call(f"u{index}") == expected[index]
            replies[index] += 1

    def move(cell_id: str, to: str) -> None:
        report = fleet.move(Move(cell_id=cell_id, to=to, reason="test"))  # type: ignore[arg-type]
        print(f"{cell_id} to {to}: {report.seconds:.2f} s, {report.calls_moved} calls moved, {report.phases}")
        assert report.failed == ""

    callers = [in_thread(keep_calling, index) for index in range(CALLERS)]
    step = cells.start_training(0, GROUPS)
    move("cell-0", "train")
    move("cell-1", "train")
    victim = cells.pid("cell-1")
    os.kill(victim, signal.SIGKILL)
    until(lambda: cells.event("cell_dead"), 60.0)
    account = step.result(120)["account"]
    assert sorted(account["groups"]) == sorted(GROUPS)
    assert sorted(account["taken"]) == sorted(name for names in account["groups"].values() for name in names)
    refreshed = fleet.refresh(1)
    assert "cell-2" in refreshed.cells
    move("cell-0", "rollout")
    until(lambda: cells.event("cell_restarted"), 1200.0)
    (dead,), (restarted,) = cells.event("cell_dead"), cells.event("cell_restarted")
    print(f"{dead['cell']}: {dead['reason']}; back after {restarted['seconds']:.1f} s")
    assert dead["cell"] == restarted["cell"] == "cell-1"
    assert cells.whole()
    before = list(replies)
    until(lambda: all(now > then for now, then in zip(replies, before, strict=True)), 120.0)
    stop.set()
    for caller in callers:
        caller.result(120)
    for cell_id in fleet.pids:
        status = cells.cell(cell_id).status()
        assert (status["served_version"], status["policy_version"], status["state"]) == (1, 1, "rollout")
    fleet.close()
    launcher = LocalLauncher(work=tmp_path / "work", logs=tmp_path / "logs")
    assert [marked(launcher.mark(cell_id)) for cell_id in fleet.pids] == [[]] * NUM_CELLS
