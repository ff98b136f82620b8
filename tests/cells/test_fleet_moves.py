"""Role changes and publications of a fleet with live calls: real hosts, proxy and queue, parts that take no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gyre_core.proxy.pool import Shards
from gyre_core.scheduler.policy import Move, Target
from tests.support.fleets import FleetUnderTest, fast_fleet
from tests.support.members import group, target_counts

pytestmark = pytest.mark.integration


@pytest.fixture
def three(tmp_path: Path, shards: Shards) -> Iterator[FleetUnderTest]:
    with fast_fleet(tmp_path, shards) as fleet:
        yield fleet


def move(cell_id: str, to: Target) -> Move:
    return Move(cell_id=cell_id, to=to, reason="test")


def test_moves_both_ways_under_live_calls_change_no_reply_and_train_each_group_once(three: FleetUnderTest) -> None:
    expected = [three.call(f"u{index}") for index in range(8)]
    three.hold(3)
    calls = three.calls(8)
    three.running(8)
    groups = {f"g{index}": group(f"g{index}", token=index) for index in range(5)}
    step = three.start_training(0, groups)
    core = three.fleet.move(move("cell-0", "train"))
    one = three.fleet.move(move("cell-1", "train"))
    assert not core.failed and not one.failed
    assert [name for name in core.phases if "/" not in name] == ["drain", "calls", "train"]
    assert (core.epoch, one.epoch) == (1, 1)
    assert core.calls_moved > 0 and core.partial_tokens == 3 * core.calls_moved
    assert three.whole(cell_0="training", cell_1="training")
    result = step.result(30)
    assert sorted(result["account"]["groups"]) == sorted(groups)
    refreshed = three.fleet.refresh(1)
    assert list(refreshed.cells) == ["cell-2"] and refreshed.later == ("cell-0", "cell-1")
    back = three.fleet.move(move("cell-1", "rollout"))
    assert (back.failed, back.epoch, back.served_version) == ("", 2, 1)
    assert [name for name in back.phases if "/" not in name] == ["return", "open"]
    three.fleet.move(move("cell-0", "rollout"))
    assert three.whole()
    three.hold(None)
    assert [call.result(30) for call in calls] == expected
    counts = target_counts(list(groups.values()))
    for cell_id in three.fleet.pids:
        status = three.status(cell_id)
        assert (status["served_version"], status["state"]) == (1, "rollout")
        assert torch.equal(torch.tensor(status["served_weights"]), counts)


def test_refresh_with_several_cells_keeps_live_calls_running_on_the_others(three: FleetUnderTest) -> None:
    expected = [three.call(f"u{index}") for index in range(8)]
    groups = {"g0": group("g0")}
    step = three.start_training(0, groups)
    three.fleet.move(move("cell-0", "train"))
    step.result(30)
    three.hold(3)
    calls = three.calls(8)
    three.running(8)
    report = three.fleet.refresh(1)
    assert list(report.cells) == ["cell-2", "cell-1"]  # the ones that stay longest first
    assert [one.failed for one in report.cells.values()] == ["", ""]
    assert [list(one.phases) for one in report.cells.values()] == [["calls", "load", "open"]] * 2
    assert all(one.report["refreshed"] for one in report.cells.values())
    moved = [one.calls_moved for one in report.cells.values()]
    assert sum(moved) >= 8 and min(moved) > 0
    again = three.fleet.refresh(1)
    assert (again.cells, again.later) == ({}, ("cell-0",))
    three.hold(None)
    assert [call.result(30) for call in calls] == expected
    assert three.fleet.move(move("cell-0", "rollout")).served_version == 1


def test_refresh_and_moves_of_a_single_cell_let_calls_wait(tmp_path: Path, shards: Shards) -> None:
    with fast_fleet(tmp_path, shards, cells=1) as alone:
        expected = [alone.call(f"u{index}") for index in range(3)]
        alone.hold(3)
        calls = alone.calls(3)
        alone.running(3)
        step = alone.start_training(0, {"g0": group("g0")})
        report = alone.fleet.move(move("cell-0", "train"))
        assert (report.failed, report.calls_moved, report.partial_tokens) == ("", 3, 9)
        step.result(30)
        assert not any(call.done() for call in calls)
        assert alone.fleet.move(move("cell-0", "rollout")).served_version == 1
        alone.hold(None)
        assert [call.result(30) for call in calls] == expected
        assert alone.fleet.refresh(1).cells == {}


def test_move_of_a_cell_in_another_role_or_of_none_is_refused(three: FleetUnderTest) -> None:
    report = three.fleet.move(move("cell-1", "rollout"))
    assert report.failed == "cell-1 is rollout, not training"
    assert report.phases == {}
    with pytest.raises(ValueError, match="there is no cell cell-9"):
        three.fleet.move(move("cell-9", "train"))
    (event,) = three.event("move")
    assert (event["cell"], event["to"], event["failed"]) == ("cell-1", "rollout", report.failed)


def test_views_count_the_sessions_of_each_cell_and_when_it_moved(three: FleetUnderTest) -> None:
    three.hold(3)
    calls = three.calls(6)
    three.running(6)
    views = three.fleet.views()
    assert [(view.cell_id, view.slots) for view in views] == [("cell-0", 4), ("cell-1", 4), ("cell-2", 4)]
    assert [view.residents for view in views] == [2, 2, 2]  # each new call went where most slots were free
    assert all(view.moved_s < 0 for view in views)
    three.fleet.move(move("cell-0", "train"))
    core, *others = three.fleet.views()
    assert core.moved_s > 0 and core.residents == 0
    assert sum(view.residents for view in others) == 6
    three.hold(None)
    for call in calls:
        call.result(30)
