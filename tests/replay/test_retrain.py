"""Training a stored step again: from which state, with what, and how a difference is told."""

from pathlib import Path

import pytest

from gyre_core.config import RunConfig
from gyre_core.errors import GyreError, StoreError
from gyre_core.replay.report import sheet_of
from gyre_core.replay.retrain import RetrainPlan, RetrainReport, plan_retrain, retrain
from gyre_core.replay.stored import read_step_records, read_stored_step
from gyre_core.store import Store
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


def test_plan_retrain_record_without_section_is_a_clear_error(tmp_path: Path, config: RunConfig) -> None:
    store = open_store(tmp_path / "old")
    store_run(store, config, section=False)
    with pytest.raises(StoreError, match=r"no replay section .* because an older Gyre wrote it"):
        plan_retrain(read_step_records(store), tmp_path, label=1)
