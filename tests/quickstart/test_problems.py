"""The quickstart's problems: complete, solvable, not solved by doing nothing, held-out ones unseen, reproducible."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
PROBLEMS = QUICKSTART / "problems"
ALL = sorted(path for split in ("train", "heldout") for path in (PROBLEMS / split).iterdir())
# The instruction language itself; every other lower-case word names something.
GRAMMAR = frozenset(
    re.findall(
        r"[a-z-]+",
        "a append code copy count delete do find folder for in into key last let line lines log make move name of port "
        "read rename replace save sort sub-agent the this to txt with write",
    )
)


def grade(problem: Path, workspace: Path, scratch: Path) -> float:
    env = {"PATH": os.environ["PATH"], "APP_DIR": str(workspace), "REWARD_DIR": str(scratch / "verifier")}
    subprocess.run(["sh", str(problem / "tests" / "test.sh")], env=env, check=True, capture_output=True)
    return float((scratch / "verifier" / "reward.txt").read_text())


def initial(problem: Path, workspace: Path) -> Path:
    files = problem / "environment" / "files"
    if files.exists():
        shutil.copytree(files, workspace)
    else:
        workspace.mkdir()
    return workspace


def test_problems_counts_reach_the_promised_sizes():
    assert len(list((PROBLEMS / "train").iterdir())) == 64
    assert len(list((PROBLEMS / "heldout").iterdir())) == 32


@pytest.mark.parametrize("problem", ALL, ids=lambda path: path.name)
def test_problem_oracle_gets_one_and_idle_workspaces_get_zero(problem: Path, tmp_path: Path):
    task = tomllib.loads((problem / "task.toml").read_text())
    assert task["version"] and task["metadata"]["family"] and task["metadata"]["difficulty"]
    assert task["verifier"]["timeout_sec"] > 0 and task["agent"]["timeout_sec"] > 0
    assert (problem / "environment" / "Dockerfile").read_text().startswith("FROM ")

    solved = initial(problem, tmp_path / "solved")
    env = {"PATH": os.environ["PATH"], "APP_DIR": str(solved)}
    subprocess.run(["sh", str(problem / "solution" / "solve.sh")], env=env, check=True, capture_output=True)
    assert grade(problem, solved, tmp_path) == 1.0

    untouched = initial(problem, tmp_path / "untouched")
    assert grade(problem, untouched, tmp_path) == 0.0
    empty = tmp_path / "empty"
    empty.mkdir()
    assert grade(problem, empty, tmp_path) == 0.0


def test_heldout_instructions_share_no_name_with_training_ones():
    def names(split: str) -> set[str]:
        texts = [path.read_text() for path in (PROBLEMS / split).glob("*/instruction.md")]
        return {word for text in texts for word in re.findall(r"[a-z-]+", text.lower())} - GRAMMAR

    assert names("train") and names("heldout")
    assert names("train").isdisjoint(names("heldout"))


def test_make_problems_reproduces_the_committed_files(tmp_path: Path):
    subprocess.run([sys.executable, str(QUICKSTART / "make_problems.py"), str(tmp_path)], check=True)

    def contents(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert contents(tmp_path) == contents(PROBLEMS)
