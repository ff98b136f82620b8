"""The grading table of the design, row by row, through real verifiers in real sandboxes of both back ends."""

import asyncio
from pathlib import Path

import pytest

from gyre_core.config.models import GradingConfig
from gyre_core.grading.problems import Problem
from gyre_core.grading.verifier import grade_workspace
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.types import Grade, HarnessResult, Outcome
from tests.support.problems import TASK_TOML, harness_result, make_problem

QUICK = GradingConfig(timeout_s=20.0, attempts=2)


async def grade(
    sandbox: Sandbox,
    problem: Problem,
    workspace: Path,
    *,
    grading: GradingConfig = QUICK,
    harness: HarnessResult | None = None,
    num_calls: int = 1,
) -> Grade:
    return await grade_workspace(
        problem,
        workspace=workspace,
        sandbox=sandbox,
        grading=grading,
        harness=harness or harness_result(),
        num_calls=num_calls,
        scratch=workspace.parent / "grading",
    )


async def test_grade_partial_credit_of_a_finished_rollout(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    (workspace / "answer").write_text("42\n")
    test_sh = """
        passed=0
        [ "$(cat answer)" = 42 ] && passed=$((passed + 5))
        [ -e other ] && passed=$((passed + 5))
        echo 0.$passed > /logs/verifier/reward.txt
    """
    result = await grade(sandbox, make_problem(tmp_path / "p", test_sh=test_sh), workspace)
    assert (result.outcome, result.reward, result.verifier_attempts) == (Outcome.FINISHED, 0.5, 1)
    assert result.reason == "the harness finished; the verifier wrote 0.5"
    assert 0 < result.verifier_s < 10


async def test_grade_reward_json_with_metrics(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    test_sh = """echo '{"reward": 0.25, "passed": 1, "total": 4}' > /logs/verifier/reward.json"""
    result = await grade(sandbox, make_problem(tmp_path / "p", test_sh=test_sh), workspace)
    assert (result.reward, result.metrics) == (0.25, {"passed": 1.0, "total": 4.0})


@pytest.mark.parametrize(
    ("harness", "outcome"),
    [
        (harness_result(exit_code=None, timed_out=True), Outcome.TIME_LIMIT),
        (harness_result(exit_code=1), Outcome.HARNESS_FAILED),
        (harness_result(exit_code=None), Outcome.HARNESS_FAILED),
    ],
)
async def test_grade_harness_that_did_not_finish_keeps_its_reward(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, harness: HarnessResult, outcome: Outcome
):
    result = await grade(sandbox, make_problem(tmp_path / "p"), workspace, harness=harness)
    assert (result.outcome, result.reward, result.included) == (outcome, 1.0, True)


@pytest.mark.parametrize(
    ("test_sh", "reason"),
    [
        ("exit 1", "neither reward.txt nor reward.json"),
        ("kill -SEGV $$", "exit code 139"),
        ("true", "neither reward.txt nor reward.json"),
        ("rm -r /logs/verifier", "no folder"),
        ("echo nan > /logs/verifier/reward.txt", "must be a finite number"),
        ("echo passed > /logs/verifier/reward.txt", "holds no number: 'passed'"),
        ("echo 7 > /logs/verifier/reward.txt", "in [0, 1]"),
        ("echo -1 > /logs/verifier/reward.txt", "in [0, 1]"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "2 numbers to choose from"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "not a readable plain file"),
        ("mkfifo /logs/verifier/reward.txt", "not a plain file"),
        ("syntax error (", "neither reward.txt"),
    ],
)
async def test_grade_verifier_that_fails_is_retried_then_excluded(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, test_sh: str, reason: str
):
    problem = make_problem(tmp_path / "p", test_sh=f"echo attempt >> /app/attempts\n{test_sh}\n")
    result = await grade(sandbox, problem, workspace)
    assert (result.outcome, result.reward, result.included) == (Outcome.VERIFIER_FAILED, None, False)
    assert result.verifier_attempts == 2 and (workspace / "attempts").read_text() == "attempt\n" * 2
    assert reason in result.reason


async def test_grade_verifier_that_hangs_is_ended_by_its_own_limit(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    toml = TASK_TOML.replace("timeout_sec = 30.0", "timeout_sec = 0.3")
    problem = make_problem(tmp_path / "p", task_toml=toml, test_sh="echo 1 > /logs/verifier/reward.txt; sleep 1000")
    result = await grade(sandbox, problem, workspace)
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILED, None)
    assert "its time limit of 0.3 s" in result.reason
    assert 0.6 <= result.verifier_s < 10, "both attempts, measured"


async def test_grade_second_attempt_may_succeed(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    test_sh = "[ -e /app/tried ] && echo 0.75 > /logs/verifier/reward.txt; touch /app/tried"
    result = await grade(sandbox, make_problem(tmp_path / "p", test_sh=test_sh), workspace)
    assert (result.outcome, result.reward, result.verifier_attempts) == (Outcome.FINISHED, 0.75, 2)


async def test_grade_reward_of_a_failed_attempt_does_not_count_later(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    test_sh = """
        [ -e /app/tried ] && exit
        touch /app/tried
        echo 2 > /logs/verifier/reward.txt
        echo '{"reward": 1}' > /logs/verifier/reward.json
    """
    result = await grade(sandbox, make_problem(tmp_path / "p", test_sh=test_sh), workspace)
    assert result.outcome is Outcome.VERIFIER_FAILED
    assert "neither reward.txt nor reward.json" in result.reason


async def test_grade_agent_that_used_its_whole_time_leaves_the_verifier_its_own(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
):
    toml = TASK_TOML.replace("timeout_sec = 20.0", "timeout_sec = 0.2").replace(
        "timeout_sec = 30.0", "timeout_sec = 20"
    )
    problem = make_problem(tmp_path / "p", task_toml=toml, test_sh="sleep 0.5; echo 1 > /logs/verifier/reward.txt")
    harness = harness_result(exit_code=None, timed_out=True, duration_s=0.2)
    result = await grade(sandbox, problem, workspace, harness=harness)
    assert (result.outcome, result.reward) == (Outcome.TIME_LIMIT, 1.0)
    assert result.verifier_s >= 0.5


@pytest.mark.parametrize("harness", [harness_result(), harness_result(exit_code=None, timed_out=True)])
async def test_grade_agent_without_a_call_is_an_infrastructure_failure(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, harness: HarnessResult
):
    problem = make_problem(tmp_path / "p", test_sh="touch /app/graded; echo 1 > /logs/verifier/reward.txt")
    result = await grade(sandbox, problem, workspace, harness=harness, num_calls=0)
    assert (result.outcome, result.reward) == (Outcome.NO_ARTIFACT, None)
    zero = await grade(
        sandbox, problem, workspace, harness=harness, num_calls=0, grading=GradingConfig(no_artifact="zero")
    )
    assert (zero.outcome, zero.reward) == (Outcome.NO_ARTIFACT, 0.0)
    assert not (workspace / "graded").exists(), "no verifier ran"


async def test_grade_without_a_workspace_is_an_infrastructure_failure(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
):
    problem = make_problem(tmp_path / "p")
    workspace.rmdir()
    workspace.symlink_to("/etc")
    result = await grade(sandbox, problem, workspace)
    assert (result.outcome, result.reward) == (Outcome.NO_ARTIFACT, None)


async def test_grade_tests_are_private_and_only_there_while_grading(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    test_sh = """
        [ "$(cat /tests/data)" = secret ] && echo 1 > /logs/verifier/reward.txt
        echo broken > /tests/data
        echo exit > /tests/test.sh
        touch /tests/new
    """
    problem = make_problem(tmp_path / "p", test_sh=test_sh, tests={"data": "secret\n"})
    before = await sandbox.run(["ls", "/tests"], workspace=workspace, timeout_s=30)
    assert before.exit_code == 2 and "No such file" in before.log_tail
    assert (await grade(sandbox, problem, workspace)).reward == 1.0
    assert (problem.tests_dir / "data").read_text() == "secret\n"
    assert (problem.tests_dir / "test.sh").read_text() == test_sh
    assert sorted(path.name for path in problem.tests_dir.iterdir()) == ["data", "test.sh"]
    after = await sandbox.run(["ls", "/tests"], workspace=workspace, timeout_s=30)
    assert after.exit_code == 2


async def test_grade_what_the_agent_put_in_logs_and_tests_has_no_effect(
    sandbox: Sandbox, workspace: Path, tmp_path: Path
):
    agent = """
        mkdir -p /logs/verifier /tests tests
        echo 1 > /logs/verifier/reward.txt
        echo 'echo 1 > /logs/verifier/reward.txt' | tee /tests/test.sh tests/test.sh
        ln -s /logs logs
    """
    await sandbox.run(["bash", "-c", agent], workspace=workspace, timeout_s=30)
    test_sh = '[ -z "$(ls -A /logs/verifier)" ] && echo 0 > /logs/verifier/reward.txt'
    problem = make_problem(tmp_path / "p", test_sh=test_sh)
    result = await grade(sandbox, problem, workspace)
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.0)


async def test_grade_verifier_gets_its_environment(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    toml = TASK_TOML + '[verifier.env]\nSCORE = "0.125"\n'
    problem = make_problem(tmp_path / "p", task_toml=toml, test_sh='echo "$SCORE" > /logs/verifier/reward.txt')
    assert (await grade(sandbox, problem, workspace)).reward == 0.125


async def test_grade_cancelled_is_raised(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    problem = make_problem(tmp_path / "p", test_sh="sleep 1000")
    task = asyncio.create_task(grade(sandbox, problem, workspace))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
