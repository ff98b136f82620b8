"""`gyre store` as a user runs it, in this process."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_core.cli.main import app
from gyre_core.store.store import Store
from gyre_core.store.tables import rollout_tables
from tests.support.rollouts import finished


@pytest.fixture
def place(tmp_path: Path) -> str:
    store = Store.open(str(tmp_path / "store"))
    for number in range(2):
        ref = store.put_blob(f"archive {number}".encode(), kind="workspace")
        rollouts = [finished(f"r{number}", workspace_ref=ref)]
        store.commit_rollouts("group", rollouts, [], {}, f"g{number}")
    return str(tmp_path / "store")


def gyre(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["store", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_ls_shows_commits_and_totals(place: str) -> None:
    text = gyre("ls", place)
    assert "g0" in text and "group" in text and "(blobs)" in text
    result = json.loads(gyre("ls", place, "--json"))
    assert [commit["token"] for commit in result["commits"]] == ["g0", "g1"]
    assert result["commits"][0]["rows"]["nodes"] == 5 and result["commits"][0]["blobs"] == 1
    assert result["tables"]["nodes"]["rows"] == 10 and result["tables"]["nodes"]["objects"] == 2
    assert result["blobs"] == {"objects": 2, "bytes": 18}
    files = gyre("ls", place, "--files", "nodes").split()
    assert len(files) == 2 and all(Path(file).is_file() for file in files)


def test_verify_broken_objects_are_listed_and_the_exit_code_is_1(place: str) -> None:
    assert gyre("verify", place).startswith("ok: 2 commits")
    result = json.loads(gyre("verify", place, "--json"))
    assert (result["ok"], result["blobs"], result["rollouts"]) == (True, 2, 2)
    broken = Path(gyre("ls", place, "--files", "grades").split()[0])
    broken.write_bytes(broken.read_bytes()[:-5])
    blob = next((Path(place) / "blobs").iterdir())
    blob.unlink()
    text = gyre("verify", place, code=1)
    assert f"data/grades/{broken.name} is truncated" in text and f"blobs/{blob.name} is missing" in text
    assert len(json.loads(gyre("verify", place, "--json", code=1))["problems"]) == 2


def test_verify_names_foreign_objects_and_leftovers_without_failing(place: str) -> None:
    (Path(place) / "data" / "nodes" / "notes.txt").write_text("mine")
    Store.open(place).put_table("grades", rollout_tables([finished("r9")])["grades"])
    text = gyre("verify", place)
    assert "foreign, ignored: data/nodes/notes.txt" in text and "1 objects that no commit needs" in text


def test_gc_changes_nothing_without_apply(place: str) -> None:
    key = Store.open(place).put_table("grades", rollout_tables([finished("r9")])["grades"]).key
    assert "0 objects" in gyre("gc", place) and "1 more are younger" in gyre("gc", place)
    assert key in gyre("gc", place, "--grace-h", "0")
    assert (Path(place) / key).exists()
    assert json.loads(gyre("gc", place, "--grace-h", "0", "--apply", "--json"))["keys"] == [key]
    assert not (Path(place) / key).exists()
    assert "ok" in gyre("verify", place)


def test_compact_then_gc_leaves_one_object_a_table(place: str) -> None:
    assert "would join (--apply does) 8 objects" in gyre("compact", place)
    result = json.loads(gyre("compact", place, "--apply", "--json"))
    assert (result["before"], result["after"]) == (8, 4)  # both commits name the same, empty table of selections
    gyre("gc", place, "--grace-h", "0", "--apply")
    assert len(gyre("ls", place, "--files", "nodes").split()) == 1
    assert gyre("verify", place).startswith("ok: 4 commits")


def test_export_writes_and_says_what(place: str, tmp_path: Path) -> None:
    text = gyre("export", place, str(tmp_path / "out"), "--format", "jsonl")
    assert "nodes" in text and (tmp_path / "out" / "nodes.jsonl").exists()
    result = json.loads(gyre("export", place, str(tmp_path / "hf"), "--json"))
    assert result["rows"]["calls"] == 6 and "README.md" in result["files"]


def test_unknown_runs_and_tables_are_named(place: str, tmp_path: Path) -> None:
    for arguments in (("ls", "no-such-run", "--runs-dir", str(tmp_path)), ("ls", place, "--files", "node")):
        done = CliRunner().invoke(app, ["store", *arguments])
        assert done.exit_code == 1 and done.exception is not None
