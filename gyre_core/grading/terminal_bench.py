"""Converts tasks of terminal-bench's first layout into Harbor task directories.

Enters: a folder with `task.yaml` (instruction, times, metadata), `run-tests.sh`, `tests/`, `solution.sh`, a Dockerfile
and what that copies. Leaves: `task.toml`, `instruction.md`, `environment/`, `tests/` with a `test.sh` that turns the
exit code of run-tests.sh into a reward, and `solution/`; and notes on what the local sandbox will not do. What the
Dockerfile copies below the working directory becomes the workspace's first content, `environment/files/`. Invariant:
the source is not changed, nothing outside it is read, and nothing that exists is overwritten.
"""

import json
import os
import posixpath
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gyre_core.errors import ProblemError
from gyre_core.grading.problems import check_component, load_problem
from gyre_core.types import Json

AGENT_TIMEOUT_S, TEST_TIMEOUT_S = 360.0, 60.0  # what the layout means when it names none
_WORKSPACE = "/app"
_OWN_FILES = ("task.yaml", "run-tests.sh", "tests", "solution.sh", "solution.yaml")
_CONFIGURES = ("instruction", "max_agent_timeout_sec", "max_test_timeout_sec", "parser_name", "run_tests_in_same_shell")

_TEST_SH = """#!/bin/bash
# Converted from terminal-bench: all tests passed is 1, anything else 0. Tests that could not be run at all (their
# program is missing or was killed) leave no reward, so that the rollout is not counted as a failure of the agent.
export TEST_DIR="${TEST_DIR:-/tests}"
%s
code=$?
[ "$code" -ge 126 ] && exit "$code"
mkdir -p /logs/verifier
if [ "$code" -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """One converted task. Example: Converted(problem_id="hello-world", folder=Path("problems/hello-world"))"""

    problem_id: str
    folder: Path
    notes: tuple[str, ...] = ()  # what a person should look at


def convert_tasks(source: Path, destination: Path) -> tuple[list[Converted], list[str]]:
    """Convert a task, or every task below a folder; returns those converted and why the others were not.

    Raises ProblemError when there is no task at all.
    """
    if (source / "task.yaml").is_file():
        folders = [source]
    else:
        folders = sorted(path.parent for path in source.glob("*/task.yaml"))
    if not folders:
        raise ProblemError(f"there is no task.yaml in {source} or in a folder of it")
    converted, reasons = [], []
    for folder in folders:
        try:
            converted.append(convert_task(folder, destination))
        except (ProblemError, OSError, shutil.Error) as error:
            reasons.append(f"{folder.name or folder.resolve().name}: {error}")
    return converted, reasons


def convert_task(source: Path, destination: Path) -> Converted:
    """Write `destination`/<name of the source>. Raises ProblemError, and leaves nothing, when it cannot be done."""
    source = source.resolve()
    problem_id = check_component(source.name, f"{source}: the problem id")
    _refuse_links_out(source)
    tree = _read_yaml(source / "task.yaml")
    folder = destination / problem_id
    if os.path.lexists(folder):
        raise ProblemError(f"{folder} exists; remove it, or convert to another folder")
    partial = destination / f".{problem_id}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        notes = _write(tree, source, partial)
        load_problem(partial, problem_id=problem_id)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(problem_id=problem_id, folder=folder, notes=tuple(notes))


def _write(tree: Json, source: Path, folder: Path) -> list[str]:
    instruction = tree.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise ProblemError(f"{source / 'task.yaml'} has no instruction")
    environment = folder / "environment"
    environment.mkdir(parents=True)
    (folder / "instruction.md").write_text(instruction.strip() + "\n", encoding="utf-8")
    (folder / "task.toml").write_text(_task_toml(tree, source), encoding="utf-8")
    for path in sorted(source.iterdir()):
        if path.name not in _OWN_FILES and not path.name.startswith("."):
            _copy(path, environment / path.name)
    notes = _write_tests(tree, source, folder / "tests") + _write_solution(source, folder / "solution")
    if (source / "Dockerfile").is_file():
        notes += _write_files(source, environment / "files")
    if (source / "docker-compose.yaml").is_file():
        services = _read_yaml(source / "docker-compose.yaml").get("services")
        if isinstance(services, dict) and len(services) > 1:
            notes.append(
                f"docker-compose.yaml has {len(services)} services; only the agent's own is there in a sandbox"
            )
    return notes


def _task_toml(tree: Json, source: Path) -> str:
    lines = ['version = "1.0"', "", "[metadata]", 'converted_from = "terminal-bench"']
    for name, value in tree.items():
        text = _toml_value(value)
        if name not in _CONFIGURES and text is not None and re.fullmatch(r"[A-Za-z0-9_-]+", name):
            lines.append(f"{name} = {text}")
    for table, name, default in (
        ("verifier", "max_test_timeout_sec", TEST_TIMEOUT_S),
        ("agent", "max_agent_timeout_sec", AGENT_TIMEOUT_S),
    ):
        seconds = tree.get(name, default)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ProblemError(f"{source / 'task.yaml'}: {name} must be a positive number, not {seconds!r}")
        lines += ["", f"[{table}]", f"timeout_sec = {float(seconds)}"]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str | None:
    """Text of a scalar or a list of them, None for what TOML or a person's metadata does not need."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if abs(value) < 2**63 else None
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        parts = [_toml_value(part) for part in value]
        return None if None in parts else f"[{', '.join(part for part in parts if part is not None)}]"
    return None


def _write_tests(tree: Json, source: Path, tests: Path) -> list[str]:
    notes = []
    if (source / "tests").is_dir():
        _copy(source / "tests", tests)
    else:
        tests.mkdir()
    if (tests / "test.sh").exists():
        raise ProblemError(f"{source / 'tests/test.sh'} stands where the converted test.sh belongs; rename it")
    if (source / "run-tests.sh").is_file():
        _copy(source / "run-tests.sh", tests / "run-tests.sh")
        command = 'bash "$TEST_DIR/run-tests.sh"'
        if re.search(
            r"\b(apt-get|apt|curl|wget|pip|uv|uvx|npm)\b", (tests / "run-tests.sh").read_text(errors="replace")
        ):
            notes.append("run-tests.sh installs or fetches programs; what it needs must be there already in a sandbox")
    elif (tests / "test_outputs.py").is_file():
        command = 'python3 -m pytest "$TEST_DIR/test_outputs.py" -rA'
        notes.append("there is no run-tests.sh: tests/test_outputs.py runs with python3 -m pytest, which must be there")
    else:
        raise ProblemError(f"{source} has neither run-tests.sh nor tests/test_outputs.py")
    if tree.get("run_tests_in_same_shell"):
        notes.append("run_tests_in_same_shell: tests cannot see the agent's shell, only what it left in the workspace")
    (tests / "test.sh").write_text(_TEST_SH % command)
    return notes


def _write_solution(source: Path, solution: Path) -> list[str]:
    if (source / "solution.sh").is_file():
        solution.mkdir()
        _copy(source / "solution.sh", solution / "solve.sh")
        return []
    if (source / "solution.yaml").is_file():
        return ["solution.yaml (typed keys) is not converted; there is no reference solution"]
    return ["there is no reference solution"]


def _write_files(source: Path, files: Path) -> list[str]:
    """What simple COPY and ADD instructions put below /app, as the Dockerfile would."""
    workdir, base, notes, num_run = "/", "", [], 0
    for line in _dockerfile_lines(source / "Dockerfile"):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word == "FROM":
            base, workdir = rest, "/"
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip('"')))
        elif word == "RUN":
            num_run += 1
        elif word in ("COPY", "ADD"):
            notes += _copy_instruction(line, rest, workdir, source, files)
    if base:
        notes.append(f"the image {base} is not used by the local sandbox: its programs must be on this machine")
    if num_run:
        notes.append(f"{num_run} RUN step(s) of the Dockerfile are not run")
    if workdir not in ("/", _WORKSPACE):
        notes.append(f"the working directory was {workdir}, here it is {_WORKSPACE}")
    return notes


def _copy_instruction(line: str, rest: str, workdir: str, source: Path, files: Path) -> list[str]:
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        words = []
    if len(words) < 2 or any(not isinstance(word, str) or word.startswith("--from") or "$" in word for word in words):
        return [f"not carried out: {line}"]
    *names, target = [word for word in words if not word.startswith("--")]
    dest = posixpath.normpath(posixpath.join(workdir, target))
    if not PurePosixPath(dest).is_relative_to(_WORKSPACE):
        return [f"not carried out (outside {_WORKSPACE}): {line}"]
    below = files / PurePosixPath(dest).relative_to(_WORKSPACE)
    into_folder = target.endswith(("/", ".")) or len(names) > 1
    for name in names:
        relative = posixpath.normpath(posixpath.join("/", name)).lstrip("/")  # as Docker: never above the context
        found = sorted(source.glob(relative)) if relative and re.search(r"[*?\[]", relative) else [source / relative]
        for path in found:
            if not path.exists():
                return [f"not carried out ({name} is missing): {line}"]
            if path.is_dir():
                below.mkdir(parents=True, exist_ok=True)
                for part in sorted(path.iterdir()):
                    if path != source or (part.name not in _OWN_FILES and part.name != "Dockerfile"):
                        _copy(part, below / part.name)
            else:
                _copy(path, below / path.name if into_folder or len(found) > 1 or below.is_dir() else below)
    return []


def _dockerfile_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines()]


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(path, target, follow_symlinks=False)


def _refuse_links_out(source: Path) -> None:
    for folder, folder_names, file_names in os.walk(source):
        for name in (*folder_names, *file_names):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(source):
                raise ProblemError(f"{path} is a symlink out of the task")


def _read_yaml(path: Path) -> Json:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ProblemError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ProblemError(f"{path} must be a mapping")
    return {str(name): value for name, value in tree.items()}
