"""Small problems and harness results for tests."""

from pathlib import Path

from gyre_core.grading.problems import Problem, load_problem
from gyre_core.types import HarnessResult

TASK_TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
tags = ["files"]
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 20.0
[environment]
build_timeout_sec = 600.0
cpus = 1
"""


def write_problem(
    folder: Path,
    *,
    test_sh: str = "echo 1 > /logs/verifier/reward.txt\n",
    task_toml: str = TASK_TOML,
    instruction: str = "Do it.\n",
    files: dict[str, str] | None = None,
    tests: dict[str, str] | None = None,
) -> Path:
    """Write a Harbor task directory; `files` are the workspace's first content, `tests` lie beside test.sh."""
    for name, text in {
        "task.toml": task_toml,
        "instruction.md": instruction,
        "tests/test.sh": test_sh,
        **{f"environment/files/{name}": text for name, text in (files or {}).items()},
        **{f"tests/{name}": text for name, text in (tests or {}).items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def make_problem(folder: Path, **parts) -> Problem:
    return load_problem(write_problem(folder, **parts))


def harness_result(**changes) -> HarnessResult:
    """A harness that ran two seconds and ended with exit code 0, unless changed."""
    values = {
        "exit_code": 0,
        "timed_out": False,
        "duration_s": 2.0,
        "log_tail": "",
        "started_s": 10.0,
        "finished_s": 12.0,
    }
    return HarnessResult(**{**values, **changes})
