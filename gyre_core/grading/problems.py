"""Harbor task directories in, checked Problems out.

A problem is a folder with `task.toml`, `instruction.md`, `tests/test.sh` and optionally `environment/` and `solution/`.
Its folder's name is its id, unless a manifest (manifest.py) gives it another. What lies in `environment/files/` is the
workspace's first content (ours; Harbor builds `environment/Dockerfile`, which no back end here does). Unknown keys of
task.toml are kept out of the way, not refused. Invariants: an id is one safe path component; nothing that is read or
handed to a verifier lies outside the problem's folder.
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
    solution_dir: Path | None = None  # has solve.sh; never seen by a harness or a verifier
    solution_env: dict[str, str] = field(default_factory=dict)  # [solution.env]
    repeat: int = 1  # how often it comes in one pass over the problems
    notes: tuple[str, ...] = ()  # what the task asks for and Gyre does not do; not an error

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


def load_problem(folder: Path, *, problem_id: str | None = None, repeat: int = 1) -> Problem:
    """Read and check one task directory. Raises ProblemError that names the file and what is wrong with it.

    `problem_id` stands for the folder's name.
    """
    problem_id = check_component(problem_id or folder.name or folder.resolve().name, f"{folder}: the problem id")
    if not folder.is_dir():
        raise ProblemError(f"{folder} is not a folder")
    root = folder.resolve()
    tree = _read_toml(_inside(root, "task.toml"))
    if tree.get("steps"):
        raise ProblemError(
            f"{root / 'task.toml'}: tasks of several [[steps]] are not supported; make one problem of each"
        )
    instruction_path = _inside(root, "instruction.md")
    instruction = _without_canary(_read_text(instruction_path))
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
    solution_dir = None
    if os.path.lexists(root / "solution"):
        solution_dir = _inside(root, "solution", folder=True)
        _refuse_links_out(solution_dir)
        if not os.path.lexists(solution_dir / "solve.sh"):  # an answer for people
            solution_dir = None
    verifier, agent, solution, environment = (
        _table(tree, name, root) for name in ("verifier", "agent", "solution", "environment")
    )
    return Problem(
        problem_id=problem_id,
        instruction=instruction,
        dir=root,
        tests_dir=tests_dir,
        environment_dir=environment_dir,
        verifier_timeout_s=_timeout(verifier, "verifier", root),
        agent_timeout_s=_timeout(agent, "agent", root),
        verifier_env=_env(verifier, "verifier", root),
        metadata=_table(tree, "metadata", root),
        solution_dir=solution_dir,
        solution_env=_env(solution, "solution", root),
        repeat=repeat,
        notes=_notes(environment, verifier, environment_dir),
    )


def scan_problems(folder: Path) -> tuple[list[Problem], list[str]]:
    """Every task directory of a folder, sorted by id, and why the others are not usable.

    Plain files and folders whose name starts with a dot are no problems and are passed over. Raises ProblemError when
    there is no such folder.
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
    return problems, reasons


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


def _env(table: Json, name: str, root: Path) -> dict[str, str]:
    where = f"{root / 'task.toml'}: {name}.env"
    env = table.get("env", {})
    if not isinstance(env, dict):
        raise ProblemError(f"{where} must be a table")
    for key, value in env.items():
        if not _ENV_NAME.fullmatch(key) or not isinstance(value, str) or "\0" in value:
            raise ProblemError(f"{where}.{key} must be a string under the name of a variable")
        if "${" in value:
            raise ProblemError(
                f"{where}.{key} refers to the host's environment ({value}); a sandbox does not see it: write the value"
            )
    return dict(env)


def _without_canary(text: str) -> str:
    """Leading comment lines that hold a canary are for crawlers of training data, not for agents."""
    lines = text.splitlines(keepends=True)
    first = 0
    while first < len(lines) and lines[first].startswith(("#", "<!--")) and "canary" in lines[first].lower():
        first += 1
    return "".join(lines[first:]) if first else text


def _notes(environment: Json, verifier: Json, environment_dir: Path | None) -> tuple[str, ...]:
    notes = []
    if environment_dir is not None and (environment_dir / "Dockerfile").is_file():
        lines = (environment_dir / "Dockerfile").read_text(encoding="utf-8", errors="replace").splitlines()
        words = {line.split(None, 1)[0].upper() for line in lines if line.strip()}
        if "RUN" in words:
            notes.append("environment/Dockerfile has RUN steps: they are not run")
        if words & {"COPY", "ADD"} and not (environment_dir / "files").is_dir():
            notes.append("environment/Dockerfile copies files: put them into environment/files")
    if environment_dir is not None and any(environment_dir.glob("docker-compose.y*ml")):
        notes.append("environment/docker-compose.yaml: services beside the agent's are not started")
    if environment.get("docker_image"):
        notes.append(f"environment.docker_image ({environment['docker_image']}) is not used")
    workdir = environment.get("workdir")
    if workdir not in (None, "/app"):
        notes.append(f"environment.workdir is {workdir}, the workspace is /app")
    if verifier.get("environment_mode") == "separate":
        notes.append("verifier.environment_mode is separate; tests run in a sandbox of their own on the same workspace")
    for name in ("mcp_servers", "healthcheck", "gpus"):
        if environment.get(name):
            notes.append(f"environment.{name} is not supported and left out")
    return tuple(notes)
