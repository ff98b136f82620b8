"""The controller: one plan a tick, moves in order, refusals recorded once, silence noticed."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from gyre_core.clock import ManualClock
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.controller import Controller, Decision
from gyre_core.scheduler.policy import POLICIES, CellView, Move, Plan, Snapshot


class World:
    """Cells that do what they are told, in no time."""

    def __init__(self, *, cells: int, slots: int = 4, **counters: int) -> None:
        self.states = [CellState.ROLLOUT] * cells
        self.slots = slots
        self.counters = counters
        self.fail: set[str] = set()
        self.moves: list[tuple[str, str]] = []
        self.records: list[Decision] = []

    def observe(self) -> Snapshot:
        cells = [CellView(cell_id=f"cell-{i}", state=state, slots=self.slots) for i, state in enumerate(self.states)]
        return Snapshot(cells=tuple(cells), **self.counters)  # type: ignore[arg-type]

    def move(self, move: Move) -> dict[str, Any]:
        self.moves.append((move.cell_id, move.to))
        if move.cell_id in self.fail:
            return {"failed": "it died"}
        self.states[int(move.cell_id[-1])] = CellState.TRAINING if move.to == "train" else CellState.ROLLOUT
        return {"failed": "", "seconds": 0.5}

    def controller(self, policy: str, clock: Any = None) -> Controller:
        return Controller(
            POLICIES[policy], observe=self.observe, move=self.move, record=self.records.append, clock=clock
        )


def test_elastic_cells_follow_the_water_level_down_and_return_last_joined_first() -> None:
    world = World(cells=3, dispatched=12, finished=2, ready_groups=1, untrained_groups=3)
    controller = world.controller("elastic")
    levels = {}
    for finished in range(2, 13):
        world.counters["finished"] = finished
        while controller.tick().moved:
            continue
        levels[12 - finished] = world.states.count(CellState.TRAINING)
    # 12 slots, 4 a cell: the core leaves at water level 8, the first satellite at 4, the last at 0.
    assert levels == {10: 0, 9: 0, 8: 1, 7: 1, 6: 1, 5: 1, 4: 2, 3: 2, 2: 2, 1: 2, 0: 3}
    world.counters.update(untrained_groups=0, ready_groups=0)
    while controller.tick().moved:
        continue
    assert world.moves == [
        *((f"cell-{i}", "train") for i in range(3)),
        *((f"cell-{i}", "rollout") for i in (2, 1, 0)),
    ]


def test_refusals_of_the_same_kind_are_recorded_once() -> None:
    world = World(cells=2, dispatched=8, finished=0, ready_groups=0, untrained_groups=2)
    controller = world.controller("elastic")
    for finished in range(4):
        world.counters["finished"] = finished
        controller.tick()
    assert [decision.plan.refusals[0].reason for decision in world.records] == [
        "water level 8 > 4 slots without cell-0"
    ]
    world.counters["finished"] = 4
    controller.tick()
    assert world.records[-1].plan.refusals[0].reason == "no graded group is ready"


def test_plan_for_a_whole_role_is_made_in_order_and_ends_at_a_move_that_fails() -> None:
    world = World(cells=3, dispatched=4, finished=4, ready_groups=2, untrained_groups=2)
    world.fail = {"cell-1"}
    decision = world.controller("colocate").tick()
    assert world.moves == [("cell-0", "train"), ("cell-1", "train")]
    assert decision.failed == "it died" and len(decision.outcomes) == 2
    assert decision.as_json()["outcomes"][0] == {"failed": "", "seconds": 0.5}


def test_move_that_the_mechanism_forbids_is_not_made() -> None:
    world = World(cells=2, dispatched=4, finished=0, ready_groups=1, untrained_groups=1)

    def reckless(snapshot: Snapshot) -> Plan:
        return Plan(moves=(Move(cell_id="cell-1", to="train", reason="because"),))

    controller = Controller(reckless, observe=world.observe, move=world.move, record=world.records.append)
    decision = controller.tick()
    assert not decision.moved and world.moves == []
    assert decision.plan.refusals[0].reason == "core first: cell-0 is rollout"


def test_decision_can_be_asked_for_again_from_its_snapshot() -> None:
    world = World(cells=2, dispatched=4, finished=4, ready_groups=2, untrained_groups=2)
    decision = world.controller("elastic").tick()
    stored = decision.as_json()["snapshot"]
    cells = tuple(CellView(**{**cell, "state": CellState(cell["state"])}) for cell in stored.pop("cells"))
    again = POLICIES["elastic"](Snapshot(cells=cells, **stored))
    assert again == replace(decision.plan)


def test_silence_with_work_left_is_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    world = World(cells=1, dispatched=1, finished=0, ready_groups=0, untrained_groups=1)
    controller = world.controller("elastic", clock)
    with caplog.at_level(logging.WARNING):
        controller.tick()
        clock.advance(599.0)
        controller.tick()
        assert not caplog.records
        clock.advance(1.0)
        controller.tick()
    (record,) = caplog.records
    assert "nothing has changed for 600 s with work left" in record.getMessage()
