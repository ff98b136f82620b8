"""Run folders: created once, owned by one process, opened with what they were started with."""

import subprocess
import sys
from pathlib import Path

import pytest

from gyre_core.config import RunConfig, parse_run_config
from gyre_core.errors import ConfigError, GyreError
from gyre_core.run_folder import RunFolder, list_runs


def make_config(folder: Path, name: str = "t", **train: object) -> RunConfig:
    tree = {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "model": {"path": "policy"},
        "data": {"train": "problems"},
        "rollout": {"harness": {"command": ["{python}"]}},
        "train": dict(train),
    }
    return parse_run_config(tree, base_dir=folder)


def test_folder_config_comes_back_as_it_was(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=7, learning_rate=0.5)
    RunFolder.create(config, "r1")
    assert RunFolder.open(config.runs_dir, "r1").config() == config


def test_folder_name_taken_says_how_to_go_on(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    RunFolder.create(config, "r1")
    with pytest.raises(ConfigError, match=r"run 'r1' exists .*--resume --run r1"):
        RunFolder.create(config, "r1")


@pytest.mark.parametrize("run_id", ["../x", "A", "", "a/b", "x" * 97])
def test_folder_bad_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="use lower-case letters"):
        RunFolder.create(make_config(tmp_path), run_id)


def test_folder_unknown_run_lists_those_there(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    RunFolder.create(config, "r1")
    with pytest.raises(ConfigError, match=r"no run 'r2' .*runs there: r1"):
        RunFolder.open(config.runs_dir, "r2")


def test_list_runs_is_by_age_and_name(tmp_path: Path) -> None:
    for run_id, name in (("b", "t"), ("a", "other"), ("c", "t")):
        RunFolder.create(make_config(tmp_path, name), run_id)
    assert list_runs(tmp_path / "runs") == ["b", "a", "c"]
    assert list_runs(tmp_path / "runs", "t") == ["b", "c"]


def test_owned_second_process_is_refused_and_told_who(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = RunFolder.create(config, "r1")
    program = (
        "import sys; from pathlib import Path; from gyre_core.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).owned(): print('owned', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "owned\n"
    with pytest.raises(GyreError, match=f"run by another process \\(pid {other.pid}\\)"), folder.owned():
        pass
    other.kill()
    other.communicate()
    with folder.owned():  # the kernel dropped the dead owner's lock
        pass
