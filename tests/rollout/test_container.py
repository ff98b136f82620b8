"""The container back end, with a stand-in for docker that really runs the command (support/fake_docker.py)."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gyre_core.config.models import GradingConfig, RolloutConfig
from gyre_core.errors import SandboxError
from gyre_core.grading.verifier import grade_workspace
from gyre_core.rollout.container import ContainerSandbox, ContainerSettings
from gyre_core.rollout.environment import open_environment
from gyre_core.rollout.sandbox import SandboxLimits
from gyre_core.types import Outcome
from tests.support.problems import harness_result, make_problem
from tests.support.sandboxes import new_marker, processes_with

FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_docker.py"
SETTINGS = ContainerSettings(program="docker", image="an/image:1")


class Docker:
    """The stand-in, on PATH, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in ("docker", "podman"):
            script = self.programs / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
            script.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.state / "calls.jsonl").read_text().splitlines()]

    def run_options(self) -> list[str]:
        (call,) = [call for call in self.calls if call[0] == "run"]
        return call

    def containers(self) -> list[str]:
        return [path.name for path in self.state.glob("container-*")]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("the stand-in for docker needs root and unshare")
    made = Docker(tmp_path)
    monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER_STATE", str(made.state))
    return made


async def run(docker: Docker, workspace: Path, script: str, *, timeout_s: float = 20.0, **options):
    limits = SandboxLimits(**options.pop("limits", {}))
    return await ContainerSandbox(SETTINGS, limits=limits).run(
        ["bash", "-c", script], workspace=workspace, timeout_s=timeout_s, **options
    )


async def test_container_runs_the_command_in_the_workspace(docker: Docker, workspace: Path):
    (workspace / "in").write_text("text\n")
    result = await run(docker, workspace, "pwd; cat in; id -un; echo $HOME; echo new > out; exit 7")
    assert (result.exit_code, result.timed_out, result.error) == (7, False, "")
    assert result.log_tail.split() == ["/app", "text", "agent", "/home/agent"]
    assert (workspace / "out").read_text() == "new\n"
    assert docker.containers() == [] and [path.name for path in workspace.parent.iterdir()] == ["workspace"]
    assert 0 < result.duration_s < 10


async def test_container_options_hold_the_bounds(docker: Docker, workspace: Path, tmp_path: Path):
    settings = ContainerSettings(program="docker", image="an/image:1", network="none", memory_bytes=10**9, cpus=1.5)
    sandbox = ContainerSandbox(settings, limits=SandboxLimits(processes=77, open_files=88, file_bytes=99 * 2**20))
    (tmp_path / "odd, name").mkdir()
    await sandbox.run(
        ["true"], workspace=workspace, timeout_s=20, read_only=[(tmp_path / "odd, name", "/odd")], env={"KEY": "secret"}
    )
    options = docker.run_options()
    pairs = set(itertools.pairwise(options))
    assert {
        ("--network", "none"),
        ("--pull", "never"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--pids-limit", "77"),
        ("--ulimit", "nofile=88"),
        ("--ulimit", f"fsize={99 * 2**20}"),
        ("--memory", "1000000000"),
        ("--memory-swap", "1000000000"),
        ("--cpus", "1.5"),
        ("--workdir", "/app"),
        ("--mount", f'type=bind,"source={tmp_path}/odd, name",target=/odd,readonly'),
    } <= pairs
    assert "--rm" in options and "secret" not in " ".join(options), "the host's process list shows no values"
    assert not any(option in ("--privileged", "--volume") for option in options)
    assert options[options.index("--user") + 1] != "0:0"


async def test_container_environment_is_given_with_lines_and_all(docker: Docker, workspace: Path):
    env = {"ONE": "a b", "LINES": "x\ny", "PATH": "/usr/bin:/bin"}
    result = await run(docker, workspace, 'echo "$ONE|$LINES|$FAKE_DOCKER_STATE"', env=env)
    assert result.log_tail == "a b|x\ny|\n"


async def test_container_binds_are_read_only_or_not(docker: Docker, workspace: Path, tmp_path: Path):
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
    read_only, read_write = [(tmp_path / "ro", "/ro")], [(tmp_path / "rw", "/rw")]
    script = "touch /rw/new; touch /ro/new; ls /home/agent /logs"
    result = await run(docker, workspace, script, read_only=read_only, read_write=read_write)
    assert "Read-only" in result.log_tail and (tmp_path / "rw" / "new").exists()
    with pytest.raises(ValueError, match="must be absolute"):
        await run(docker, workspace, "true", read_only=[(tmp_path, "../x")])


async def test_container_at_its_time_limit_is_removed_with_everything(docker: Docker, workspace: Path):
    marker = new_marker()
    result = await run(docker, workspace, f"echo begun; setsid sleep 1000 & sleep 1000 # {marker}", timeout_s=0.7)
    assert (result.timed_out, result.exit_code) == (True, None) and result.log_tail.startswith("begun\n")
    assert 0.7 <= result.duration_s < 20
    assert processes_with(marker) == [] and docker.containers() == []


async def test_container_background_processes_end_with_the_command(docker: Docker, workspace: Path):
    marker = new_marker()
    result = await run(docker, workspace, f"setsid sleep 1000 {marker} & exit 0 # {marker}")
    assert result.exit_code == 0 and processes_with(marker) == []


async def test_container_cancelled_is_removed(docker: Docker, workspace: Path):
    marker = new_marker()
    work = asyncio.create_task(run(docker, workspace, f"touch begun; sleep 1000 # {marker}", timeout_s=60))
    async with asyncio.timeout(20):
        while not (workspace / "begun").exists():
            await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert processes_with(marker) == [] and docker.containers() == []
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"]


async def test_container_whose_gyre_was_killed_ends_by_itself(docker: Docker, workspace: Path, tmp_path: Path):
    marker = new_marker()
    program = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from gyre_core.rollout.container import ContainerSandbox, ContainerSettings
        sandbox = ContainerSandbox(ContainerSettings(program="docker", image="an/image:1"))
        script = "touch begun; sleep 1000 # {marker}"
        work = sandbox.run(["bash", "-c", script], workspace=Path({str(workspace)!r}), timeout_s=60)
        asyncio.run(work)
    """)
    starter = subprocess.Popen([sys.executable, "-c", program])
    async with asyncio.timeout(30):
        while not (workspace / "begun").exists():
            await asyncio.sleep(0.01)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        while processes_with(marker):
            await asyncio.sleep(0.02)


async def test_container_left_by_a_dead_gyre_is_swept(docker: Docker, workspace: Path):
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        record = {"pid": sleeper.pid, "label": "gyre.owner=999999999-1"}
        (docker.state / "container-gyre-old").write_text(json.dumps(record))
        own = {"pid": 1, "label": f"gyre.owner={os.getpid()}-0"}
        (docker.state / "container-other").write_text(json.dumps(own | {"label": "gyre.owner=not-a-pid"}))
        ContainerSandbox(SETTINGS)
        assert docker.containers() == ["container-other"] and sleeper.wait(10) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize(
    ("mode", "image", "message"),
    [
        ("no-daemon", "an/image:1", "Cannot connect"),
        ("", "another:2", "docker pull another:2"),
        ("", "", "set rollout.container.image"),
    ],
)
def test_container_that_can_never_start_is_refused_at_once(
    docker: Docker, monkeypatch: pytest.MonkeyPatch, mode: str, image: str, message: str
):
    monkeypatch.setenv("FAKE_DOCKER_MODE", mode)
    with pytest.raises(SandboxError, match=message):
        ContainerSandbox(ContainerSettings(program="docker", image=image))


async def test_container_that_does_not_start_is_an_error_not_a_failed_command(
    docker: Docker, workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    sandbox = ContainerSandbox(SETTINGS)
    monkeypatch.setenv("FAKE_DOCKER_MODE", "no-start")
    result = await sandbox.run(["true"], workspace=workspace, timeout_s=20)
    assert result.exit_code is None and "invalid mount config" in result.error
    monkeypatch.setenv("FAKE_DOCKER_MODE", "no-daemon")
    result = await sandbox.run(["true"], workspace=workspace, timeout_s=20)
    assert result.exit_code is None and result.error


async def test_container_without_a_workspace_is_an_error(docker: Docker, tmp_path: Path):
    (tmp_path / "link").symlink_to("/etc")
    for workspace in (tmp_path / "missing", tmp_path / "link"):
        assert "there is no workspace" in (await run(docker, workspace, "true")).error


async def test_container_output_is_bounded_and_never_blocks(docker: Docker, workspace: Path, tmp_path: Path):
    log = tmp_path / "log" / "out.log"
    script = "head -c 3000000 /dev/zero | tr '\\0' x; echo end"
    result = await run(docker, workspace, script, log_path=log, limits={"log_bytes": 100_000})
    assert result.exit_code == 0 and result.log_tail.endswith("xend\n")
    assert stat.S_ISREG(log.stat().st_mode) and log.stat().st_size < 120_000


async def test_container_command_that_does_not_exist_ends_with_127(docker: Docker, workspace: Path):
    result = await ContainerSandbox(SETTINGS).run(["no-such-program"], workspace=workspace, timeout_s=20)
    assert (result.exit_code, result.error) == (127, "")


async def test_container_grades_with_private_tests(docker: Docker, workspace: Path, tmp_path: Path):
    """The whole verifier path: what an agent planted in /logs and /tests has no effect."""
    sandbox = ContainerSandbox(SETTINGS)
    plant = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ls /tests; echo 0.5 > answer"
    agent = await sandbox.run(["bash", "-c", plant], workspace=workspace, timeout_s=20)
    assert "No such file" in agent.log_tail
    test_sh = '[ -z "$(ls -A /logs/verifier)" ] && cat /app/answer > /logs/verifier/reward.txt; echo x > /tests/test.sh'
    problem = make_problem(tmp_path / "p", test_sh=test_sh)
    grade = await grade_workspace(
        problem,
        workspace=workspace,
        sandbox=sandbox,
        grading=GradingConfig(timeout_s=20.0, attempts=1),
        harness=harness_result(),
        num_calls=1,
        scratch=tmp_path / "grading",
    )
    assert (grade.outcome, grade.reward) == (Outcome.FINISHED, 0.5)
    assert (problem.tests_dir / "test.sh").read_text() == test_sh


@pytest.mark.skipif(not os.environ.get("GYRE_TEST_IMAGE"), reason="set GYRE_TEST_IMAGE to an image of a real daemon")
@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_container_of_a_real_daemon(workspace: Path, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    sandbox = ContainerSandbox(ContainerSettings(program=program, image=os.environ["GYRE_TEST_IMAGE"]))
    result = await sandbox.run(["sh", "-c", "pwd; echo new > out; exit 3"], workspace=workspace, timeout_s=60)
    assert (result.exit_code, result.log_tail, result.error) == (3, "/app\n", "")
    assert (workspace / "out").read_text() == "new\n"
    late = await sandbox.run(["sleep", "1000"], workspace=workspace, timeout_s=1.0)
    assert late.timed_out


async def test_environment_of_a_configuration_is_a_container(docker: Docker, workspace: Path):
    values = {"harness": {"command": ["true"]}, "sandbox": "podman"}
    with pytest.raises(ValueError, match=r"needs rollout\.container\.image"):
        RolloutConfig.model_validate(values)
    container = {"image": "an/image:1", "network": "none", "memory_bytes": 10**9}
    environment = open_environment(RolloutConfig.model_validate({**values, "container": container}))
    assert isinstance(environment, ContainerSandbox) and environment.backend == "podman"
    assert (await environment.run(["true"], workspace=workspace, timeout_s=20)).exit_code == 0
    options = docker.run_options()
    assert options[options.index("--network") + 1] == "none"
    assert open_environment(RolloutConfig.model_validate({"harness": {"command": ["true"]}})).backend != "podman"
