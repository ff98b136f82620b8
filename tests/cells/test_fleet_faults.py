"""Cells killed (SIGKILL) or stopped (SIGSTOP) in every phase of both role changes, of a publication, and in between.

After each: no reply of a live call differs from the undisturbed one, every micro-step is in the step once, and the
fleet is whole: every cell serves the right weights again.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre_core.proxy.pool import Shards
from gyre_core.scheduler.policy import Move, Target
from tests.support.fleets import FleetUnderTest, fast_fleet, in_thread
from tests.support.members import group, target_counts, until

pytestmark = pytest.mark.integration

CALLS = 6
GROUPS = {f"g{index}": group(f"g{index}", token=index) for index in range(5)}
LEAVING = ["drain", "abort", "train", "train is done"]  # phases of rollout -> train
MID_STEP = ["rollout", "rollout is done"]  # of train -> rollout while the step is open
AFTER_STEP = ["rollout", "load", "verify", "rollout is done"]  # and with new weights
CASES = [
    *[("cell-1", "leaves", phase) for phase in LEAVING],
    ("cell-1", "trains", "compute"),
    *[("cell-1", "returns early", phase) for phase in MID_STEP],
    *[("cell-1", "returns", phase) for phase in AFTER_STEP],
    ("cell-1", "is refreshed", "load"),
    ("cell-1", "serves", ""),
    *[("cell-0", "leaves", phase) for phase in LEAVING],
    ("cell-0", "trains", "compute"),
    *[("cell-0", "returns", phase) for phase in AFTER_STEP],
    ("cell-0", "serves", ""),
]
STOPPED = {("cell-1", "leaves", "abort")}
_REPLIES: list[str] = []


def all_cases() -> list[Any]:
    """Every case with SIGKILL, and with SIGSTOP: but for a few of these in the slow tests, they wait for silence."""
    cases = [pytest.param(*case, signal.SIGKILL, id="-".join(case) + "-kill") for case in CASES]
    for case in CASES:
        marks = [] if case in STOPPED else [pytest.mark.slow]
        cases.append(pytest.param(*case, signal.SIGSTOP, id="-".join(case) + "-stop", marks=marks))
    return cases


def undisturbed(cells: FleetUnderTest) -> list[str]:
    """The replies of calls that nothing happens to: they depend on the prompts alone, so any fleet's stand for all."""
    if not _REPLIES:
        _REPLIES.extend(cells.call(f"u{index}") for index in range(CALLS))
    return _REPLIES


class Scene:
    """A fleet with live calls that are held, and an open step."""

    def __init__(self, under_test: FleetUnderTest) -> None:
        self.cells, self.fleet = under_test, under_test.fleet
        self.expected = undisturbed(under_test)
        self.calls: list[Future[str]] = []
        self.step: Future[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Calls run on all engines, held after three tokens; the core waits in its first micro-step when it trains."""
        self.cells.hold(3)
        self.calls = self.cells.calls(CALLS)
        self.cells.running(CALLS)
        self.cells.block("cell-0", "compute")
        self.step = self.cells.start_training(0, GROUPS)

    def move(self, cell_id: str, to: Target) -> Any:
        return self.fleet.move(Move(cell_id=cell_id, to=to, reason="test"))

    def train(self) -> None:
        """The step is done, and its state saved."""
        if self.cells.states()["cell-0"] == "rollout":
            assert self.move("cell-0", "train").failed == ""
        self.cells.block("cell-0", "")
        assert self.step is not None
        account = self.step.result(40)["account"]
        assert sorted(account["groups"]) == sorted(GROUPS)
        assert sorted(account["taken"]) == sorted(name for steps in account["groups"].values() for name in steps)

    def hit(self, cell_id: str, phase: str, number: int, change: Any) -> None:
        """Kill or stop a cell in a phase of `change`; it comes back by itself."""
        pid = self.cells.pid(cell_id)
        running = None
        if phase:
            self.cells.block(cell_id, phase)
            running = in_thread(change)
            self.cells.blocked(cell_id, phase)
        self.cells.signal(cell_id, number)
        until(lambda: [event for event in self.cells.event("cell_restarted") if event["cell"] == cell_id], 60.0)
        assert [event["cell"] for event in self.cells.event("cell_dead")] == [cell_id]
        if running is not None:
            running.result(30)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert self.cells.states()[cell_id] == "rollout"

    def end(self) -> None:
        """The flow goes on to the end of the step: nothing is lost, and all serve the new weights."""
        self.train()
        self.cells.hold(None)
        assert [call.result(40) for call in self.calls] == self.expected
        for cell_id, state in reversed(self.cells.states().items()):
            if state == "training":
                assert self.move(cell_id, "rollout").failed == ""
        self.fleet.refresh(1)
        assert self.cells.whole(), self.cells.states()
        counts = target_counts(list(GROUPS.values()))
        for cell_id in self.fleet.pids:
            status = self.cells.status(cell_id)
            assert (status["policy_version"], status["served_version"], status["state"]) == (1, 1, "rollout")
            assert torch.equal(torch.tensor(status["served_weights"]), counts), cell_id


@pytest.fixture
def scene(tmp_path: Path, shards: Shards, request: pytest.FixtureRequest) -> Iterator[Scene]:
    stopped = "-stop" in request.node.name
    with fast_fleet(tmp_path, shards, dead_after_s=8.0 if stopped else 60.0) as fleet:
        yield Scene(fleet)


@pytest.mark.parametrize(("cell_id", "doing", "phase", "number"), all_cases())
def test_cell_that_is_killed_or_hangs_comes_back_and_nothing_is_lost(
    scene: Scene, cell_id: str, doing: str, phase: str, number: int
) -> None:
    scene.begin()
    core = cell_id == "cell-0"
    if not core and doing != "serves":
        assert scene.move("cell-0", "train").failed == ""
    match doing:
        case "leaves" | "trains":
            scene.hit(cell_id, phase, number, lambda: scene.move(cell_id, "train"))
        case "returns early":
            assert scene.move(cell_id, "train").failed == ""
            until(lambda: scene.cells.status("cell-0")["step"]["completed"] >= 1)
            scene.hit(cell_id, phase, number, lambda: scene.move(cell_id, "rollout"))
        case "returns":
            if not core:
                assert scene.move(cell_id, "train").failed == ""
            scene.train()
            scene.hit(cell_id, phase, number, lambda: scene.move(cell_id, "rollout"))
        case "is refreshed":
            scene.train()
            scene.hit(cell_id, phase, number, lambda: scene.fleet.refresh(1))
        case _:
            scene.hit(cell_id, phase, number, None)
    scene.end()
