"""Harbor task directories in, checked Problems out.

A problem is a folder with `task.toml`, `instruction.md`, `tests/test.sh` and optionally `environment/`. Its folder's
name is its id. What lies in `environment/files/` is the workspace's first content (ours; Harbor builds
`environment/Dockerfile`, which the local sandbox does not read). Unknown keys of task.toml are kept out of the way,
not refused. Invariants: an id is one safe path component; nothing that is read or handed to a verifier lies outside
the problem's folder.
"""

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core.errors import ProblemError
from gyre_core.types import Json

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What an agent is asked to solve.

    Example: load_problem(Path("examples/quickstart/problems/train/count-lines-01"))
    """

    problem_id: str
    instruction: str
    dir: Path
    tests_dir: Path  # has test.sh; never seen by a harness
    environment_dir: Path | None
    verifier_timeout_s: float | None = None  # [verifier] timeout_sec
    agent_timeout_s: float | None = None  # [agent] timeout_sec
    verifier_env: dict[str, str] = field(default_factory=dict)  # [verifier.env]
    metadata: Json = field(default_factory=dict)  # [metadata], anything

    @property
    def files_dir(self) -> Path | None:
        """First content of the workspace, None when it starts empty."""
        if self.environment_dir is None:
            return None
        files = self.environment_dir / "files"
        return files if files.is_dir() else None


def check_component(name: str, what: str) -> str:
    """`name` if it is safe as one component of a path; raises ProblemError, which is a ValueError."""
    if not _COMPONENT.fullmatch(name):
        raise ProblemError(
            f"{what} {name!r} is not usable as a name: at most 128 letters, digits, '.', '_' and '-', "
            "with a letter or a digit first"
        )
    return name


def load_problem(folder: Path) -> Problem:
    """Read and check one task directory. Raises ProblemError that names the file and what is wrong with it."""
    problem_id = check_component(folder.name or folder.resolve().name, f"{folder}: the problem id")
    if not folder.is_dir():
        raise ProblemError(f"{folder} is not a folder")
    root = folder.resolve()
    tree = _read_toml(_inside(root, "task.toml"))
    if tree.get("steps"):
        raise ProblemError(
            f"{root / 'task.toml'}: tasks of several [[steps]] are not supported; make one problem of each"
        )
    instruction_path = _inside(root, "instruction.md")
    instruction = _read_text(instruction_path)
    if not instruction.strip() or "\0" in instruction:
        raise ProblemError(f"{instruction_path} must hold text")
    tests_dir = _inside(root, "tests", folder=True)
    _inside(root, "tests/test.sh")
    _refuse_links_out(tests_dir)
    environment_dir = None
    if os.path.lexists(root / "environment"):
        environment_dir = _inside(root, "environment", folder=True)
        if os.path.lexists(environment_dir / "files"):
            _inside(root, "environment/files", folder=True)
    verifier, agent = (_table(tree, name, root) for name in ("verifier", "agent"))
    return Problem(
        problem_id=problem_id,
        instruction=instruction,
        dir=root,
        tests_dir=tests_dir,
        environment_dir=environment_dir,
        verifier_timeout_s=_timeout(verifier, "verifier", root),
        agent_timeout_s=_timeout(agent, "agent", root),
        verifier_env=_verifier_env(verifier, root),
        metadata=_table(tree, "metadata", root),
    )


def load_problems(folder: Path) -> tuple[Problem, ...]:
    """Every task directory of a folder, sorted by id. Raises ProblemError that lists each one that is not usable.

    Plain files and folders whose name starts with a dot are no problems and are passed over.
    """
    if not folder.is_dir():
        raise ProblemError(f"there is no folder of problems at {folder}")
    root = folder.resolve()
    problems, reasons = [], []
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            if not path.resolve().is_relative_to(root):
                raise ProblemError(f"{path} is a symlink out of {root}")
            problems.append(load_problem(path))
        except ProblemError as error:
            reasons.append(str(error))
    if reasons:
        raise ProblemError(f"{len(reasons)} problem(s) of {folder} are not usable:\n  " + "\n  ".join(reasons))
    if not problems:
        raise ProblemError(f"{folder} holds no problem (a folder with task.toml, instruction.md and tests/test.sh)")
    return tuple(problems)


def _inside(root: Path, name: str, *, folder: bool = False) -> Path:
    path = root / name
    if not os.path.lexists(path):
        raise ProblemError(f"{root} lacks {name}")
    if not path.resolve().is_relative_to(root):
        raise ProblemError(f"{path} is a symlink out of the problem's folder")
    if not (path.is_dir() if folder else path.is_file()):
        raise ProblemError(f"{path} must be a {'folder' if folder else 'file'}")
    return path


def _refuse_links_out(tests_dir: Path) -> None:
    for folder, folder_names, file_names in os.walk(tests_dir):
        for name in (*folder_names, *file_names):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(tests_dir.resolve()):
                raise ProblemError(f"{path} is a symlink out of the problem's tests")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"cannot read {path}: {error}") from error


def _read_toml(path: Path) -> Json:
    try:
        return tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ProblemError(f"{path} is not valid TOML: {error}") from error


def _table(tree: Json, name: str, root: Path) -> Json:
    value = tree.get(name, {})
    if not isinstance(value, dict):
        raise ProblemError(f"{root / 'task.toml'}: {name} must be a table")
    return value


def _timeout(table: Json, name: str, root: Path) -> float | None:
    value: Any = table.get("timeout_sec")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ProblemError(
            f"{root / 'task.toml'}: {name}.timeout_sec must be a positive number of seconds, not {value!r}"
        )
    return float(value)


def _verifier_env(verifier: Json, root: Path) -> dict[str, str]:
    where = f"{root / 'task.toml'}: verifier.env"
    env = verifier.get("env", {})
    if not isinstance(env, dict):
        raise ProblemError(f"{where} must be a table")
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise ProblemError(f"{where}.{name} must be a string under the name of a variable")
        if "${" in value:
            raise ProblemError(
                f"{where}.{name} refers to the host's environment ({value}); a sandbox does not see it: write the value"
            )
    return dict(env)
