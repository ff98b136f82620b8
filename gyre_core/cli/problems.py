"""`gyre problems`: convert tasks of another layout, and find what is wrong with problems before a run pays for it."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any, get_args

from gyre_core.config.models import GradingConfig
from gyre_core.grading.manifest import scan_source
from gyre_core.grading.problems import Problem
from gyre_core.grading.terminal_bench import convert_tasks
from gyre_core.rollout.sandbox import Sandbox, SandboxKind
from gyre_core.rollout.solution import SolutionCheck, check_solution


def check_problems(source: Path, *, run_solution: bool, sandbox: str, timeout_s: float) -> tuple[dict[str, Any], str]:
    """What is wrong with a folder's or manifest's problems: one JSON object and its text; `ok` is False for any."""
    kind = _sandbox_kind(sandbox)
    problems, unusable = scan_source(source)
    rows = [
        {
            "problem_id": problem.problem_id,
            "notes": list(problem.notes),
            "has_solution": problem.solution_dir is not None,
            "files": sum(path.is_file() for path in problem.files_dir.rglob("*")) if problem.files_dir else 0,
            "repeat": problem.repeat,
        }
        for problem in problems
    ]
    failed = 0
    if run_solution:
        for row, check in zip(rows, _run_solutions(problems, kind, timeout_s), strict=True):
            if check is None:
                continue
            row |= {
                "solution_reward": check.solved.reward,
                "untouched_reward": check.untouched.reward,
                "complaint": check.complaint,
            }
            failed += not check.ok
    result = {
        "ok": not unusable and not failed and bool(problems),
        "problems": len(problems),
        "unusable": unusable,
        "failed_solutions": failed,
        "without_solution": sum(not row["has_solution"] for row in rows),
        "rows": rows,
    }
    return result, "\n".join(_check_lines(source, result))


def convert_problems(source: Path, destination: Path) -> tuple[dict[str, Any], str]:
    """Convert terminal-bench tasks; `ok` is False when one could not be."""
    converted, reasons = convert_tasks(source, destination)
    result = {
        "ok": not reasons,
        "converted": [{"problem_id": task.problem_id, "notes": list(task.notes)} for task in converted],
        "not_converted": reasons,
    }
    lines = []
    for task in converted:
        lines += [f"{task.problem_id}", *(f"    note: {note}" for note in task.notes)]
    lines += [f"NOT CONVERTED {reason}" for reason in reasons]
    lines.append(f"{len(converted)} converted to {destination}, {len(reasons)} not")
    return result, "\n".join(lines)


def _run_solutions(problems: list[Problem], kind: SandboxKind, timeout_s: float) -> list[SolutionCheck | None]:
    sandbox = Sandbox(kind)
    grading = GradingConfig(timeout_s=timeout_s, attempts=1)

    async def run_all(folder: Path) -> list[SolutionCheck | None]:
        return [
            await check_solution(problem, sandbox=sandbox, grading=grading, scratch=folder / problem.problem_id)
            if problem.solution_dir is not None
            else None
            for problem in problems
        ]

    with tempfile.TemporaryDirectory(prefix="gyre-problems-") as folder:
        return asyncio.run(run_all(Path(folder)))


def _sandbox_kind(name: str) -> SandboxKind:
    for kind in get_args(SandboxKind):
        if kind == name:
            return kind
    raise ValueError(f"there is no sandbox {name!r}; there are {', '.join(get_args(SandboxKind))}")


def _check_lines(source: Path, result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["rows"]:
        ran = ""
        if "complaint" in row:
            ran = f": WRONG, {row['complaint']}" if row["complaint"] else ": solution 1, untouched below 1"
        elif not row["has_solution"]:
            ran = ": no solution/solve.sh"
        lines += [f"{row['problem_id']}{ran}", *(f"    note: {note}" for note in row["notes"])]
    lines += [f"UNUSABLE {reason}" for reason in result["unusable"]]
    lines.append(
        f"{source}: {result['problems']} usable, {len(result['unusable'])} unusable, "
        f"{result['failed_solutions']} with a wrong solution or verifier"
    )
    return lines
