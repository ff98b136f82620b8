"""One rollout end to end: real sandboxes and verifiers, a proxy that can fail."""

import asyncio
from pathlib import Path

import pytest

from gyre_core.config.models import GradingConfig, HarnessConfig, RolloutConfig
from gyre_core.errors import ProblemError
from gyre_core.grading.problems import Problem
from gyre_core.rollout.runner import FinishedRollout, execute_rollout, grade_rollout, harness_limit, run_rollout
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.types import HarnessResult, Outcome, RolloutSpec
from tests.support.fake_proxy import CALL_SH, FakeProxy
from tests.support.problems import TASK_TOML, make_problem
from tests.support.sandboxes import new_marker, processes_with

ONE_CALL = 'call "$BASE" "$KEY" > reply; '
GRADED = GradingConfig(timeout_s=20.0, attempts=2)
CHECK_ANSWER = "[ -e answer ] && echo 0.$(cat answer) > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def rollout_config(script: str, **changes) -> RolloutConfig:
    harness = HarnessConfig(
        command=("bash", "-c", CALL_SH + script, "harness", "{instruction}"),
        env={"BASE": "{base_url}", "KEY": "{api_key}", "MODEL": "{model}"},
        **changes.pop("harness", {}),
    )
    values = {"time_limit_s": 20.0, "overall_limit_s": 60.0, "temperature": 0.75, "max_calls": 7, **changes}
    return RolloutConfig(harness=harness, **values)


def spec_of(problem: Problem, **changes) -> RolloutSpec:
    values = {
        "rollout_id": f"s0000-{problem.problem_id}-00",
        "group_id": f"s0000-{problem.problem_id}",
        "problem_id": problem.problem_id,
        "step": 0,
        "member": 0,
        "dispatch_version": 3,
        "seed": 11,
    }
    return RolloutSpec(**{**values, **changes})


class Runner:
    """Runs scripts as harnesses of one problem."""

    def __init__(self, sandbox: Sandbox, tmp_path: Path) -> None:
        self.sandbox = sandbox
        self.folder = tmp_path
        self.workdir = tmp_path / "work" / "rollout"
        self.problem = make_problem(tmp_path / "p1", test_sh=CHECK_ANSWER, files={"data/a.txt": "content\n"})

    async def run(
        self, script: str, proxy: FakeProxy, *, keep: bool = False, grading=GRADED, **changes
    ) -> FinishedRollout:
        async with proxy:
            return await run_rollout(
                spec_of(self.problem),
                self.problem,
                rollout=rollout_config(script, **changes),
                grading=grading,
                proxy=proxy,
                sandbox=self.sandbox,
                workdir=self.workdir,
                keep_workspaces=keep,
            )


@pytest.fixture
def runner(sandbox: Sandbox, tmp_path: Path) -> Runner:
    return Runner(sandbox, tmp_path)


async def test_rollout_that_finishes_is_graded_and_cleaned_up(runner: Runner):
    proxy = FakeProxy()
    script = ONE_CALL + ONE_CALL + '[ "$1" = "Do it." ] && [ "$(cat data/a.txt)" = content ] && echo 5 > answer'
    finished = await runner.run(script.replace('"$1"', '"$(echo $1)"'), proxy)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.FINISHED, 0.5)
    assert [call.call_id for call in finished.trajectory.calls] == ["s0000-p1-00-c0", "s0000-p1-00-c1"]
    assert finished.harness.exit_code == 0
    times = finished.times
    assert min(times.prepare_s, times.harness_s, times.seal_s, times.grade_s) > 0
    assert times.harness_s >= finished.harness.duration_s
    version, sampling, limits, harness = proxy.settings["s0000-p1-00"]
    assert (version, sampling.temperature, sampling.seed, limits.max_calls) == (3, 0.75, 11, 7)
    assert harness.name == "quickstart-agent"
    assert proxy.deleted == ["s0000-p1-00"]
    assert not runner.workdir.exists()


async def test_rollout_kept_workspace_stays_where_it_was(runner: Runner):
    finished = await runner.run(ONE_CALL + "echo 5 > answer; echo bye", FakeProxy(), keep=True)
    assert finished.grade.reward == 0.5
    assert (runner.workdir / "workspace/answer").read_text() == "5\n"
    assert (runner.workdir / "harness.log").read_text() == "bye\n"


async def test_rollout_crash_keeps_its_partial_credit(runner: Runner):
    finished = await runner.run(ONE_CALL + "echo 25 > answer; kill -SEGV $$", FakeProxy())
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.HARNESS_FAILED, 0.25)
    assert finished.grade.reason == "the harness ended with exit code 139; the verifier wrote 0.25"


@pytest.mark.parametrize(
    ("run_limit_s", "task_limit_s", "limit_s", "named"),
    [
        (60.0, None, 60.0, "60 s, rollout.time_limit_s"),
        (60.0, 90.0, 60.0, "60 s, rollout.time_limit_s"),
        (60.0, 60.0, 60.0, "60 s, rollout.time_limit_s"),
        (60.0, 45.5, 45.5, "45.5 s, agent.timeout_sec of the problem"),
    ],
)
def test_harness_limit_is_the_shorter_and_named(
    tmp_path: Path, run_limit_s: float, task_limit_s: float | None, limit_s: float, named: str
):
    toml = f"[agent]\ntimeout_sec = {task_limit_s}" if task_limit_s else ""
    problem = make_problem(tmp_path / "p1", task_toml=toml)
    config = rollout_config("", time_limit_s=run_limit_s, overall_limit_s=600.0)
    assert harness_limit(problem, config) == (limit_s, named)


async def test_rollout_at_its_time_limit_is_graded(sandbox: Sandbox, tmp_path: Path):
    runner = Runner(sandbox, tmp_path)
    toml = TASK_TOML.replace("timeout_sec = 20.0", "timeout_sec = 1.5")
    runner.problem = make_problem(tmp_path / "p2", test_sh=CHECK_ANSWER, task_toml=toml)
    marker = new_marker()
    script = ONE_CALL + f"echo 75 > answer; setsid sleep 1000 & sleep 1000 # {marker}"
    finished = await runner.run(script, FakeProxy())
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.TIME_LIMIT, 0.75)
    assert "the harness reached its time limit (1.5 s, agent.timeout_sec of the problem)" in finished.grade.reason
    assert finished.harness.timed_out and 1.5 <= finished.harness.duration_s < 10
    assert processes_with(marker) == []


@pytest.mark.parametrize("script", ["echo 5 > answer", "sleep 1000", "exit 1"])
async def test_rollout_without_a_call_is_an_infrastructure_failure(runner: Runner, script: str):
    finished = await runner.run(script, FakeProxy(), time_limit_s=0.5)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.NO_ARTIFACT, None)
    assert "without a model call" in finished.grade.reason
    zero = await runner.run(script, FakeProxy(), time_limit_s=0.5, grading=GradingConfig(no_artifact="zero"))
    assert zero.grade.reward == 0.0


async def test_rollout_with_a_wrong_key_has_made_no_call(runner: Runner):
    finished = await runner.run('call "$BASE" wrong > reply; grep 401 reply', FakeProxy())
    assert finished.harness.exit_code == 0
    assert finished.grade.outcome is Outcome.NO_ARTIFACT


async def test_rollout_command_that_does_not_exist_says_so(runner: Runner):
    runner_config = rollout_config("").harness.model_copy(update={"command": ("no-such-agent",)})
    async with FakeProxy() as proxy:
        finished = await run_rollout(
            spec_of(runner.problem),
            runner.problem,
            rollout=rollout_config("").model_copy(update={"harness": runner_config}),
            grading=GRADED,
            proxy=proxy,
            sandbox=runner.sandbox,
            workdir=runner.workdir,
        )
    assert finished.grade.outcome is Outcome.NO_ARTIFACT
    assert "no-such-agent" in finished.grade.reason


async def test_rollout_whose_sandbox_cannot_be_built_is_excluded(runner: Runner):
    finished = await runner.run(ONE_CALL, FakeProxy(), harness={"read_only": (runner.folder / "missing",)})
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.NO_ARTIFACT, None)
    assert "no harness ran: the sandbox could not be built" in finished.grade.reason
    assert finished.harness.error


async def test_rollout_without_a_session_is_excluded(runner: Runner):
    finished = await runner.run(ONE_CALL, FakeProxy(refuse_sessions=True))
    assert finished.grade.outcome is Outcome.NO_ARTIFACT
    assert finished.grade.reason == "the proxy gave no session: the proxy does not answer"
    assert finished.trajectory.rollout_id == "s0000-p1-00" and finished.trajectory.tree.nodes == ()
    assert finished.harness.exit_code is None and not runner.workdir.exists()


async def test_rollout_seal_is_tried_again(runner: Runner):
    proxy = FakeProxy(failing_seals=2)
    finished = await runner.run(ONE_CALL + "echo 5 > answer", proxy)
    assert (finished.grade.reward, proxy.seals) == (0.5, 3)


async def test_rollout_whose_calls_are_lost_is_excluded(runner: Runner):
    proxy = FakeProxy(failing_seals=99)
    finished = await runner.run(ONE_CALL + "echo 5 > answer", proxy)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.NO_ARTIFACT, None)
    assert finished.grade.reason == "the recorded calls could not be fetched: the proxy lost its record"
    assert finished.harness.exit_code == 0, "what is known of the harness is kept"
    assert proxy.deleted == ["s0000-p1-00"]


async def test_rollout_with_another_rollouts_calls_is_excluded(runner: Runner):
    proxy = FakeProxy()
    proxy.seal_as = "s0000-p1-09"
    finished = await runner.run(ONE_CALL, proxy)
    assert finished.grade.outcome is Outcome.NO_ARTIFACT and "s0000-p1-09" in finished.grade.reason


async def test_rollout_verifier_that_fails_excludes_it(sandbox: Sandbox, tmp_path: Path):
    runner = Runner(sandbox, tmp_path)
    runner.problem = make_problem(tmp_path / "p2", test_sh="exit 3")
    finished = await runner.run(ONE_CALL, FakeProxy())
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.VERIFIER_FAILED, None)
    assert finished.grade.verifier_attempts == 2
    assert len(finished.trajectory.calls) == 1, "the calls are kept for the store"


async def test_rollout_problem_that_vanished_is_excluded(runner: Runner):
    for path in sorted(runner.problem.tests_dir.iterdir()):
        path.unlink()
    runner.problem.tests_dir.rmdir()
    finished = await runner.run(ONE_CALL, FakeProxy())
    assert finished.grade.outcome is Outcome.VERIFIER_FAILED and "tests could not be copied" in finished.grade.reason


async def test_rollout_overall_limit_in_the_harness_excludes_it(runner: Runner):
    marker = new_marker()
    proxy = FakeProxy()
    config = rollout_config(f"{ONE_CALL} sleep 1000 # {marker}").model_copy(update={"overall_limit_s": 1.5})
    async with proxy:
        executed = await execute_rollout(
            spec_of(runner.problem),
            runner.problem,
            rollout=config,
            proxy=proxy,
            sandbox=runner.sandbox,
            workdir=runner.workdir,
        )
        assert processes_with(marker) == []
        finished = await grade_rollout(executed, runner.problem, grading=GRADED, rollout=config, sandbox=runner.sandbox)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.CANCELLED, None)
    assert "rollout.overall_limit_s" in finished.grade.reason
    assert len(finished.trajectory.calls) == 1 and proxy.deleted, "sealed all the same"
    assert not runner.workdir.exists()


async def test_rollout_overall_limit_in_the_verifier_excludes_it(sandbox: Sandbox, tmp_path: Path):
    runner = Runner(sandbox, tmp_path)
    marker = new_marker()
    runner.problem = make_problem(tmp_path / "p2", test_sh=f"echo 1 > /logs/verifier/reward.txt; sleep 1000 # {marker}")
    config = rollout_config(ONE_CALL)
    async with FakeProxy() as proxy:
        executed = await execute_rollout(
            spec_of(runner.problem),
            runner.problem,
            rollout=config,
            proxy=proxy,
            sandbox=sandbox,
            workdir=runner.workdir,
        )
        short = config.model_copy(update={"overall_limit_s": executed.times.total_s + 0.3})
        finished = await grade_rollout(executed, runner.problem, grading=GRADED, rollout=short, sandbox=sandbox)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.CANCELLED, None)
    assert 0.3 <= finished.times.grade_s < 10 and processes_with(marker) == []


async def test_rollout_unexpected_error_is_data_too(tmp_path: Path):
    class BrokenSandbox:
        async def run(self, argv, **options) -> HarnessResult:
            raise RuntimeError("a bug")

    runner = Runner(BrokenSandbox(), tmp_path)  # type: ignore[arg-type]
    finished = await runner.run(ONE_CALL, FakeProxy())
    assert finished.grade.outcome is Outcome.NO_ARTIFACT
    assert finished.grade.reason == "the harness could not be run: a bug"


async def test_rollout_cancelled_leaves_no_session_process_or_folder(runner: Runner):
    marker = new_marker()
    async with FakeProxy() as proxy:
        task = asyncio.create_task(
            execute_rollout(
                spec_of(runner.problem),
                runner.problem,
                rollout=rollout_config(f"{ONE_CALL} sleep 1000 # {marker}"),
                proxy=proxy,
                sandbox=runner.sandbox,
                workdir=runner.workdir,
            )
        )
        async with asyncio.timeout(20):
            while not proxy.calls:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert proxy.deleted == ["s0000-p1-00"]
    assert processes_with(marker) == [] and not runner.workdir.exists()


async def test_rollout_workdir_of_a_killed_process_is_started_anew(runner: Runner):
    (runner.workdir / "workspace").mkdir(parents=True)
    (runner.workdir / "workspace" / "answer").write_text("9")
    finished = await runner.run(ONE_CALL, FakeProxy())
    assert finished.grade.reward == 0.0


async def test_rollout_problem_files_are_copied_without_following_symlinks(runner: Runner, tmp_path: Path):
    (tmp_path / "secret").write_text("host secret")
    (tmp_path / "p1/environment/files/link").symlink_to(tmp_path / "secret")
    script = f"{ONE_CALL} cat link; echo hacked > data/a.txt; [ -L link ] && echo 5 > answer"
    finished = await runner.run(script, FakeProxy(), keep=True)
    assert finished.grade.reward == 0.5 and "host secret" not in finished.harness.log_tail
    assert (tmp_path / "p1/environment/files/data/a.txt").read_text() == "content\n"


@pytest.mark.parametrize("rollout_id", ["../escape", "a/b", ".."])
async def test_rollout_id_that_is_no_name_is_refused(tmp_path: Path, rollout_id: str):
    runner = Runner(None, tmp_path)  # type: ignore[arg-type]
    async with FakeProxy() as proxy:
        for spec, message in (
            (spec_of(runner.problem, rollout_id=rollout_id), "not usable as a name"),
            (spec_of(runner.problem, problem_id="p9"), "is for problem p9, not p1"),
        ):
            with pytest.raises((ProblemError, ValueError), match=message):
                await execute_rollout(
                    spec,
                    runner.problem,
                    rollout=rollout_config(""),
                    proxy=proxy,
                    sandbox=runner.sandbox,
                    workdir=runner.workdir,
                )
