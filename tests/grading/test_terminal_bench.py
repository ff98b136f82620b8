from pathlib import Path

import pytest

from gyre_core.config.models import GradingConfig
from gyre_core.errors import ProblemError
from gyre_core.grading.problems import load_problem
from gyre_core.grading.terminal_bench import convert_task, convert_tasks
from gyre_core.grading.verifier import grade_workspace
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.rollout.solution import check_solution
from gyre_core.types import Outcome
from tests.support.problems import harness_result

TASK_YAML = """
instruction: |-
  Write "hello" to hello.txt.
  Mind the case.
author_name: "An \\"author\\""
difficulty: easy
tags: [files, easy]
expert_time_estimate_min: null
parser_name: pytest
max_agent_timeout_sec: 120
max_test_timeout_sec: 30.5
run_tests_in_same_shell: false
"""
DOCKERFILE = """\
FROM some/image:1
# a comment
WORKDIR /app
COPY --chown=1:1 data \\
     ./data/
COPY config.ini /etc/config.ini
COPY ["notes.txt", "./"]
RUN make
"""
RUN_TESTS = '[ "$(cat /app/hello.txt)" = hello ] && [ -e "$TEST_DIR/test_outputs.py" ] && [ -e data/a.txt ]\n'


def old_task(folder: Path, **changes: str | None) -> Path:
    """A task of the old layout; None leaves a file out."""
    files = {
        "task.yaml": TASK_YAML,
        "Dockerfile": DOCKERFILE,
        "docker-compose.yaml": "services:\n  client:\n    build: .\n",
        "run-tests.sh": RUN_TESTS,
        "tests/test_outputs.py": "def test(): pass\n",
        "solution.sh": "echo hello > hello.txt\n",
        "data/a.txt": "a\n",
        "config.ini": "[x]\n",
        "notes.txt": "n\n",
        **changes,
    }
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_convert_gives_a_problem_with_all_its_parts(tmp_path: Path):
    converted = convert_task(old_task(tmp_path / "old" / "hello-world"), tmp_path / "new")
    problem = load_problem(tmp_path / "new" / "hello-world")
    assert converted.problem_id == problem.problem_id == "hello-world"
    assert problem.instruction == 'Write "hello" to hello.txt.\nMind the case.\n'
    assert (problem.agent_timeout_s, problem.verifier_timeout_s) == (120.0, 30.5)
    assert problem.metadata == {
        "converted_from": "terminal-bench",
        "author_name": 'An "author"',
        "difficulty": "easy",
        "tags": ["files", "easy"],
    }
    assert problem.files_dir is not None and problem.solution_dir is not None
    solution = {path.name: path.read_text() for path in problem.solution_dir.iterdir()}
    assert solution == {"solve.sh": "echo hello > hello.txt\n"}
    files = {str(path.relative_to(problem.files_dir)) for path in problem.files_dir.rglob("*") if path.is_file()}
    assert files == {"data/a.txt", "notes.txt"}
    assert sorted(path.name for path in problem.tests_dir.iterdir()) == ["run-tests.sh", "test.sh", "test_outputs.py"]
    notes = "\n".join(converted.notes)
    assert "outside /app" in notes and "some/image:1" in notes and "1 RUN step(s)" in notes
    assert not (tmp_path / "new" / "hello-world" / "environment" / "tests").exists(), "no agent may see them"


async def test_converted_solution_is_given_one_and_doing_nothing_zero(sandbox: Sandbox, tmp_path: Path):
    convert_task(old_task(tmp_path / "old" / "hello"), tmp_path / "new")
    problem = load_problem(tmp_path / "new" / "hello")
    grading = GradingConfig(timeout_s=20.0, attempts=1)
    check = await check_solution(problem, sandbox=sandbox, grading=grading, scratch=tmp_path / "scratch")
    assert (check.solved.reward, check.untouched.reward, check.complaint) == (1.0, 0.0, "")
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(("script", "reward"), [("exit 0", 1.0), ("exit 1", 0.0), ("exit 5", 0.0)])
async def test_converted_tests_exit_code_is_the_reward(
    new_sandbox, workspace: Path, tmp_path: Path, script: str, reward: float
):
    grade = await _graded(new_sandbox(), workspace, tmp_path, script)
    assert (grade.outcome, grade.reward) == (Outcome.FINISHED, reward)


@pytest.mark.parametrize("script", ["no-such-program", "kill -SEGV $$"])
async def test_converted_tests_that_cannot_be_run_exclude(new_sandbox, workspace: Path, tmp_path: Path, script: str):
    grade = await _graded(new_sandbox(), workspace, tmp_path, script)
    assert (grade.outcome, grade.reward) == (Outcome.VERIFIER_FAILED, None)


async def _graded(sandbox: Sandbox, workspace: Path, tmp_path: Path, script: str):
    convert_task(old_task(tmp_path / "old" / "p", **{"run-tests.sh": script + "\n"}), tmp_path / "new")
    return await grade_workspace(
        load_problem(tmp_path / "new" / "p"),
        workspace=workspace,
        sandbox=sandbox,
        grading=GradingConfig(timeout_s=20.0, attempts=1),
        harness=harness_result(),
        num_calls=1,
        scratch=tmp_path / "grading",
    )


def test_convert_without_run_tests_runs_pytest_on_the_usual_file(tmp_path: Path):
    converted = convert_task(old_task(tmp_path / "old" / "p", **{"run-tests.sh": None}), tmp_path / "new")
    assert 'python3 -m pytest "$TEST_DIR/test_outputs.py"' in (converted.folder / "tests" / "test.sh").read_text()
    assert any("python3 -m pytest" in note for note in converted.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.yaml": "a: ["}, "cannot read"),
        ({"task.yaml": "- a"}, "must be a mapping"),
        ({"task.yaml": "author_name: x"}, "has no instruction"),
        ({"task.yaml": "instruction: x\nmax_test_timeout_sec: -1"}, "must be a positive number"),
        ({"run-tests.sh": None, "tests/test_outputs.py": None}, "neither run-tests.sh nor"),
        ({"tests/test.sh": "x"}, "stands where the converted"),
    ],
)
def test_convert_task_that_is_not_usable_leaves_nothing(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(ProblemError, match=message):
        convert_task(old_task(tmp_path / "old" / "p", **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_convert_refuses_links_out_and_what_exists(tmp_path: Path):
    old = old_task(tmp_path / "old" / "p")
    convert_task(old, tmp_path / "new")
    with pytest.raises(ProblemError, match="exists; remove it"):
        convert_task(old, tmp_path / "new")
    (old / "data" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ProblemError, match="symlink out"):
        convert_task(old, tmp_path / "other")


@pytest.mark.parametrize("copy", ["COPY ../../secret /app/", "COPY / /app/", "COPY --from=build /x /app/"])
def test_convert_copies_never_leave_the_task(tmp_path: Path, copy: str):
    (tmp_path / "secret").write_text("secret")
    old = old_task(tmp_path / "old" / "p", Dockerfile=f"FROM x\nWORKDIR /app\n{copy}\n")
    folder = convert_task(old, tmp_path / "new").folder
    copied = {path.name for path in (folder / "environment").rglob("*")}
    assert not copied & {"secret", "passwd", "run-tests.sh", "test_outputs.py", "solution.sh"}


def test_convert_a_folder_goes_on_after_a_bad_task(tmp_path: Path):
    old_task(tmp_path / "old" / "good")
    old_task(tmp_path / "old" / "bad", **{"task.yaml": "x: 1"})
    converted, (reason,) = convert_tasks(tmp_path / "old", tmp_path / "new")
    assert [task.problem_id for task in converted] == ["good"] and reason.startswith("bad: ")
    with pytest.raises(ProblemError, match=r"no task\.yaml"):
        convert_tasks(tmp_path / "new", tmp_path / "newer")
