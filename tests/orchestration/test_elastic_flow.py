"""The flow on several cells: cells move while rollouts run, later batches run ahead, barriers hold groups back."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from gyre_core.cells.fleet_proxies import EngineLoad
from gyre_core.engine.speed import TokenSpeed
from gyre_core.errors import GyreError
from gyre_core.run_folder import RunFolder
from gyre_core.types import RolloutSpec
from tasks.scheduling import token_speed
from tasks.work_pools import ROLLOUT_POOL, TRAIN_POOL, WorkPools
from tests.orchestration.test_training_flow import NoAdmin, Rollouts, steps_flow
from tests.support.runs import FakeFleet, SimulatedDeath, make_context, small_config


class GatedRollouts(Rollouts):
    """Rollouts that end when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, threading.Event] = {}
        self.versions: dict[str, int] = {}

    async def execute(self, spec: RolloutSpec, problem: Any, **named: Any) -> Any:
        self.versions[spec.rollout_id] = spec.dispatch_version
        gate = self.gates.get(spec.rollout_id)
        if gate is not None:
            assert await asyncio.to_thread(gate.wait, 200), f"{spec.rollout_id} was never let go"
        return await super().execute(spec, problem, **named)


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> GatedRollouts:
    made = GatedRollouts()
    monkeypatch.setattr("tasks.rollouts.execute", made.execute)
    monkeypatch.setattr("tasks.grading.grade", made.grade)
    monkeypatch.setattr("tasks.rollouts.ProxyPool", NoAdmin)
    return made


class LettingGo(FakeFleet):
    """Lets a rollout go once a cell has made its n-th move."""

    def __init__(self, gate: threading.Event, *, after_moves: int, **named: Any) -> None:
        super().__init__(**named)
        self._gate, self._after = gate, after_moves

    def move(self, move: Any) -> Any:
        report = super().move(move)
        if len(self.moved) == self._after:
            self._gate.set()
        return report


def test_elastic_core_trains_the_first_group_while_the_last_rollout_runs(
    tmp_path: Path, rollouts: GatedRollouts
) -> None:
    config = small_config(tmp_path, rollout__slots=6, scheduler={"cells": 3, "policy": "elastic"})
    folder = RunFolder.create(config, "r1")
    gate = threading.Event()
    fleet = LettingGo(gate, after_moves=1, policy_version=0, cells=3)
    run = make_context(config, folder, fleet, problem_ids=("a", "b"))
    rollouts.gates["s0000-b-02"] = gate  # ends only when a cell has moved to training
    steps_flow(run, 1)
    assert fleet.moved[0] == ("cell-0", "train"), "the core first"
    assert fleet.moved[-1] == ("cell-0", "rollout"), "the core last"
    assert fleet.handed == ["s0000-a", "s0000-b"], "the group that was whole first was trained first"
    (record,) = run.store.read_steps()
    decided = [decision for decision in record.extra["decisions"] if decision["moves"]]
    first = decided[0]["snapshot"]
    assert (first["dispatched"], first["untrained_groups"]) == (6, 2)
    assert first["dispatched"] - first["finished"] >= 1, "a rollout was live when the core left"
    assert rollouts.executed == Counter({f"s0000-{problem}-0{member}": 1 for problem in "ab" for member in range(3)})


def test_staleness_one_runs_the_next_batch_ahead_and_never_further(tmp_path: Path, rollouts: GatedRollouts) -> None:
    config = small_config(tmp_path, train__steps=3, scheduler={"staleness": 1})
    run = make_context(config, RunFolder.create(config, "r1"), FakeFleet(policy_version=0))
    steps_flow(run, 3)
    dispatched = {f"{rollout_id[:5]}": version for rollout_id, version in rollouts.versions.items()}
    assert dispatched == {"s0000": 0, "s0001": 0, "s0002": 1}
    records = run.store.read_steps()
    assert [record.stats["staleness_max"] for record in records] == [0, 1, 1]
    assert all(len(record.groups_trained) == 2 for record in records)
    assert set(rollouts.executed.values()) == {1} and len(rollouts.executed) == 18


def test_staleness_one_killed_after_a_step_resumes_with_what_ran_ahead(tmp_path: Path, rollouts: GatedRollouts) -> None:
    config = small_config(tmp_path, train__steps=3, scheduler={"staleness": 1})
    folder = RunFolder.create(config, "r1")
    with pytest.raises(SimulatedDeath):
        steps_flow(make_context(config, folder, FakeFleet(policy_version=0, die_at=("train_open", 2))), 3)
    resumed = make_context(config, folder, FakeFleet(policy_version=1))
    steps_flow(resumed, 3)
    trained = Counter(group for record in resumed.store.read_steps() for group in record.groups_trained)
    assert len(trained) == 6 and set(trained.values()) == {1}
    assert [record.stats["staleness_max"] <= 1 for record in resumed.store.read_steps()] == [True] * 3


def test_async_off1_holds_groups_back_until_the_batch_is_whole(tmp_path: Path, rollouts: GatedRollouts) -> None:
    config = small_config(
        tmp_path, rollout__slots=4, scheduler={"cells": 2, "policy": "async_off1", "train_cells": 1, "staleness": 1}
    )
    run = make_context(config, RunFolder.create(config, "r1"), FakeFleet(policy_version=0, cells=2))
    burst_ready: list[int] = []
    fleet: Any = run.services.fleet
    hand = fleet.train_group

    def handed(group_id: str, branches: list[Any]) -> Any:
        burst_ready.append(run.scheduling.observe().ready_groups)
        return hand(group_id, branches)

    fleet.train_group = handed
    steps_flow(run, 1)
    assert burst_ready[0] == 2, "both groups were whole when the first was handed over"
    assert fleet.moved == [("cell-0", "train")], "a fixed split: the core goes to training once and stays"


def test_core_that_dies_before_its_step_is_saved_trains_the_step_again(tmp_path: Path, rollouts: GatedRollouts) -> None:
    class Dying(FakeFleet):
        def finish_checkpoint(self) -> dict[str, Any]:
            if self.core_generation == 0:
                self.core_generation, self.version = 1, 0  # a new process, from the state before the step
                self.target = 0
                self.served = [0]
                raise GyreError("the cell host does not answer /checkpoint/finish")
            return super().finish_checkpoint()

    config = small_config(tmp_path)
    fleet = Dying(policy_version=0)
    run = make_context(config, RunFolder.create(config, "r1"), fleet)
    steps_flow(run, 1)
    (record,) = run.store.read_steps()
    assert (record.version_after, len(record.groups_trained)) == (1, 2)
    assert Counter(fleet.handed) == dict.fromkeys(record.groups_trained, 2), "both were handed over once more"
    assert set(rollouts.executed.values()) == {1}, "no rollout was run again"


@pytest.mark.parametrize("longest", ["a", "b"])
def test_longest_problem_is_admitted_first_by_the_policy_that_looks_ahead(
    tmp_path: Path, rollouts: GatedRollouts, longest: str
) -> None:
    config = small_config(tmp_path, rollout__slots=1, scheduler={"policy": "elastic_predictive"})
    run = make_context(config, RunFolder.create(config, "r1"), FakeFleet(policy_version=0), problem_ids=("a", "b"))
    estimates = run.scheduling.estimates
    for problem in "ab":
        seconds = 30.0 if problem == longest else 10.0
        estimates.group_added(f"old-{problem}", step=-1, problem_id=problem, rollouts=1)
        estimates.rollout_started(problem, f"old-{problem}", 0.0)
        estimates.rollout_ended(problem, f"old-{problem}", seconds)
    steps_flow(run, 1)
    shortest = {"a": "b", "b": "a"}[longest]
    started = [rollout_id.split("-")[1] for rollout_id in rollouts.executed]
    assert started == [longest] * 3 + [shortest] * 3
    predicted = run.store.read_steps()[0].extra["decisions"][0]["snapshot"]
    assert predicted["ungraded_groups"] + predicted["ready_groups"] == 2


def test_token_speed_counts_residents_in_their_tools_as_no_load() -> None:
    speed = TokenSpeed(start_s=0.0, token_s=0.02, load_s=0.004)
    load = EngineLoad(residents={"a": 6, "b": 2}, busy={"a": 2, "b": 0}, speed=speed)
    assert token_speed(load) == (0.02, pytest.approx(0.004 * 2 / 8))
    assert token_speed(EngineLoad(residents={"a": 6}, busy={"a": 2})) == (1.0, 0.0)
    assert token_speed(EngineLoad(speed=speed)) == (0.02, 0.004)


def test_work_pools_follow_the_cells_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sending, let_go = threading.Event(), threading.Event()
    send = WorkPools._send

    def slow(self: WorkPools, wanted: dict[str, int]) -> bool:
        sending.set()
        assert let_go.wait(60)
        return send(self, wanted)

    monkeypatch.setattr(WorkPools, "_send", slow)
    pools = WorkPools.open()
    pools.resize(rollout=18, train=0)
    assert sending.wait(60)
    pools.resize(rollout=6, train=2)  # returns though the server has not answered yet; the newest counts
    pools.resize(rollout=12, train=1)
    let_go.set()
    pools.close()
    with get_client(sync_client=True) as client:
        before = [client.read_work_pool(name) for name in (ROLLOUT_POOL, TRAIN_POOL)]
        assert [pool.concurrency_limit for pool in before] == [12, 1]
        WorkPools.open().close()
        after = [client.read_work_pool(name) for name in (ROLLOUT_POOL, TRAIN_POOL)]
    assert after == before, "pools that exist are taken as they are"


def test_work_pools_of_a_server_that_does_not_answer_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[str, int]] = []
    again = threading.Event()

    def failing(self: WorkPools, wanted: dict[str, int]) -> bool:
        tries.append(wanted)
        if len(tries) == 1:
            return False
        self._sent = wanted
        again.set()
        return True

    monkeypatch.setattr(WorkPools, "_send", failing)
    monkeypatch.setattr("tasks.work_pools._RETRY_S", 0.01)
    pools = WorkPools.open()
    pools.resize(rollout=18, train=0)
    assert again.wait(60)
    pools.close()
    assert tries == [{ROLLOUT_POOL: 18, TRAIN_POOL: 0}] * 2
