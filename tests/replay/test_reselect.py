"""Selection of a stored step with other settings."""

from pathlib import Path

import pytest

from gyre_core.config import SelectionConfig
from gyre_core.errors import ConfigError
from gyre_core.replay.report import sheet_of
from gyre_core.replay.reselect import parse_selection, reselect
from gyre_core.replay.stored import StoredStep
from gyre_core.types import Role
from tests.support.replays import open_store, read_back, store_run
from tests.support.runs import small_config

# Each of three rollouts has a main branch (2 + 3 targets, 10 tokens) and a sub-agent branch (4 targets, 8 tokens); the
# middle one's advantage is 0.


@pytest.fixture
def step(tmp_path: Path) -> StoredStep:
    store, config = open_store(tmp_path), small_config(tmp_path)
    store_run(store, config)
    return read_back(store, config)


def select(step: StoredStep, *settings: str, role_order: str | None = None):
    assert step.section is not None
    return reselect(step, parse_selection(step.selection, settings, role_order), step.section.train)


def test_reselect_same_settings_change_nothing(step: StoredStep) -> None:
    found = select(step)
    assert found.before == found.after
    assert (found.branches_kept, found.rollouts_changed) == (6, 0)
    assert found.before.targets_by_role == {"main": 15, "sub-agent": 12}
    assert found.before.weights_by_role == pytest.approx({"main": 15 / 9, "sub-agent": 12 / 9}, abs=1e-5)
    assert found.before.unique_tokens == step.record.stats["num_tokens"]
    assert found.before.train_s == step.record.stats["duration_s"]


def test_reselect_one_branch_trains_fewer_tokens_with_the_same_weight(step: StoredStep) -> None:
    found = select(step, "J=1")
    assert (found.before.branches, found.after.branches) == (6, 3)
    assert (found.before.tokens_in_branches, found.after.tokens_in_branches) == (54, 30)
    assert found.after.targets_by_role == {"main": 15}
    assert found.after.weights_by_role == pytest.approx({"main": 3.0})
    # The three rollouts have the same tokens and are packed as one tree: a start of 3, 7 more of main, 5 of the
    # sub-agent took 2 s; main alone is 10 of these 15.
    assert (found.before.unique_tokens, found.after.unique_tokens) == (15, 10)
    assert (found.before.train_s, found.after.train_s) == (2.0, 1.333)
    assert (found.branches_kept, found.rollouts_changed) == (3, 3)


def test_reselect_role_order_decides_which_branch_is_kept(step: StoredStep) -> None:
    found = select(step, "J=1", role_order="sub-agent,main")
    assert found.after.branches_by_role == {"sub-agent": 3}
    assert found.selection_after.role_order == (Role.SUB_AGENT, Role.MAIN)


def test_reselect_min_group_may_drop_the_group(step: StoredStep) -> None:
    found = select(step, "min_group=4")
    assert (found.groups_dropped_before, found.groups_dropped_after) == (0, 1)
    assert found.after.branches == 0 and found.after.train_s == 0


def test_reselect_sheet_tells_settings_and_changes(step: StoredStep) -> None:
    result = {"run": "r1", "step": 1, "mode": "reselect", "ok": True, **select(step, "J=1").as_json()}
    text = sheet_of(result).markdown()
    assert "| branches | 6 | 3 | -50.0 % |" in text
    assert "- max_branches: 5 -> 1" in text
    assert "nothing was written" in text


@pytest.mark.parametrize(
    ("settings", "role_order", "telling"),
    [
        (["J"], None, "write NAME=VALUE with one of J, max_branches"),
        (["K=3"], None, "'K=3' is no selection setting"),
        (["J=many"], None, "max_branches"),
        (["J=-1"], None, "max_branches"),
        ([], "main,boss", "role_order"),
        ([], "main,main", "at most once"),
        ([], "aux", "auxiliary calls are never trained"),
    ],
)
def test_parse_selection_bad_settings_are_a_clear_error(
    settings: list[str], role_order: str | None, telling: str
) -> None:
    with pytest.raises(ConfigError, match=telling):
        parse_selection(SelectionConfig(), settings, role_order)
