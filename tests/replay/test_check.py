"""A stored step must follow from what is stored beside it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gyre_core.errors import StoreError
from gyre_core.replay.check import check_step
from gyre_core.replay.report import sheet_of
from gyre_core.replay.stored import StoredStep, find_record, read_step_records
from tests.support.replays import open_store, read_back, store_run
from tests.support.runs import small_config


@pytest.fixture
def step(tmp_path: Path) -> StoredStep:
    store, config = open_store(tmp_path), small_config(tmp_path)
    store_run(store, config)
    return read_back(store, config)


@pytest.mark.parametrize("rewards", [(0.0, 0.5, 1.0), (0.5, 0.5, 0.5), (0.0, None, 1.0), (0.5, None, None)])
@pytest.mark.parametrize("section", [True, False])
def test_check_step_as_a_run_commits_it_has_no_differences(
    tmp_path: Path, rewards: tuple[float | None, ...], section: bool
) -> None:
    store, config = open_store(tmp_path), small_config(tmp_path)
    store_run(store, config, rewards=rewards, section=section)
    for label in (1, 2):
        report = check_step(read_back(store, config, label))
        assert report.differences == ()
        assert (report.num_groups, report.num_rollouts) == (1, 3)


def changed(step: StoredStep, **fields) -> StoredStep:
    (group,) = step.groups
    branches = (replace(group.branches[0], **fields), *group.branches[1:])
    return replace(step, groups=(replace(group, branches=branches),))


def test_check_step_names_each_difference(step: StoredStep) -> None:
    first = step.groups[0].branches[0]
    weights = first.weights.copy()
    weights[first.target] = np.nextafter(weights[first.target], np.float32(1))
    name = f"branch 0 of {first.rollout_id}"
    assert check_step(changed(step, weights=weights)).differences == (f"{name}: weights differ",)
    other = check_step(changed(step, advantage=first.advantage + 1e-9)).differences
    assert other == (f"{name}: advantage differ",)
    (group,) = step.groups
    fewer = replace(step, groups=(replace(group, branches=group.branches[1:]),))
    assert f"{name} is not stored and would be selected" in check_step(fewer).differences
    counted = replace(step, record=replace(step.record, denominators={"rollouts": 7}))
    assert check_step(counted).differences == (
        "included rollouts (the denominator): the step says 7, its trees give 3",
    )
    swapped = replace(step.record, micro_steps=(step.record.micro_steps[0][::-1],))
    (found,) = check_step(replace(step, record=swapped)).differences
    assert found.startswith("micro-steps: the step says")


def test_check_sheet_says_what_was_compared_or_differs(step: StoredStep) -> None:
    report = check_step(step)
    result = {"run": "r1", "step": 1, "mode": "check", "ok": True, **report.as_json()}
    assert "| branches | 6 |" in sheet_of(result).markdown()
    bad = {**result, "ok": False, "differences": ["branch 0 of r: weights differ"]}
    text = sheet_of(bad).markdown()
    assert "NOT as stored" in text and "- branch 0 of r: weights differ" in text


def test_find_record_unknown_step_or_empty_store_is_a_clear_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="no step yet"):
        read_step_records(store)
    store_run(store, small_config(tmp_path))
    with pytest.raises(StoreError, match="no step 3: the run has steps 1 to 2"):
        find_record(read_step_records(store), 3)
    with pytest.raises(StoreError, match="no step 0"):
        find_record(read_step_records(store), 0)
