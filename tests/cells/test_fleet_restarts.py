"""Restarts are bounded, a satellite may be lost and the core may not, and what a death takes back is put right."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from gyre_core.cells.fleet import check_settings
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.errors import ConfigError, EngineError, GyreError
from gyre_core.proxy.pool import Shards
from gyre_core.scheduler.policy import Move
from tests.support.fleets import FleetUnderTest, fast_fleet
from tests.support.members import group, target_counts, until

pytestmark = pytest.mark.integration

GROUPS = {f"g{index}": group(f"g{index}", token=index) for index in range(3)}


def kill(cells: FleetUnderTest, cell_id: str) -> None:
    """Kill its process; returns when it is out of the fleet."""
    deaths = len(cells.event("cell_dead"))
    cells.signal(cell_id, signal.SIGKILL)
    until(lambda: len(cells.event("cell_dead")) > deaths)


def back(cells: FleetUnderTest, cell_id: str, times: int = 1) -> None:
    until(lambda: [event["cell"] for event in cells.event("cell_restarted")].count(cell_id) == times)


def test_satellite_that_dies_too_often_is_lost_and_the_others_go_on(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards, restarts=1) as cells:
        expected = cells.call("u0")
        kill(cells, "cell-1")
        back(cells, "cell-1")
        kill(cells, "cell-1")
        until(lambda: cells.event("cell_lost"))
        (lost,) = cells.event("cell_lost")
        assert lost["cell"] == "cell-1"
        assert (
            "cell-1 died once more than it may be started again: its process ended with exit code -9" in lost["reason"]
        )
        assert cells.states() == {"cell-0": "rollout", "cell-1": "dead", "cell-2": "rollout"}
        cells.fleet.check()
        report = cells.fleet.move(Move(cell_id="cell-1", to="train", reason="test"))
        assert report.failed == "cell-1 is dead, not rollout"
        assert cells.fleet.move(Move(cell_id="cell-0", to="train", reason="test")).failed == ""
        assert cells.call("u0") == expected
        assert cells.launcher.started.count("cell-1") == 2


def test_core_that_does_not_come_back_ends_the_run_with_its_reason(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards, restarts=2) as cells:
        cells.launcher.refuse.add("cell-0")
        kill(cells, "cell-0")
        until(lambda: cells.event("cell_lost"))
        with pytest.raises(EngineError, match=r"the core is lost.*cell-0 died once more .*cell-0 may not start"):
            cells.fleet.check()
        with pytest.raises(GyreError, match="the core is lost"):
            _ = cells.fleet.core
        with pytest.raises(EngineError, match="the core is lost"):
            cells.fleet.move(Move(cell_id="cell-1", to="train", reason="test"))
        assert cells.launcher.started.count("cell-0") == 3


def test_fixed_split_without_a_cell_that_serves_ends_the_run(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards, cells=2, restarts=0, policy="async_stream", train_cells=1) as cells:
        kill(cells, "cell-1")
        until(lambda: cells.event("cell_lost"))
        with pytest.raises(EngineError, match="no cell is left that serves: cell-1 died"):
            cells.fleet.check()


def test_engine_that_ends_in_a_living_host_is_a_death_and_comes_back(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards) as cells:
        expected = cells.call("u0")
        pid = cells.pid("cell-2")
        cells.cell("cell-2")._call("POST", "/fake/end_engine", json={})
        back(cells, "cell-2")
        assert [event["reason"] for event in cells.event("cell_dead")] == ["its engine ended"]
        assert cells.pid("cell-2") != pid
        assert cells.whole()
        assert cells.call("u0") == expected


@pytest.mark.slow  # waits for silence
def test_engine_that_hangs_under_live_calls_is_a_death_and_the_calls_go_on_elsewhere(
    tmp_path: Path, shards: Shards
) -> None:
    with fast_fleet(tmp_path, shards, dead_after_s=8.0) as cells:
        expected = [cells.call(f"u{index}") for index in range(6)]
        cells.hold(3)
        calls = cells.calls(6)
        cells.running(6)
        status = cells.status("cell-1")
        cells.block("cell-1", "abort")
        headers = {"authorization": f"Bearer {status['engine_key']}"}
        with contextlib.suppress(httpx.HTTPError):  # from now on its event loop stands still
            httpx.post(f"{status['engine_url']}/abort_request", json={"rid": "none"}, headers=headers, timeout=0.5)
        back(cells, "cell-1")
        (dead,) = cells.event("cell_dead")
        assert dead["reason"].startswith("its engine did not answer for")
        cells.hold(None)
        assert [call.result(40) for call in calls] == expected
        assert cells.whole()


def test_core_that_dies_with_an_unsaved_step_takes_its_version_back_everywhere(tmp_path: Path, shards: Shards) -> None:
    """Engines that served the lost version serve the old one again; the step is done once more, each group once."""
    with fast_fleet(tmp_path, shards) as cells:
        core = cells.fleet.core
        assert cells.fleet.move(Move(cell_id="cell-0", to="train", reason="test")).failed == ""
        core.train_open(step=0, policy_version=0)
        for name, branches in GROUPS.items():
            core.train_group(name, branches)
        core.train_seal(num_rollouts=6)
        while core.train_finish(wait_s=5.0) is None:
            pass
        report = cells.fleet.refresh(1)
        assert set(report.cells) == {"cell-1", "cell-2"} and report.later == ("cell-0",)
        generation = cells.fleet.core_generation
        kill(cells, "cell-0")
        with pytest.raises(GyreError):
            core.status()
        back(cells, "cell-0")
        assert cells.fleet.core_generation == generation + 1
        until(lambda: [cells.status(cell_id)["served_version"] for cell_id in cells.fleet.pids] == [0, 0, 0])
        with pytest.raises(GyreError, match="the core holds version 0, not 1"):
            cells.fleet.refresh(1)
        step = cells.start_training(0, GROUPS)
        assert cells.fleet.move(Move(cell_id="cell-0", to="train", reason="test")).failed == ""
        step.result(30)
        assert cells.fleet.move(Move(cell_id="cell-0", to="rollout", reason="test")).failed == ""
        cells.fleet.refresh(1)
        counts = target_counts(list(GROUPS.values()))
        for cell_id in cells.fleet.pids:
            status = cells.status(cell_id)
            assert status["served_version"] == 1
            assert torch.equal(torch.tensor(status["served_weights"]), counts)


def test_satellite_that_dies_while_the_core_is_down_waits_for_it(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards) as cells:
        cells.launcher.refuse.add("cell-0")
        kill(cells, "cell-0")
        kill(cells, "cell-1")
        until(lambda: cells.launcher.started.count("cell-1") == 2 and cells.pid("cell-1"))
        assert cells.states()["cell-1"] != "rollout"
        cells.launcher.refuse.clear()
        back(cells, "cell-0")
        back(cells, "cell-1")
        until(cells.whole)


def test_fleet_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, shards: Shards) -> None:
    with (
        pytest.raises(EngineError, match=r"(cell-[01]) ended with exit code \d+ while starting; its log .*\1\.log"),
        fast_fleet(tmp_path, shards, port=1),
    ):
        raise AssertionError("it started")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cell_id": "cell-0"}, "names of their own"),
        ({"members": MembersSettings(secret="s", port=2)}, "only the first cell"),
        ({"core_url": None}, "core_url"),
    ],
)
def test_settings_of_cells_that_cannot_work_together_are_refused(change: dict[str, Any], words: str) -> None:
    common: dict[str, Any] = {"secret": "s", "model_path": Path("m"), "context_length": 8, "slots": 1, "seed": 0}
    core = CellSettings(
        cell_id="cell-0", port=1, work_dir=Path("w"), members=MembersSettings(secret="s", port=3), **common
    )
    other = CellSettings(cell_id="cell-1", port=2, work_dir=Path("w"), core_url="http://127.0.0.1:3", **common)
    check_settings([core, other])
    with pytest.raises(ConfigError, match=words):
        check_settings([core, other.model_copy(update=change)])
    with pytest.raises(ConfigError, match="fixed port"):
        check_settings([core.model_copy(update={"members": None}), other])
    with pytest.raises(ConfigError, match="at least one"):
        check_settings([])
