"""`gyre train` as a user runs it: real SGLang, Megatron, Prefect, sandboxes; small numbers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.store.verify import verify

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
GYRE = [sys.executable, "-m", "gyre_core.cli"]
SMALL = {
    "train.steps": "2",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "3",
    "rollout.slots": "4",
    "evaluate.samples": "1",
    "prefect.port": "0",
}

pytestmark = pytest.mark.integration


def gyre(*arguments: str, timeout_s: float = 280, **popen: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [*GYRE, *arguments], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment, **popen
    )


def settings(runs_dir: Path, heldout: Path, **overrides: str) -> list[str]:
    values = {**SMALL, "runs_dir": f"'{runs_dir}'", "data.heldout": f"'{heldout}'", **overrides}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def heldout(tmp_path: Path) -> Path:
    """Three held-out problems, so that evaluations take seconds."""
    folder = tmp_path / "heldout"
    for problem in sorted((QUICKSTART / "problems" / "heldout").iterdir())[:3]:
        shutil.copytree(problem, folder / problem.name)
    return folder


@pytest.mark.timeout(600)
def test_train_killed_in_a_step_then_resumed_trains_every_group_once(tmp_path: Path, heldout: Path) -> None:
    runs = tmp_path / "runs"
    command = [*GYRE, "train", str(QUICKSTART / "run.toml"), "--run", "r1", *settings(runs, heldout)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        try:
            wait_for_commit(runs / "r1", "step", 1, first, log.name)
            wait_for_commit(runs / "r1", "group", 3, first, log.name)  # the second step has begun
        finally:
            first.kill()
            first.wait()
    assert wait_until(lambda: not processes_of(runs)), f"left behind: {processes_of(runs)}"

    resumed = gyre("train", str(QUICKSTART / "run.toml"), "--resume", "--run", "r1", "--set", f"runs_dir='{runs}'")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert (summary["run"], summary["steps"], summary["groups_trained"] + summary["groups_dropped"]) == ("r1", 2, 4)
    assert summary["heldout_before"] is not None and summary["heldout_after"] is not None
    assert sum(summary["rollouts"].values()) == 2 * 2 * 3 + 2 * 3
    assert summary["tokens_sampled"] >= summary["tokens_trained"] > 0

    folder = RunFolder(runs / "r1")
    store = Store.open(folder.store_url, read_only=True)
    assert not verify(store).problems
    records = store.read_steps()
    assert [(record.step, record.version_after) for record in records] == [(0, 1), (1, 2)]
    trained = Counter(group for record in records for group in record.groups_trained)
    assert set(trained.values()) == {1}
    assert max(record.stats["sampler_trainer_max_abs"] for record in records) < 1e-4
    for record in records:
        assert record.extra["publish"]["policy_version"] == record.version_after

    shown = gyre("inspect", "r1", "s0000", "--runs-dir", str(runs))
    assert shown.returncode == 1 and "fits 6 rollouts" in shown.stderr
    rollout_id = next(iter(store.commits("group")[0].record["rewards_by_rollout"]))
    shown = gyre("inspect", "r1", rollout_id, "--runs-dir", str(runs))
    assert shown.returncode == 0 and "* main" in shown.stdout

    parity = gyre("bench", "parity", "r1", "--runs-dir", str(runs), "--json")
    assert parity.returncode == 0, parity.stderr
    numbers = json.loads(parity.stdout.splitlines()[-1])
    assert numbers["tokens"] > 0 and 0 < numbers["sampler_trainer_max_abs"] <= 1e-4
    assert numbers["max_rel_grad_err"] <= 1e-4


@pytest.mark.parametrize(
    ("override", "telling"),
    [
        ({"train.stepz": "3"}, "train.stepz: unknown key"),
        ({"model.path": "'/nowhere'"}, "/nowhere holds no config.json"),
        ({"engine.python": "'/nowhere/python'"}, "engine.python is /nowhere/python, which does not exist"),
        ({"store.min_free_bytes": str(2**60)}, "min_free_bytes"),
    ],
)
def test_train_bad_input_is_one_clear_line_and_exit_code_1(
    tmp_path: Path, heldout: Path, override: dict[str, str], telling: str
) -> None:
    done = gyre("train", str(QUICKSTART / "run.toml"), *settings(tmp_path / "runs", heldout, **override))
    assert done.returncode == 1
    assert telling in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_train_problem_without_tests_is_refused_before_anything_starts(tmp_path: Path, heldout: Path) -> None:
    problems = tmp_path / "problems"
    shutil.copytree(next((QUICKSTART / "problems" / "train").iterdir()), problems / "p1")
    (problems / "p1" / "tests" / "test.sh").unlink()
    done = gyre(
        "train",
        str(QUICKSTART / "run.toml"),
        *settings(tmp_path / "runs", heldout, **{"data.train": f"'{problems}'"}),
    )
    assert done.returncode == 1
    assert "tests/test.sh" in done.stderr
    assert not (tmp_path / "runs").exists()


def wait_until(condition: Any, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def wait_for_commit(run: Path, kind: str, count: int, process: subprocess.Popen[bytes], log: str) -> None:
    def there() -> bool:
        assert process.poll() is None, f"the run ended before it could be killed:\n{Path(log).read_text()[-6000:]}"
        if not (run / "store" / "gyre-store.json").exists():
            return False
        return len(Store.open(str(run / "store"), read_only=True).commits(kind)) >= count

    assert wait_until(there, timeout_s=240), f"no {count} commits of kind {kind}"


def processes_of(runs: Path) -> list[str]:
    """Command lines of live processes that name the runs folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(runs) in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found


def test_train_interrupted_by_sigint_leaves_no_process(tmp_path: Path, heldout: Path) -> None:
    runs = tmp_path / "runs"
    overrides = settings(runs, heldout, **{"scheduler.cells": "1"})
    command = [*GYRE, "train", str(QUICKSTART / "run.toml"), "--run", "r1", *overrides]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        assert wait_until((runs / "r1" / "logs" / "cell-0.log").exists, timeout_s=120)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert wait_until(lambda: not processes_of(runs)), f"left behind: {processes_of(runs)}"
