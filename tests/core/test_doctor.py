"""What the doctor says about good and bad machines."""

import json
import socket
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from gyre_core import doctor
from gyre_core.doctor import (
    check_chromium,
    check_cores,
    check_disk,
    check_engine,
    check_memory,
    check_mooncake,
    check_packages,
    check_port,
    check_sandbox,
    run_checks,
)
from gyre_core.engine.launch import EngineInstall


def install(**changes) -> EngineInstall:
    fields = {
        "python": Path("/x/python"),
        "sglang": "0.5.23",
        "plugin": "0.1.0",
        "torch": "2.13.0+cpu",
        "mooncake": True,
        "mooncake_error": "",
    }
    return EngineInstall(**{**fields, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    python = tmp_path / ".venv-engine/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    return tmp_path


def test_packages_wrong_and_absent_versions_are_named_with_what_is_wanted() -> None:
    versions = {"torch": "2.12.0", "prefect": "3.9.1"}
    check = check_packages(["torch==2.13.0", "prefect==3.9.1", "s3fs>=2026"], versions.get)
    assert (check.ok, check.fix_command) == ("missing", "make install")
    assert "torch is 2.12.0 (wanted: ==2.13.0)" in check.detail
    assert "s3fs is not installed (wanted: >=2026)" in check.detail
    assert "prefect" not in check.detail


def test_packages_local_builds_and_other_extras_are_fine() -> None:
    requirements = [
        "torch==2.13.0",
        'mooncake-transfer-engine==1; extra == "gpu"',
        'anthropic==0.75.0; extra == "quickstart"',
    ]
    check = check_packages(requirements, {"torch": "2.13.0+cpu", "anthropic": "0.75.0"}.get)
    assert (check.ok, check.detail) == ("ok", "2 packages as pinned: torch 2.13.0+cpu")
    check = check_packages(requirements, {"torch": "2.13.0+cpu"}.get)
    assert check.ok == "missing" and "anthropic" in check.detail


def test_engine_whole_installation_is_ok(root: Path) -> None:
    checks = check_engine(root, lambda _python: install())
    assert [(check.name, check.ok) for check in checks] == [
        ("engine", "ok"),
        ("engine plugin", "ok"),
        ("engine mooncake", "ok"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sglang": None}, "no sglang"),
        ({"sglang": "0.5.24"}, "0.5.23 only"),
        ({"plugin": None}, "lacks the CPU platform"),
    ],
)
def test_engine_broken_installations_name_make_engine(root: Path, changes: dict, message: str) -> None:
    (check,) = check_engine(root, lambda _python: install(**changes))
    assert (check.ok, check.fix_command) == ("missing", "make engine")
    assert message in check.detail


def test_engine_without_mooncake_is_a_warning(root: Path) -> None:
    check = check_engine(root, lambda _python: install(mooncake=False, mooncake_error="no libibverbs"))[-1]
    assert check.ok == "warn" and check.fix_command
    assert "no libibverbs" in check.detail and "local files" in check.detail


def test_engine_absent_or_half_built_names_make_engine(root: Path) -> None:
    (root / ".venv-engine/.gyre-env.json").write_text(json.dumps({"state": "building"}))
    (check,) = check_engine(root, lambda _python: install())
    assert (check.ok, check.fix_command) == ("missing", "make engine")
    assert "did not finish" in check.detail


def test_mooncake_that_does_not_load_is_a_warning_with_the_last_line() -> None:
    check = check_mooncake([sys.executable, "-c", "raise ImportError('libibverbs.so.1: cannot open')"])
    assert check.ok == "warn"
    assert "ImportError: libibverbs.so.1: cannot open" in check.detail


def test_sandbox_says_which_works_or_why_none_does() -> None:
    assert check_sandbox(lambda _backend: "").detail == "bubblewrap works; namespaces work too"
    only_namespaces = check_sandbox({"bubblewrap": "bwrap is absent", "namespaces": ""}.__getitem__)
    assert (only_namespaces.ok, only_namespaces.detail) == ("ok", "namespaces work (bubblewrap: bwrap is absent)")
    none = check_sandbox(lambda backend: f"{backend} is forbidden")
    assert none.ok == "missing" and none.fix_command
    assert "bubblewrap is forbidden" in none.detail and "namespaces is forbidden" in none.detail


def test_resources_have_three_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    for free_gb, wanted in ((0.1, "missing"), (1.0, "warn"), (50.0, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path, free_gb=free_gb: usage(0, 0, free_gb * 1e9))
        assert check_disk(tmp_path).ok == wanted
    assert [check_memory(gb).ok for gb in (1.0, 4.0, 20.0)] == ["missing", "warn", "ok"]
    assert [check_cores(num).ok for num in (1, 2)] == ["warn", "ok"]


def test_port_taken_is_a_warning_that_says_what_to_set() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        check = check_port(port)
        assert check.ok == "warn" and "--set prefect.port=0" in check.detail
    assert check_port(port).ok == "ok"


def test_chromium_is_optional() -> None:
    assert check_chromium(lambda _name: None).ok == "ok"
    assert check_chromium(lambda name: f"/usr/bin/{name}").detail == "/usr/bin/chromium"


@pytest.mark.integration
def test_run_checks_on_this_machine_covers_every_subject() -> None:
    checks = run_checks()
    names = [check.name for check in checks]
    wanted = [
        "python",
        "packages",
        "engine",
        "mooncake",
        "sandbox",
        "disk",
        "memory",
        "cores",
        "gpu",
        "port",
        "chromium",
    ]
    assert [name for name in names if name in wanted] == wanted
    assert all(check.detail for check in checks)
    by_name = {check.name: check for check in checks}
    assert by_name["python"].ok == by_name["packages"].ok == "ok"
