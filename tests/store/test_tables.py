"""Domain objects through Parquet bytes and back."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.errors import StoreError
from gyre_core.store.parquet import open_parquet, read_parquet, row_groups_of, to_parquet
from gyre_core.store.schema import SchemaVersionError
from gyre_core.store.tables import (
    locate_branch,
    mask_to_runs,
    read_branches,
    read_rollouts,
    read_trajectories,
    rollout_tables,
    runs_to_mask,
    selections_table,
)
from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree
from tests.support.rollouts import (
    assert_same_branch,
    assert_same_trajectory,
    branch_of,
    finished,
    output_node,
    prompt_node,
    trajectories,
    two_turns,
)


def through_parquet(name: str, table: pa.Table) -> pa.Table:
    file, version = open_parquet(name, pa.BufferReader(to_parquet(name, table)), key=name)
    return read_parquet(name, file, version, key=name)


@given(parts=st.lists(trajectories(), min_size=0, max_size=3))
@settings(max_examples=60)
def test_rollouts_any_trajectories_come_back_to_the_bit(parts: list[Trajectory]) -> None:
    rollouts = []
    for number, part in enumerate(parts):
        rollout_id = f"r{number}"
        tree = TrajectoryTree(rollout_id=rollout_id, nodes=part.tree.nodes)
        calls = tuple(_renamed(call, rollout_id) for call in part.calls)
        trajectory = Trajectory(rollout_id=rollout_id, tree=tree, calls=calls, counters=part.counters)
        rollouts.append(finished(rollout_id, reward=None if number else 0.25, trajectory=trajectory))
    tables = {name: through_parquet(name, table) for name, table in rollout_tables(rollouts).items()}
    back = read_rollouts(tables["rollouts"], tables["nodes"], tables["calls"], tables["grades"])
    assert len(back) == len(rollouts)
    for stored, given_ in zip(back, rollouts, strict=True):
        assert_same_trajectory(stored.trajectory, given_.trajectory)
        assert (stored.spec, stored.grade, stored.harness) == (given_.spec, given_.grade, given_.harness)


def _renamed(call, rollout_id: str):
    import dataclasses

    return dataclasses.replace(call, rollout_id=rollout_id)


@given(mask=st.lists(st.booleans(), max_size=40))
def test_mask_runs_any_mask_comes_back(mask: list[bool]) -> None:
    array = np.array(mask, np.bool_)
    np.testing.assert_array_equal(runs_to_mask(mask_to_runs(array)), array)


def test_mask_runs_known_masks_give_known_runs() -> None:
    assert mask_to_runs(np.array([False, False, True])) == [2, 1]
    assert mask_to_runs(np.array([True])) == [0, 1]
    assert mask_to_runs(np.array([], np.bool_)) == []


def test_selections_branches_come_back_to_the_bit_without_their_ids_being_stored() -> None:
    trajectory = two_turns("r1")
    branches = [branch_of(trajectory, 3), branch_of(trajectory, 4, branch=1, num_targets=1)]
    table = through_parquet("selections", selections_table(branches, [trajectory]))
    assert table.column("node_id").to_pylist() == [3, 4]
    for stored, given_ in zip(read_branches(table, [trajectory]), branches, strict=True):
        assert_same_branch(stored, given_)


def test_locate_branch_equal_ids_in_two_samples_are_told_apart_by_log_probs() -> None:
    nodes = (
        prompt_node(0, NO_PARENT, [1]),
        output_node(1, 0, [5], [-0.5], call_id="c0"),
        output_node(2, 0, [5], [-0.25], call_id="c1"),
    )
    tree = TrajectoryTree(rollout_id="r", nodes=nodes)
    trajectory = Trajectory(rollout_id="r", tree=tree, calls=())
    assert locate_branch(tree, branch_of(trajectory, 2)) == 2


def test_locate_branch_ids_that_are_no_path_are_refused() -> None:
    branch = branch_of(two_turns("r1"), 3)
    branch.token_ids[0] = 99
    with pytest.raises(ValueError, match="no path"):
        locate_branch(two_turns("r1").tree, branch)


def test_rollout_tables_the_same_rollout_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="given twice"):
        rollout_tables([finished("r1"), finished("r1")])


def test_nodes_parquet_has_a_row_group_a_rollout_and_the_designed_encodings() -> None:
    tables = rollout_tables([finished("r1"), finished("r2"), finished("r3")])
    file = pq.ParquetFile(pa.BufferReader(to_parquet("nodes", tables["nodes"])))
    assert file.metadata.num_row_groups == 3
    assert row_groups_of(file, "r2") == [1]
    columns = [file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)]
    by_path = {column.path_in_schema: column for column in columns}
    for leaf in ("tokens.list.element", "logprobs.list.element"):
        assert "BYTE_STREAM_SPLIT" in by_path[leaf].encodings
        assert by_path[leaf].compression == "ZSTD"
    assert not any("DICTIONARY" in encoding for column in columns for encoding in column.encodings)


def test_parquet_size_of_ordinary_tokens_is_near_the_measured_bytes_a_token() -> None:
    rng = np.random.default_rng(0)
    num = 200_000
    ids = np.minimum(rng.zipf(1.3, num), 150_000)
    logprobs = -np.where(rng.random(num) < 0.6, rng.exponential(1e-3, num), rng.exponential(0.8, num))
    nodes = (
        prompt_node(0, NO_PARENT, ids[: num // 2]),
        output_node(1, 0, ids[num // 2 :], logprobs[num // 2 :], call_id="c0"),
    )
    trajectory = Trajectory(rollout_id="r", tree=TrajectoryTree(rollout_id="r", nodes=nodes), calls=())
    size = len(to_parquet("nodes", rollout_tables([finished("r", trajectory=trajectory)])["nodes"]))
    assert size / num < 4.5  # raw: 4 bytes of id and, for half of them, 4 of log-prob


def test_to_parquet_same_table_gives_the_same_bytes() -> None:
    first, second = (rollout_tables([finished("r1")])["nodes"] for _ in range(2))
    assert to_parquet("nodes", first) == to_parquet("nodes", second)


@pytest.mark.parametrize("change", ["missing", "extra", "type", "name"])
def test_to_parquet_tables_outside_their_schema_are_refused(change: str) -> None:
    table = rollout_tables([finished("r1")])["grades"]
    name = "grades"
    if change == "missing":
        table = table.drop_columns(["reason"])
    elif change == "extra":
        table = table.append_column("more", pa.array([1]))
    elif change == "type":
        table = table.set_column(1, "verifier_attempts", pa.array(["many"])).drop_columns([table.column_names[0]])
    else:
        name = "grade"
    with pytest.raises(ValueError, match="grade"):
        to_parquet(name, table)


def test_open_parquet_another_table_foreign_or_newer_objects_are_named() -> None:
    grades = to_parquet("grades", rollout_tables([finished("r1")])["grades"])
    with pytest.raises(StoreError, match=r"data/x should hold the table 'nodes', it holds 'grades'"):
        open_parquet("nodes", pa.BufferReader(grades), key="data/x")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(StoreError, match="foreign Parquet"):
        open_parquet("nodes", sink.getvalue(), key="data/x")
    newer = pa.table({"a": [1]}).replace_schema_metadata({"gyre.table": "nodes", "gyre.schema_version": "99"})
    sink = pa.BufferOutputStream()
    pq.write_table(newer, sink)
    with pytest.raises(SchemaVersionError, match=r"data/x has schema version 99 of nodes.* use a newer one"):
        open_parquet("nodes", sink.getvalue(), key="data/x")
    with pytest.raises(StoreError, match="truncated"):
        open_parquet("grades", pa.BufferReader(grades[:-20]), key="data/x")


def test_read_trajectories_lost_nodes_are_a_named_error() -> None:
    tables = rollout_tables([finished("r1")])
    with pytest.raises(StoreError, match="rollout r1 has 4 nodes and 3 calls in the store, its record says 5 and 3"):
        read_trajectories(tables["rollouts"], tables["nodes"].slice(0, 4), tables["calls"])
