"""Training a stored step again: from which state, with what, and how a difference is told."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre_core.config import RunConfig
from gyre_core.errors import GyreError, StoreError
from gyre_core.replay.check import check_step
from gyre_core.replay.report import sheet_of
from gyre_core.replay.retrain import RetrainPlan, RetrainReport, plan_retrain, retrain
from gyre_core.replay.stored import find_record, read_step_records, read_stored_step
from gyre_core.store import StepRecord, Store
from gyre_core.train.queue_records import ACCOUNT, GradientSum, StepAccount
from gyre_core.types import TrainingBranch
from tests.support.replays import BACK_END, HashTrainer, open_store, store_run
from tests.support.runs import small_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_config(tmp_path, train__learning_rate=1e-3, train__learning_rate_decay="linear")


@pytest.fixture
def store(tmp_path: Path, config: RunConfig) -> Store:
    store = open_store(tmp_path)
    store_run(store, config, steps=3)
    return store


def again(cell: HashTrainer, plan: RetrainPlan, store: Store, config: RunConfig) -> RetrainReport:
    return retrain(cell, plan, (read_stored_step(store, config, record) for record in plan.records))


def test_retrain_first_step_starts_from_the_first_weights(tmp_path: Path, store: Store, config: RunConfig) -> None:
    plan = plan_retrain(read_step_records(store), tmp_path, label=1)
    assert (plan.first_version, plan.checkpoint, plan.compare, plan.train.threads) == (0, None, None, 2)
    report = again(HashTrainer(), plan, store, config)
    assert report.equal and report.checkpoint is None and report.back_end_changes == {}
    assert report.as_json()["digest_stored"] == report.as_json()["digest_again"]


def test_retrain_uses_the_nearest_checkpoint_or_trains_the_steps_before(
    tmp_path: Path, store: Store, config: RunConfig
) -> None:
    records = read_step_records(store)
    assert [record.step for record in plan_retrain(records, tmp_path, label=3).records] == [0, 1, 2]
    report = again(HashTrainer(), plan_retrain(records, tmp_path, label=3), store, config)
    assert [step.equal for step in report.steps] == [True, True, True]
    for version in (1, 3):
        (tmp_path / f"version-{version:05d}").mkdir()
    plan = plan_retrain(records, tmp_path, label=3)
    assert [record.step for record in plan.records] == [1, 2]
    assert plan.checkpoint == tmp_path / "version-00001" and plan.compare == tmp_path / "version-00003"
    report = again(HashTrainer(plan.sections[0].weights_before), plan, store, config)
    assert report.equal and report.started_from == "version-00001"


def test_retrain_other_bits_are_told_with_the_step_and_the_difference(
    tmp_path: Path, store: Store, config: RunConfig
) -> None:
    cell = HashTrainer()
    cell.bend, cell.back_end = "another kernel", {**BACK_END, "torch": "9.9"}
    (tmp_path / "version-00001").mkdir()
    cell.difference = {**cell.difference, "different_weights": ["a"], "max_abs_weights": 0.25}
    report = again(cell, plan_retrain(read_step_records(store), tmp_path, label=1), store, config)
    assert not report.equal
    assert report.back_end_changes == {"torch": [None, "9.9"]}
    result = {"run": "r1", "step": 1, "mode": "retrain", "ok": report.equal, **report.as_json()}
    assert result["max_abs_difference"] == 0.25
    text = sheet_of(result).markdown()
    assert "NOT as stored" in text and "DIFFERENT" in text
    assert "1 of 3 weight tensors differ, largest difference 0.25" in text and "torch: none -> 9.9" in text


def test_retrain_equal_weights_with_other_moments_are_not_equal(
    tmp_path: Path, store: Store, config: RunConfig
) -> None:
    cell = HashTrainer()
    cell.difference = {**cell.difference, "different_moments": ["0.1.exp_avg"]}
    (tmp_path / "version-00001").mkdir()
    assert not again(cell, plan_retrain(read_step_records(store), tmp_path, label=1), store, config).equal


def test_retrain_wrong_first_weights_are_refused_before_training(
    tmp_path: Path, store: Store, config: RunConfig
) -> None:
    cell = HashTrainer("other weights")
    with pytest.raises(StoreError, match="is not what step 1 began with"):
        again(cell, plan_retrain(read_step_records(store), tmp_path, label=1), store, config)
    assert cell.weights()["weights_digest"] == "other weights"


def test_retrain_other_packing_is_refused(tmp_path: Path, store: Store, config: RunConfig) -> None:
    cell = HashTrainer()
    cell.packing = [[("r", 0)], [("r", 1)]]
    with pytest.raises(GyreError, match="this Gyre packs it as"):
        again(cell, plan_retrain(read_step_records(store), tmp_path, label=1), store, config)


def shared_record(record: StepRecord, order: list[tuple[bool, list[int]]]) -> StepRecord:
    """The record with an account: sums of micro-steps by number, the core's own or a satellite's."""
    names = [f"m{number}" for number in range(len(record.micro_steps))]
    account = StepAccount(
        taken={},
        groups={},
        stats={},
        requeued=0,
        failed=0,
        cut_off=(),
        rates={},
        sums=tuple(
            GradientSum(session=f"s/cell#{index}", owner=own, micro_steps=tuple(names[number] for number in numbers))
            for index, (own, numbers) in enumerate(order)
        ),
        branches=dict(zip(names, record.micro_steps, strict=True)),
    )
    stored = json.loads(json.dumps(account.to_json()))
    return replace(record, micro_steps=account.micro_steps, extra={**record.extra, ACCOUNT: stored})


def test_retrain_shared_step_sums_each_session_from_zero_in_the_order_of_the_additions(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    store = open_store(tmp_path)
    store_run(store, config, steps=1)
    record = find_record(read_step_records(store), 1)
    (whole,) = record.micro_steps
    record = replace(record, micro_steps=(whole[:1], whole[1:2], whole[2:3], whole[3:]))  # as cells would split it
    order = [(True, [3]), (False, [1, 2]), (True, [0])]
    told = shared_record(record, order)
    plan = plan_retrain([told], tmp_path, label=1)
    cell = Telling()
    report = retrain(cell, plan, [read_stored_step(store, config, told)])
    keys = [list(part) for part in record.micro_steps]
    assert cell.told == [keys[3], "(", keys[1], keys[2], ")", keys[0]]
    assert report.steps[0].micro_steps == 4
    assert not check_step(read_stored_step(store, config, told)).differences
    lost = replace(told, micro_steps=told.micro_steps[1:])
    with pytest.raises(StoreError, match="its account and its list of micro-steps differ"):
        retrain(Telling(), plan_retrain([lost], tmp_path, label=1), [read_stored_step(store, config, lost)])
    assert check_step(read_stored_step(store, config, lost)).differences


class Telling(HashTrainer):
    """Notes in which order it was told what."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def micro_step(self, branches: Sequence[TrainingBranch]) -> dict[str, Any]:
        self.told.append([(branch.rollout_id, branch.branch) for branch in branches])
        return super().micro_step(branches)

    def sum_begin(self) -> None:
        self.told.append("(")

    def sum_end(self) -> None:
        self.told.append(")")


def test_plan_retrain_record_without_section_is_a_clear_error(tmp_path: Path, config: RunConfig) -> None:
    store = open_store(tmp_path / "old")
    store_run(store, config, section=False)
    with pytest.raises(StoreError, match=r"no replay section .* because an older Gyre wrote it"):
        plan_retrain(read_step_records(store), tmp_path, label=1)
