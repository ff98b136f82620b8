"""Set-up of a bare machine: what is decided from files, what a cut-off build leaves, what a user is told."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "infra/setup"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SETUP / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plan = load("plan")
install = load("install")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that set-up looks at, in another folder."""
    root = tmp_path / "clone"
    (root / "infra").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(SETUP, root / "infra/setup")
    shutil.copytree(ROOT / "infra/engine", root / "infra/engine", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    return root


def built(clone: Path, environment, state: str = "ready") -> None:
    """What a finished (or other) build leaves."""
    (environment.folder / "bin").mkdir(parents=True)
    (environment.folder / "bin/python").touch()
    (environment.folder / plan.MARKER).write_text(plan.marker_text(environment, clone, state))


def test_decide_goes_from_nothing_over_half_built_to_up_to_date(clone: Path) -> None:
    environment = plan.gyre_environment(clone, gpu=False)
    assert plan.decide(environment, clone)[0] is plan.Decision.REBUILD
    built(clone, environment, "building")
    assert plan.decide(environment, clone) == (plan.Decision.REBUILD, "an earlier set-up did not finish")
    (environment.folder / plan.MARKER).write_text(plan.marker_text(environment, clone, "ready"))
    assert plan.decide(environment, clone)[0] is plan.Decision.KEEP
    (environment.folder / plan.MARKER).write_text("{")
    assert plan.decide(environment, clone)[0] is plan.Decision.REBUILD


def test_decide_leaves_an_environment_of_somebody_else_alone(clone: Path) -> None:
    environment = plan.gyre_environment(clone, gpu=False)
    (environment.folder / "bin").mkdir(parents=True)
    assert plan.decide(environment, clone)[0] is plan.Decision.REFUSE


@pytest.mark.parametrize("change", ["root", "python"])
def test_decide_rebuilds_what_was_moved_or_is_of_another_python(clone: Path, change: str) -> None:
    environment = plan.gyre_environment(clone, gpu=False)
    built(clone, environment)
    marker = environment.folder / plan.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), change: "other"}))
    decision, reason = plan.decide(environment, clone)
    assert decision is plan.Decision.REBUILD and "other" in reason
    (environment.folder / "bin/python").unlink()
    assert plan.decide(environment, clone)[0] is plan.Decision.REBUILD


def test_inputs_change_with_requirements_and_not_with_linter_settings(clone: Path) -> None:
    before = plan.gyre_environment(clone, gpu=False).inputs
    text = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(text.replace("line-length = 120", "line-length = 100"))
    assert plan.gyre_environment(clone, gpu=False).inputs == before
    (clone / "pyproject.toml").write_text(text.replace('"anyio>=4.9"', '"anyio>=4.10"'))
    assert plan.gyre_environment(clone, gpu=False).inputs != before
    (clone / "pyproject.toml").write_text(text)
    with (clone / "infra/setup/constraints.txt").open("a") as constraints:
        constraints.write("more==1\n")
    assert plan.gyre_environment(clone, gpu=False).inputs != before
    assert plan.gyre_environment(clone, gpu=True).inputs != before


def test_engine_inputs_change_with_the_plugin_and_not_with_its_build_products(clone: Path) -> None:
    before = plan.engine_environment(clone, gpu=False).inputs
    plugin = clone / "infra/engine/plugin"
    (plugin / "build/lib").mkdir(parents=True)
    (plugin / "build/lib/hooks.py").write_text("old = 1\n")
    assert plan.engine_environment(clone, gpu=False).inputs == before
    source = next(path for path in plugin.rglob("*.py") if "build" not in path.parts)
    source.write_text(source.read_text() + "\n")
    assert plan.engine_environment(clone, gpu=False).inputs != before


def test_inputs_do_not_depend_on_where_the_clone_lies(clone: Path) -> None:
    assert plan.gyre_environment(clone, gpu=False).inputs == plan.gyre_environment(ROOT, gpu=False).inputs


def test_steps_torch_comes_first_and_its_build_fits_the_machine(clone: Path) -> None:
    for environment in (plan.gyre_environment(clone, gpu=False), plan.engine_environment(clone, gpu=False)):
        assert environment.steps[1].args == ("install", "torch==2.13.0+cpu")
        assert environment.steps[1].alternatives[-1] == ("install", "torch==2.13.0")
    gpu = plan.gyre_environment(clone, gpu=True)
    assert gpu.steps[1].args == ("install", "torch==2.13.0")
    assert any("[gpu,quickstart]" in arg for arg in gpu.steps[2].args)
    assert "untested" in gpu.what


def test_constraints_agree_with_every_requirement() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = dict(
        line.split("==") for line in (SETUP / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = project["project"]["optional-dependencies"]
    wanted = project["project"]["dependencies"] + extras["cpu"] + extras["quickstart"]
    for text in wanted + project["dependency-groups"]["dev"]:
        requirement = Requirement(text)
        version = pins[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{text}: constraints.txt has {version}"
    assert not [pin for pin in pins.values() if "/" in pin or "+" in pin]


def test_engine_constraints_agree_with_its_requirements() -> None:
    def pins(name: str) -> set[str]:
        lines = (ROOT / "infra/engine" / name).read_text().lower().replace("_", "-").splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    assert pins("requirements-cpu.txt") <= pins("constraints-cpu.txt")
    assert {"torch==2.13.0", "sglang==0.5.23", "torchvision==0.28.0", "xgrammar==0.2.7"} <= pins("constraints-cpu.txt")


def test_build_that_fails_says_why_and_stays_half_built_until_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "LOGS", tmp_path)
    bad = plan.Environment("tiny", tmp_path / "env", "a test", 0, 0, (), "raise SystemExit('the cause')", "hash")
    with (tmp_path / "lock").open("w") as lock:
        with pytest.raises(install.InstallError, match=r"tiny: step 2/2 check failed[\s\S]*the cause"):
            install.build(bad, plan.Decision.REBUILD, lock)
        assert plan.decide(bad, tmp_path)[0] is plan.Decision.REBUILD
        install.build(
            replace(bad, check="import sys; assert sys.prefix != sys.base_prefix"), plan.Decision.UPDATE, lock
        )
    assert plan.decide(bad, tmp_path)[0] is plan.Decision.KEEP


def test_versions_check_passes_only_what_is_as_pinned() -> None:
    from importlib.metadata import version

    def run(pin: str) -> subprocess.CompletedProcess[str]:
        code = plan._versions_check("pytest==" + version("pytest"), pin)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run("packaging==" + version("packaging")).returncode == 0
    wrong = run("packaging==1.0")
    assert wrong.returncode == 1 and f"not as pinned: packaging {version('packaging')}" in wrong.stderr
    assert run("no-such-distribution==1").returncode == 1


def test_announce_too_little_disk_is_refused_with_the_numbers(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = plan.gyre_environment(clone, gpu=False)
    usage = shutil.disk_usage(clone)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _path: usage._replace(free=int(1e9)))
    with pytest.raises(install.InstallError, match=r"has 1\.0 GB free, the set-up needs 3\.5 GB"):
        install._announce([(environment, plan.Decision.REBUILD, "not there")], gpu=False)
    assert "about" in capsys.readouterr().err


def test_announce_refuses_to_touch_a_foreign_environment(clone: Path) -> None:
    environment = plan.gyre_environment(clone, gpu=False)
    with pytest.raises(install.InstallError, match=r"left alone; move it away or remove it: rm -rf .*\.venv"):
        install._announce([(environment, plan.Decision.REFUSE, "was not made by this script")], gpu=False)


def test_provide_libibverbs_without_root_or_apt_says_the_command_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_loads", lambda _library: False)
    monkeypatch.setattr(install.os, "geteuid", lambda: 1000)
    install.provide_libibverbs()
    told = capsys.readouterr().err
    assert "sudo apt-get install -y --no-install-recommends libibverbs1" in told
    assert "local files" in told


def test_setup_without_a_usable_python_says_what_to_install(tmp_path: Path) -> None:
    fake = tmp_path / "python3.11"
    fake.write_text("#!/bin/sh\nexit 127\n")  # a shim that leads nowhere
    fake.chmod(0o755)
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        ["bash", str(SETUP / "setup.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Python 3.11 or later" in done.stderr and "GYRE_PYTHON" in done.stderr


def test_setup_python_without_venv_names_the_package(tmp_path: Path) -> None:
    fake = tmp_path / "python3.11"
    fake.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SETUP / "setup.sh")],
        env={"PATH": os.environ["PATH"], "GYRE_PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "apt-get install -y python3" in done.stderr and "-venv" in done.stderr
