"""The desk of a core's open step: verbs in order and again, pauses, refusals; the replica counts, sums are exact."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre_core.cells.members import MemberHub
from gyre_core.cells.steps import LocalSteps, StepDesk, StepSource
from gyre_core.errors import TrainError
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.train.queue_records import QueueRules, StepAccount
from gyre_core.train.stats import StepStats
from tests.support.members import CountingReplica, counting_hub, group, satellite_thread, target_counts, until

RULES = QueueRules(micro_step_tokens=16, tail_tokens=8, lease=LeaseRule(min_s=20.0, slack=0.0), silence_s=10.0)


class Trainer:
    """Steps a counting replica."""

    def __init__(self, replica: CountingReplica) -> None:
        self.replica = replica
        self.during_step = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def weights_digest(self) -> str:
        return str(self.replica.weight.sum().item())

    def optimizer_step(self, num_rollouts: int, learning_rate: float | None = None) -> StepStats:
        self.during_step.set()
        assert self.go_on.wait(20.0)
        self.replica.step()
        return StepStats(
            step=1,
            num_rollouts=num_rollouts,
            num_micro_steps=1,
            grad_norm=1.0,
            learning_rate=learning_rate or 0.0,
            gradients_s=0.0,
            duration_s=0.0,
        )

    def reset_gradients(self) -> None:
        self.replica.reset_gradients()


class Desk:
    """A desk with its trainer's thread."""

    def __init__(self, source: StepSource, replica: CountingReplica) -> None:
        self.version = 0
        self.replica = replica
        self.trainer = Trainer(replica)
        self.desk = StepDesk(source, self.trainer, RULES, self._set_version)
        self.pause = threading.Event()

    def _set_version(self, version: int) -> None:
        self.version = version

    def open(self, step: int = 0, version: int = 0) -> dict[str, Any]:
        return self.desk.open(step, policy_version=version, held_version=self.version, learning_rate=0.5)

    def parked(self, hub: MemberHub) -> bool:
        """Whether a member has left its gradient behind."""
        assert hub.board.queue is not None
        return any(state["offered"] for state in hub.board.queue.status()["sessions"].values())

    def work(self) -> threading.Thread:
        thread = threading.Thread(target=self.desk.work, args=(self.pause,), daemon=True)
        thread.start()
        return thread


@pytest.fixture
def alone() -> Desk:
    replica = CountingReplica()
    source = LocalSteps(replica, lambda: "w", "core")
    source.publish_weights(0)
    return Desk(source, replica)


@contextmanager
def shared(folder: Path, replica: CountingReplica, **settings: Any) -> Iterator[tuple[Desk, MemberHub]]:
    with counting_hub(folder, replica, **settings) as hub:
        yield Desk(hub, replica), hub


def test_desk_step_comes_out_once_however_often_it_is_asked_for(alone: Desk) -> None:
    desk = alone.desk
    assert desk.describe() is None
    assert alone.open() == alone.open()
    groups = {name: group(name, rollouts=3, token=at) for at, name in enumerate(("g0", "g1"))}
    for name, branches in groups.items():
        assert desk.add_group(name, branches)["known"] is False
        assert desk.add_group(name, branches) == {
            "group_id": name,
            "known": True,
            "micro_steps": [f"{name}.0", f"{name}.1"],
        }
    desk.add_group("flat", [])
    assert desk.finish(0.0) is None  # nobody trains
    desk.seal(6)
    with pytest.raises(ValueError, match="divides by 6, not by 5"):
        desk.seal(5)
    alone.work().join(20.0)
    result = desk.finish(0.0)
    assert result is not None and desk.finish(0.0) == result
    account = StepAccount.from_json(result["account"])
    assert set(account.groups) == {"g0", "g1", "flat"} and account.groups["flat"] == ()
    assert torch.equal(alone.replica.weight, target_counts(list(groups.values())))
    assert (result["policy_version"], alone.version, result["num_rollouts"]) == (1, 1, 6)
    assert (result["learning_rate"], result["weights_before"]) == (0.5, "0.0")
    desk.seal(6)
    status = alone.open()  # again, long after
    assert status["finished"] and status["taken"] == 4 and desk.add_group("g0", groups["g0"])["known"]
    with pytest.raises(ValueError, match="step 0 is over: group g9"):
        desk.add_group("g9", groups["g0"])
    assert alone.open(1, 1)["groups"] == 0


def test_desk_verbs_out_of_order_are_refused(alone: Desk) -> None:
    desk = alone.desk
    for verb in (lambda: desk.add_group("g0", []), lambda: desk.seal(1), lambda: desk.finish(0.0)):
        with pytest.raises(ValueError, match="no step is open"):
            verb()
    with pytest.raises(ValueError, match="holds policy version 0, step 3 is of 3"):
        alone.open(3, 3)
    alone.open()
    with pytest.raises(ValueError, match="step 0 is open"):
        alone.open(1, 0)
    with pytest.raises(ValueError, match="got -1"):
        desk.seal(-1)


def test_desk_step_without_signal_only_advances_the_version(alone: Desk) -> None:
    alone.open()
    alone.desk.add_group("flat", [])
    alone.desk.seal(0)
    alone.work().join(20.0)
    result = alone.desk.finish(0.0)
    assert result is not None and result["grad_norm"] == 0.0
    assert (alone.version, alone.trainer.during_step.is_set()) == (1, False)
    assert not alone.replica.weight.any()


def test_desk_pause_ends_at_a_micro_step_and_the_sum_goes_on(alone: Desk) -> None:
    """As often as the trainer's thread is wanted for something else."""
    alone.open()
    groups = [group(f"g{index}", rollouts=4) for index in range(3)]
    for branches in groups:
        alone.desk.add_group(branches[0].group_id, branches)
    alone.replica.before = lambda _: alone.pause.set()  # asked for during each micro-step
    for done in range(1, 7):
        alone.pause.clear()
        alone.work().join(20.0)
        assert alone.replica.num_computed == done
    alone.pause.clear()
    waiting = alone.work()  # no group is left, and the step is open
    alone.pause.set()
    alone.desk.wake()
    waiting.join(20.0)
    assert not waiting.is_alive() and alone.desk.finish(0.0) is None
    alone.desk.seal(12)
    alone.pause.clear()
    alone.work().join(20.0)
    assert alone.desk.finish(0.0) is not None
    assert torch.equal(alone.replica.weight, target_counts(groups))


def test_desk_refused_step_says_why_until_it_is_opened_anew(alone: Desk) -> None:
    alone.open()
    alone.desk.add_group("bad", group("bad", poison=True))
    alone.desk.seal(2)
    alone.work().join(20.0)
    for _ in range(2):
        with pytest.raises(TrainError, match="not finite"):
            alone.desk.finish(0.0)
    status = alone.desk.describe()
    assert status is not None and "not finite" in status["error"]
    assert (alone.version, float(alone.replica.sums.sum())) == (0, 0.0)
    assert alone.open()["error"] == ""
    alone.desk.add_group("good", group("good"))
    alone.desk.seal(2)
    alone.work().join(20.0)
    assert alone.desk.finish(0.0) is not None
    assert torch.equal(alone.replica.weight, target_counts([group("good")]))


def test_desk_given_up_step_leaves_nothing_behind(alone: Desk) -> None:
    assert not alone.desk.abort()
    alone.open()
    alone.desk.add_group("g0", group("g0"))
    working = alone.work()
    until(lambda: alone.replica.num_computed == 1)
    assert alone.desk.abort()
    working.join(20.0)
    assert not alone.desk.abort() and not alone.desk.running
    assert float(alone.replica.sums.sum()) == 0.0
    alone.open()
    alone.desk.add_group("g0", group("g0"))
    alone.desk.seal(2)
    alone.work().join(20.0)
    assert torch.equal(alone.replica.weight, target_counts([group("g0")]))


def test_desk_step_that_steps_already_is_finished_not_given_up(alone: Desk) -> None:
    alone.open()
    alone.desk.add_group("g0", group("g0"))
    alone.desk.seal(2)
    alone.trainer.go_on.clear()
    working = alone.work()
    assert alone.trainer.during_step.wait(20.0)
    given_up: list[bool] = []
    asking = threading.Thread(target=lambda: given_up.append(alone.desk.abort()))
    asking.start()
    alone.trainer.go_on.set()
    asking.join(20.0)
    working.join(20.0)
    assert given_up == [False] and alone.version == 1
    assert alone.desk.finish(0.0) is not None


def test_desk_core_that_was_started_anew_goes_on_with_the_step(tmp_path: Path) -> None:
    groups = [group(f"g{index}", rollouts=4) for index in range(3)]
    satellite = CountingReplica()
    with shared(tmp_path, CountingReplica()) as (first, hub):
        port = int(hub.url.rsplit(":", 1)[1])
        first.open()
        for branches in groups:
            first.desk.add_group(branches[0].group_id, branches)
        first.desk.seal(12)
        peer = satellite_thread("cell-1", hub.url, satellite)
        thread = peer.__enter__()
        until(lambda: (first.desk.describe() or {})["completed"] == 6)
    try:
        core = CountingReplica()
        with shared(tmp_path, core, port=port) as (second, _):
            second.open()
            for branches in groups:
                assert second.desk.add_group(branches[0].group_id, branches)["known"]
            second.work().join(30.0)  # its seal is known too
            result = second.desk.finish(0.0)
            assert result is not None and result["num_rollouts"] == 12
            assert (core.num_computed, satellite.num_computed, thread.counts["cut_off"]) == (0, 6, 0)
            assert torch.equal(core.weight, target_counts(groups))
    finally:
        peer.__exit__(None, None, None)


def test_desk_satellite_that_left_before_the_core_trains_is_read_then(tmp_path: Path) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    stop = threading.Event()
    with shared(tmp_path, core) as (desk, hub), ExitStack() as stack:
        desk.open()
        groups = [group(f"g{index}", rollouts=4) for index in range(2)]
        for branches in groups:
            desk.desk.add_group(branches[0].group_id, branches)
        stack.enter_context(satellite_thread("cell-1", hub.url, satellite, stop=stop))
        until(lambda: (desk.desk.describe() or {})["completed"] == 4)
        stop.set()
        until(lambda: (desk.desk.describe() or {})["trainers"] == ["cell-1"] and desk.parked(hub))
        desk.desk.seal(8)
        desk.work().join(30.0)
        result = desk.desk.finish(0.0)
        assert result is not None
        assert [(part["owner"], len(part["micro_steps"])) for part in result["account"]["sums"]] == [(False, 4)]
        assert result["account"]["requeued"] == 0
        assert torch.equal(core.weight, target_counts(groups))


def test_desk_members_death_is_told_by_the_fleet(tmp_path: Path) -> None:
    core = CountingReplica()
    with shared(tmp_path, core) as (desk, hub):
        desk.open()
        desk.desk.add_group("g0", group("g0"))
        found = hub.board.weights
        assert found is not None and hub.board.queue is not None
        session = hub.board.queue.join("cell-1", policy_version=0, weights=found[1].checksum)
        hub.board.queue.claim(session)
        assert desk.desk.gone("cell-2", "dead") == ()
        assert desk.desk.gone("cell-1", "dead") == (session,)
        desk.desk.seal(2)
        desk.work().join(30.0)
        assert desk.desk.finish(0.0) is not None
        assert torch.equal(core.weight, target_counts([group("g0")]))
