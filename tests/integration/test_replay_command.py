"""`gyre replay` as a user runs it, on a small real run: SGLang, Megatron, Prefect, sandboxes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.store.verify import verify

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
PROBLEMS = ("t52-delegate-append", "t00-copy", "t05-rename")
SMALL = {
    "train.steps": "2",
    "train.keep_checkpoints": "1",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "3",
    "rollout.slots": "4",
    "rollout.harness.env.QUICKSTART_COMPACT_TOKENS": "'1'",  # a summary after every tool call: several branches each
    "evaluate.samples": "1",
    "prefect.port": "0",
    "grading.keep_workspaces": "'graded'",
}

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

pytestmark = pytest.mark.integration


def gyre(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gyre_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=ENVIRONMENT)


def replay(run: RunFolder, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    done = gyre("replay", run.run_id, "--runs-dir", str(run.path.parent), *arguments, "--json")
    assert done.returncode == exit_code, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of the test's own, and the folder of runs."""
    folder = tmp_path_factory.mktemp("replay")
    for problem in PROBLEMS:
        shutil.copytree(QUICKSTART / "problems" / "train" / problem, folder / "problems" / problem)
    heldout = sorted((QUICKSTART / "problems" / "heldout").iterdir())[0]
    shutil.copytree(heldout, folder / "heldout" / heldout.name)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[None]:
    """`gyre ui` on the folder of runs, so that not every command starts a server."""
    command = [sys.executable, "-m", "gyre_core.cli", "ui", "--runs-dir", str(folder / "runs"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None and "Prefect UI" in process.stdout.readline()
            yield
        finally:
            process.terminate()  # not SIGINT: it may be ignored where the tests run
            process.wait(30)


@pytest.fixture(scope="module")
def run(folder: Path, server: None) -> RunFolder:
    """Two steps, their workspaces kept; the first step's checkpoint is gone."""
    values = {
        **SMALL,
        "runs_dir": f"'{folder / 'runs'}'",
        "data.train": f"'{folder / 'problems'}'",
        "data.heldout": f"'{folder / 'heldout'}'",
    }
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    done = gyre("train", str(QUICKSTART / "run.toml"), "--run", "r1", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return RunFolder(folder / "runs" / "r1")


@pytest.fixture(scope="module")
def contents(run: RunFolder) -> dict[str, int]:
    return stored(run)


def stored(run: RunFolder) -> dict[str, int]:
    """The store's objects and their sizes."""
    root = Path(run.store_url)
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


@pytest.mark.timeout(400)
def test_retrain_gives_the_stored_parameters_bit_for_bit(run: RunFolder, contents: dict[str, int]) -> None:
    store = Store.open(run.store_url, read_only=True)
    found = verify(store)
    assert not found.problems
    last = store.read_steps()[-1]
    assert last.extra["workspaces"] == {"kept": 6, "dropped": {}}

    result = replay(run, "--step", "2", "--retrain")
    assert result["ok"] and result["equal"] and result["max_abs_difference"] == 0.0
    assert result["digest_again"] == result["digest_stored"] == last.extra["replay"]["weights_after"]
    assert [step["step"] for step in result["steps"]] == [1, 2], (
        "the first step's checkpoint is gone: trained again too"
    )
    assert all(step["equal"] and step["micro_steps"] > 0 for step in result["steps"])
    assert result["checkpoint"]["different_weights"] == [] and result["checkpoint"]["different_moments"] == []
    assert result["back_end_changes"] == {}
    assert stored(run) == contents


def test_regrade_with_a_changed_verifier_changes_rewards_and_nothing_else(
    run: RunFolder, folder: Path, contents: dict[str, int]
) -> None:
    """One problem's verifier is changed; the other one's rewards show that kept workspaces grade as they did."""
    record = Store.open(run.store_url, read_only=True).read_steps()[0]
    group = record.groups_trained[0]
    changed = folder / "changed"
    shutil.copytree(folder / "problems", changed)
    script = changed / group.partition("-")[2] / "tests" / "test.sh"
    script.write_text(script.read_text() + "\necho 0.125 > /logs/verifier/reward.txt\n")
    result = replay(run, "--step", "1", "--regrade", "--problems", str(changed))
    assert result["graded_again"] == 6
    for rollout_id, row in result["rewards"].items():
        assert row["reward_after"] == (0.125 if rollout_id.startswith(group) else row["reward_before"])
        assert row["outcome_after"] == row["outcome_before"]
    assert result["rewards_changed"] == 3
    assert result["branches_changed"] == 0
    assert result["tokens_after"] == result["tokens_before"] and result["targets_after"] == result["targets_before"]
    assert stored(run) == contents


def test_reselect_fewer_branches_reports_fewer_tokens_and_the_plain_replay_agrees(
    run: RunFolder, contents: dict[str, int]
) -> None:
    result = replay(run, "--step", "1", "--reselect", "J=1")
    before, after = result["before"], result["after"]
    assert after["branches"] == after["rollouts"] < before["branches"]
    assert after["targets"] < before["targets"] and after["tokens_in_branches"] < before["tokens_in_branches"]
    assert after["train_s"] <= before["train_s"]
    assert sum(after["weights_by_role"].values()) == pytest.approx(sum(before["weights_by_role"].values()), abs=1e-3)
    checked = replay(run, "--step", "1")
    assert checked["ok"] and checked["differences"] == []
    assert checked["branches"] == before["branches"]
    assert stored(run) == contents


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["--step", "7"], "there is no step 7: the run has steps 1 to 2"),
        (["--step", "1", "--retrain", "--regrade"], "give one of"),
        (["--step", "1", "J=1"], "need --reselect"),
        (["--step", "1", "--reselect", "J=none"], "max_branches"),
    ],
)
def test_replay_bad_input_is_one_clear_line_and_exit_code_1(run: RunFolder, arguments: list[str], telling: str) -> None:
    done = gyre("replay", "r1", "--runs-dir", str(run.path.parent), *arguments)
    assert done.returncode == 1
    assert telling in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
