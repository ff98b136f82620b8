"""`gyre problems check --run-solution`: what it finds, and that a solution never meets a verifier."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_core.cli.main import app
from gyre_core.config.models import GradingConfig
from gyre_core.grading.problems import load_problem
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.rollout.solution import SolutionCheck, check_solution
from tests.support.problems import write_problem

CHECKS = "[ -e answer ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def with_solution(folder: Path, solve_sh: str, **parts) -> Path:
    write_problem(folder, **{"test_sh": CHECKS, **parts})
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text(solve_sh)
    return folder


async def check(sandbox: Sandbox, folder: Path) -> SolutionCheck:
    return await check_solution(
        load_problem(folder),
        sandbox=sandbox,
        grading=GradingConfig(timeout_s=20.0, attempts=1),
        scratch=folder.parent / "scratch",
    )


async def test_solution_that_solves_is_fine_and_its_environment_is_given(sandbox: Sandbox, tmp_path: Path):
    toml = '[solution.env]\nTEXT = "x"\n'
    solve = '[ "$TEXT" = x ] && [ -e "$(dirname "$0")/solve.sh" ] && cp first answer\n'
    found = await check(sandbox, with_solution(tmp_path / "p", solve, task_toml=toml, files={"first": ""}))
    assert (found.solved.reward, found.untouched.reward, found.complaint, found.ok) == (1.0, 0.0, "", True)


@pytest.mark.parametrize(
    ("solve", "test_sh", "complaint"),
    [
        ("true", CHECKS, "the solution is given 0, not 1"),
        ("touch answer", "echo 0.5 > /logs/verifier/reward.txt", "the solution is given 0.5, not 1"),
        ("touch answer", "echo 1 > /logs/verifier/reward.txt", "an untouched workspace is given 1"),
        ("touch answer", "exit 1", "the solution has no reward"),
        ("touch answer", "[ -e answer ] || exit 1; " + CHECKS, "an untouched workspace has no reward"),
        ("touch answer", "[ -e /solution ] || echo 0 > /logs/verifier/reward.txt", "the solution is given 0"),
    ],
)
async def test_solution_problem_that_is_wrong_has_a_complaint(
    new_sandbox, tmp_path: Path, solve: str, test_sh: str, complaint: str
):
    result = await check(new_sandbox(), with_solution(tmp_path / "p", solve, test_sh=test_sh))
    assert not result.ok and result.complaint.startswith(complaint)


def test_problems_check_cli_lists_what_is_wrong(tmp_path: Path):
    with_solution(tmp_path / "good", "touch answer")
    with_solution(tmp_path / "wrong", "true")
    write_problem(tmp_path / "plain")
    (write_problem(tmp_path / "broken") / "instruction.md").unlink()
    done = CliRunner().invoke(app, ["problems", "check", str(tmp_path), "--run-solution", "--json"])
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert (result["problems"], result["failed_solutions"], result["without_solution"]) == (3, 1, 1)
    assert "broken lacks instruction.md" in result["unusable"][0]
    rewards = {row["problem_id"]: row.get("solution_reward") for row in result["rows"]}
    assert rewards == {"good": 1.0, "plain": None, "wrong": 0.0}


def test_problems_check_cli_good_ones_end_well(tmp_path: Path):
    with_solution(tmp_path / "good", "touch answer")
    done = CliRunner().invoke(app, ["problems", "check", str(tmp_path)])
    assert done.exit_code == 0 and "1 usable, 0 unusable" in done.stdout
    wrong = CliRunner().invoke(app, ["problems", "check", str(tmp_path), "--sandbox", "chroot"])
    assert wrong.exit_code == 1 and "no sandbox 'chroot'" in str(wrong.exception)


def test_problems_convert_cli_then_check(tmp_path: Path):
    old = tmp_path / "old" / "hello"
    old.mkdir(parents=True)
    (old / "task.yaml").write_text("instruction: Make answer.\n")
    (old / "run-tests.sh").write_text("test -e answer\n")
    (old / "solution.sh").write_text("touch answer\n")
    done = CliRunner().invoke(app, ["problems", "convert", str(tmp_path / "old"), str(tmp_path / "new")])
    assert done.exit_code == 0 and "1 converted" in done.stdout, done.output
    done = CliRunner().invoke(app, ["problems", "check", str(tmp_path / "new"), "--run-solution"])
    assert done.exit_code == 0 and "hello: solution 1" in done.stdout, done.output
