"""The registry: a reader for every version ever written, proved on files that the Gyre of that version wrote."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from gyre_core.errors import StoreError
from gyre_core.store.parquet import open_parquet, read_parquet, to_parquet
from gyre_core.store.records import StepRecord
from gyre_core.store.schema import OLDER, SCHEMAS, VERSIONS, check_table, schema_of, upgrade
from gyre_core.store.store import Store
from gyre_core.store.tables import rollout_tables
from gyre_core.store.verify import verify
from tests.support.rollouts import assert_same_branch, assert_same_trajectory, branch_of, finished, two_turns

WRITTEN_BEFORE = Path(__file__).parent / "fixtures"  # whole stores, one for each set of versions, never written again


def test_registry_has_a_reader_for_every_version_of_every_table() -> None:
    assert VERSIONS.keys() == SCHEMAS.keys()
    expected = {(name, version) for name, newest in VERSIONS.items() for version in range(1, newest)}
    assert OLDER.keys() == expected


def test_registry_each_step_leads_to_the_next_versions_columns() -> None:
    for (name, version), older in OLDER.items():
        empty = older.upgrade(older.schema.empty_table())
        assert empty.schema.equals(schema_of(name, version + 1)), (name, version)


@pytest.fixture
def version_1(tmp_path: Path) -> Store:
    """A store in which every table is of version 1, written by the code of that time."""
    shutil.copytree(WRITTEN_BEFORE / "schema-1", tmp_path / "store")
    return Store.open(str(tmp_path / "store"))


def test_store_of_version_1_is_read_whole(version_1: Store) -> None:
    group, step = version_1.commits()
    assert {ref.schema_version for refs in group.tables.values() for ref in refs} == {1}
    assert verify(version_1).ok and verify(version_1).num_rollouts == 2
    stored = version_1.read_rollout("r1")
    given = finished("r1", reward=None)
    assert (stored.spec, stored.grade, stored.harness, stored.workspace_ref) == (
        given.spec,
        given.grade,
        given.harness,
        "",
    )
    assert_same_trajectory(stored.trajectory, two_turns("r1"))
    (branch,) = version_1.read_branches(group)
    assert_same_branch(branch, branch_of(two_turns("r0"), 3))
    expected = StepRecord(step=0, version_before=0, version_after=1, groups_trained=("s0000-p07",))
    assert version_1.read_step(step) == expected


def test_store_of_version_1_goes_on_in_the_present_version(version_1: Store) -> None:
    ref = version_1.put_blob(b"archive", kind="workspace")
    rollout = finished("r2", workspace_ref=ref)
    commit = version_1.commit_rollouts("group", [rollout], [], {}, "g2")
    assert commit.tables["rollouts"][0].schema_version == VERSIONS["rollouts"] == 2
    assert [blob.ref for blob in commit.blobs] == [ref]
    assert version_1.read_rollout("r2").workspace_ref == ref
    assert version_1.read_rollout("r0").workspace_ref == ""


def test_upgrade_from_a_versions_own_writer_equals_what_is_written_today() -> None:
    table = rollout_tables([finished("r0"), finished("r1")])["rollouts"]
    old = to_parquet("rollouts", table.drop_columns(["workspace_ref"]), version=1)
    file, version = open_parquet("rollouts", pa.BufferReader(old), key="data/x")
    assert version == 1
    assert read_parquet("rollouts", file, version, key="data/x").equals(table)


def test_upgrade_of_a_table_without_its_versions_columns_is_refused() -> None:
    table = rollout_tables([finished("r0")])["rollouts"]
    with pytest.raises(ValueError, match="table rollouts: columns"):
        upgrade("rollouts", table, 1)
    with pytest.raises(ValueError, match="no version 7; this Gyre reads 1 to 2"):
        check_table("rollouts", table, 7)
    with pytest.raises(ValueError, match="the store has no table 'rollout'"):
        check_table("rollout", table)


def test_read_of_a_newer_object_names_it_and_what_to_do(version_1: Store) -> None:
    table = pa.table({"a": [1]}).replace_schema_metadata({"gyre.table": "steps", "gyre.schema_version": "9"})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    with pytest.raises(StoreError, match="schema version 9 of steps; this Gyre reads up to 1: use a newer one"):
        open_parquet("steps", sink.getvalue(), key="data/x")
