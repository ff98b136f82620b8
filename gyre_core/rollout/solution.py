"""Tries a problem on its own reference solution: is it solvable, and is doing nothing not enough?

Enters: a problem with `solution/solve.sh`, a sandbox. Leaves: two grades from the verifier that training uses, one of a
workspace that the solution worked on and one of an untouched workspace. The solution lies at /solution while it runs,
as in Harbor, and is gone when the verifier runs.
"""

from dataclasses import dataclass
from pathlib import Path

from gyre_core.config.models import GradingConfig
from gyre_core.grading.problems import Problem
from gyre_core.grading.verifier import SandboxRunner, grade_workspace
from gyre_core.rollout.workspace import prepare_workspace, remove_tree
from gyre_core.types import Grade, HarnessResult

SOLUTION_DIR = "/solution"
DEFAULT_TIMEOUT_S = 600.0  # of a solution whose task names no time for the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionCheck:
    """What the verifier said. Example: check = await check_solution(problem, sandbox=sandbox, ...); check.ok"""

    problem_id: str
    solved: Grade
    untouched: Grade

    @property
    def ok(self) -> bool:
        return not self.complaint

    @property
    def complaint(self) -> str:
        """What is wrong with the problem, empty when nothing is."""
        if self.solved.reward is None:
            return f"the solution has no reward: {self.solved.reason}"
        if self.solved.reward < 1.0:
            return f"the solution is given {self.solved.reward:g}, not 1: {self.solved.reason}"
        if self.untouched.reward is None:
            return f"an untouched workspace has no reward: {self.untouched.reason}"
        if self.untouched.reward >= 1.0:
            return "an untouched workspace is given 1: there is nothing to do"
        return ""


async def check_solution(
    problem: Problem, *, sandbox: SandboxRunner, grading: GradingConfig, scratch: Path
) -> SolutionCheck:
    """Run and grade the reference solution, and grade an untouched workspace.

    `scratch` is a folder that is made and removed here. Raises ValueError for a problem without a solution.
    """
    if problem.solution_dir is None:
        raise ValueError(f"problem {problem.problem_id} has no solution/solve.sh")
    try:
        workspace = scratch / "solved" / "workspace"
        prepare_workspace(workspace, problem.files_dir)
        ran = await sandbox.run(
            ["bash", f"{SOLUTION_DIR}/solve.sh"],
            workspace=workspace,
            timeout_s=problem.agent_timeout_s or DEFAULT_TIMEOUT_S,
            env=problem.solution_env,
            read_only=[(problem.solution_dir, SOLUTION_DIR)],
        )
        solved = await _grade(problem, sandbox, grading, workspace, ran)
        workspace = scratch / "untouched" / "workspace"
        prepare_workspace(workspace, problem.files_dir)
        nothing = HarnessResult(
            exit_code=0, timed_out=False, duration_s=0.0, log_tail="", started_s=0.0, finished_s=0.0
        )
        untouched = await _grade(problem, sandbox, grading, workspace, nothing)
    finally:
        remove_tree(scratch)
    return SolutionCheck(problem_id=problem.problem_id, solved=solved, untouched=untouched)


async def _grade(
    problem: Problem, sandbox: SandboxRunner, grading: GradingConfig, workspace: Path, ran: HarnessResult
) -> Grade:
    return await grade_workspace(
        problem,
        workspace=workspace,
        sandbox=sandbox,
        grading=grading,
        harness=ran,
        num_calls=1,  # nobody asks a model here
        scratch=workspace.parent / "grading",
    )
