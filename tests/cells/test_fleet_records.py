"""The fence: what a process says after it was given up, or of an older epoch, changes nothing."""

import pytest

from gyre_core.cells.fleet_records import CellLostError, CellRecord
from gyre_core.scheduler.cell import CellState


def answer(state: str, epoch: int, *, served: int | None = 0, url: str = "http://127.0.0.1:1") -> dict[str, object]:
    return {
        "state": state,
        "epoch": epoch,
        "policy_version": 0,
        "served_version": served,
        "engine_url": url,
        "engine_key": "key",
    }


def test_record_older_epoch_changes_nothing() -> None:
    record = CellRecord("cell-1", 4)
    assert record.apply(0, answer("training", 3))
    assert not record.apply(0, answer("rollout", 2))
    assert (record.state, record.epoch) == (CellState.TRAINING, 3)
    assert record.apply(0, answer("rollout", 4))
    assert record.state is CellState.ROLLOUT


def test_record_answer_of_a_process_that_was_given_up_changes_nothing_even_with_a_newer_epoch() -> None:
    record = CellRecord("cell-1", 4)
    record.apply(0, answer("training", 3))
    assert record.give_up() == 1
    assert not record.apply(0, answer("rollout", 9))
    assert (record.state, record.epoch, record.served_version) == (CellState.DEAD, 0, None)
    with pytest.raises(CellLostError, match="cell-1 is being started again"):
        record.set(0, state=CellState.ROLLOUT)
    assert record.apply(1, answer("rollout", 0))  # its successor begins anew


def test_record_heartbeat_asked_for_before_a_request_ran_is_not_believed() -> None:
    record = CellRecord("cell-1", 4)
    record.apply(0, answer("draining", 1))
    record.verbs += 1  # a role change to training began and ended meanwhile, in the same epoch
    record.apply(0, answer("training", 1))
    assert not record.observe(0, 0, answer("draining", 1))
    assert record.state is CellState.TRAINING
    record.busy = 1
    assert not record.observe(0, 1, answer("draining", 1))
    record.busy = 0
    assert record.observe(0, 1, answer("training", 1))


def test_record_is_listed_only_in_rollout_with_verified_weights_and_not_held_back() -> None:
    record = CellRecord("cell-1", 4)
    assert record.entry(0) is None
    record.apply(0, answer("rollout", 0, served=3))
    entry = record.entry(7)
    assert entry is not None
    assert (entry.url, entry.slots, entry.api_key) == ("http://127.0.0.1:1", 4, "key")
    assert (entry.version, entry.rank) == (3, 7)
    record.set(0, held_back=True)
    assert record.entry(0) is None
    record.set(0, held_back=False)
    for state in ("draining", "training", "returning"):
        record.apply(0, answer(state, 1, served=3))
        assert record.entry(0) is None
    record.apply(0, answer("rollout", 2, served=None))
    assert record.entry(0) is None


def test_record_answer_without_a_key_keeps_the_one_of_the_same_engine() -> None:
    record = CellRecord("cell-1", 4)
    record.apply(0, answer("rollout", 0))
    role_answer = answer("draining", 1)  # a role change is answered without the key
    del role_answer["engine_key"]
    record.apply(0, role_answer)
    assert record.engine == ("http://127.0.0.1:1", "key")
    record.apply(0, {**role_answer, "engine_url": "http://127.0.0.1:2"})  # another engine has another key
    assert record.engine == ("http://127.0.0.1:2", None)


def test_record_of_a_cell_with_a_kv_store_tells_how_long_its_writes_take() -> None:
    record = CellRecord("cell-1", 4, kv_write_s=0.2)
    record.apply(0, answer("rollout", 0))
    entry = record.entry(0)
    assert entry is not None
    assert entry.kv_write_s == 0.2
