"""Where a run's problems are: a folder of task directories, or a manifest that lists them.

Enters: a path, `FOLDER`, `FILE.toml` or `FILE.json`, the latter two with `#SPLIT` behind it to take one split. Leaves:
Problems with unique ids. A manifest is a table with `tasks`, each a path or a table of `path` and optionally `id`,
`split` and `repeat`:

    [[tasks]]
    path = "tasks/count-lines"   # below the manifest's folder
    id = "count-1"               # default: the folder's name ("name" is read too)
    split = "train"              # default: in every split
    repeat = 2                   # times in one pass over the problems

The shape of Harbor's registries is read too; a task that lies in a git repository has to be fetched first. Invariant:
nothing outside the manifest's folder is read, whatever a path or a symlink says.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from gyre_core.errors import ProblemError
from gyre_core.grading.problems import Problem, load_problem, scan_problems
from gyre_core.types import Json

MAX_REPEAT = 1000
_SUFFIXES = (".toml", ".json")


def load_problems(source: Path) -> tuple[Problem, ...]:
    """The problems of a folder (by id) or of a manifest (in its order).

    Raises ProblemError that lists each one that is not usable.
    """
    problems, reasons = scan_source(source)
    if reasons:
        raise ProblemError(f"{len(reasons)} problem(s) of {source} are not usable:\n  " + "\n  ".join(reasons))
    if not problems:
        raise ProblemError(f"{source} holds no problem (a folder with task.toml, instruction.md and tests/test.sh)")
    return tuple(problems)


def scan_source(source: Path) -> tuple[list[Problem], list[str]]:
    """Usable problems, and why the others are not. Raises ProblemError when there is nothing to read at all."""
    file, split = split_of(source)
    if file.suffix not in _SUFFIXES:
        return scan_problems(source)
    root = file.resolve().parent
    problems: dict[str, Problem] = {}
    reasons: list[str] = []
    splits: set[str] = set()
    for index, entry in enumerate(_entries(file)):
        where = f"{file}, task {index + 1}"
        try:
            values = _checked_entry(entry, where)
            splits |= {values["split"]} - {None}
            if split is not None and values["split"] not in (None, split):
                continue
            problem = _load(root, values, where)
            if problem.problem_id in problems:
                raise ProblemError(f"{where}: the id {problem.problem_id!r} comes twice; give one an id of its own")
            problems[problem.problem_id] = problem
        except ProblemError as error:
            reasons.append(str(error))
    if split is not None and split not in splits:
        raise ProblemError(f"{file} has no split {split!r}; its splits are {', '.join(sorted(splits)) or 'none'}")
    return list(problems.values()), reasons


def split_of(source: Path) -> tuple[Path, str | None]:
    """The file or folder of a source and the split that is meant, None for all."""
    name, separator, split = source.name.rpartition("#")
    if separator and Path(name).suffix in _SUFFIXES and not source.exists():
        return source.with_name(name), split
    return source, None


def folders_of(source: Path) -> tuple[Path, ...]:
    """Folders that hold all of a source's problems, of every split, and as little else as their paths allow."""
    file, _ = split_of(source)
    if file.suffix not in _SUFFIXES:
        return (source,)
    root = file.resolve().parent
    paths = [entry.get("path") if isinstance(entry, dict) else entry for entry in _entries(file)]
    tops = {Path(path).parts[0] for path in paths if isinstance(path, str) and Path(path).parts}
    return tuple(root / top for top in sorted(tops))


def _entries(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ProblemError(f"cannot read the manifest {file}: {error}") from error
    tasks = tree.get("tasks") if isinstance(tree, dict) else tree
    if not isinstance(tasks, list):
        raise ProblemError(f"{file} must list its problems under `tasks`")
    return tasks


def _checked_entry(entry: Any, where: str) -> Json:
    values = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(values, dict) or not isinstance(values.get("path"), str) or not values["path"]:
        raise ProblemError(f"{where} must be a path, or a table with a path")
    if values.get("git_url"):
        raise ProblemError(f"{where} lies in {values['git_url']}: fetch it, then list where it is (without git_url)")
    problem_id, split, repeat = values.get("id", values.get("name")), values.get("split"), values.get("repeat", 1)
    for name, value in (("id", problem_id), ("split", split)):
        if value is not None and not (isinstance(value, str) and value):
            raise ProblemError(f"{where}: {name} must be text, not {value!r}")
    if isinstance(repeat, bool) or not isinstance(repeat, int) or not 1 <= repeat <= MAX_REPEAT:
        raise ProblemError(f"{where}: repeat must be a whole number from 1 to {MAX_REPEAT}, not {repeat!r}")
    return {"path": values["path"], "id": problem_id, "split": split, "repeat": repeat}


def _load(root: Path, values: Json, where: str) -> Problem:
    path = Path(values["path"])
    folder = root / path
    if "\0" in values["path"] or path.is_absolute() or ".." in path.parts:
        raise ProblemError(f"{where}: {values['path']!r} must be a path below {root}")
    if not folder.resolve().is_relative_to(root):
        raise ProblemError(f"{where}: {folder} is a symlink out of {root}")
    return load_problem(folder, problem_id=values["id"], repeat=values["repeat"])
