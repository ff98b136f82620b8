"""Rules of the repository itself: layers, sizes, links, commands, packaging, no paths of a machine."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gyre_core.config import load_run_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gyre_core", "flows", "tasks")
MAX_LINES = 500
LONGER_FOR_A_REASON: dict[str, str] = {}  # path -> why it is one file

# Places of the machines this was written on. Joined here so that this file does not hold them itself.
_PARTS = ("/work", "/"), ("/root", "/"), ("/tmp", "/plan"), ("/opt", "/pypi"), ("/opt", "/wheels"), ("..", "/shared")
MACHINE_PATHS = tuple("".join(parts) for parts in _PARTS)


def tracked_files() -> list[Path]:
    """Files that git tracks, or, where there is no git, all that are not ignored by habit."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        names = [name for name in done.stdout.split("\0") if name]
    else:
        hidden = {".venv", ".venv-engine", ".harnesses", ".git", ".setup", "runs", "__pycache__"}
        names = [
            str(Path(folder, name).relative_to(ROOT))
            for folder, folders, files in os.walk(ROOT)
            if not folders.__setitem__(slice(None), [sub for sub in folders if sub not in hidden])
            for name in files
        ]
    return [path for name in names if (path := ROOT / name).is_file()]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_import_layers_are_kept() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_files_are_short_or_have_a_reason() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
        if path.suffix == ".py"
    }
    assert len(lengths) > 50
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert too_long.keys() <= LONGER_FOR_A_REASON.keys(), f"split these, or give a reason here: {too_long}"
    assert LONGER_FOR_A_REASON.keys() <= lengths.keys()


def test_files_name_no_machines_paths() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in {".safetensors", ".png", ".parquet", ".npz"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {place}" for place in MACHINE_PATHS if place in text]
    assert not found


def test_code_has_no_unfinished_parts() -> None:
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b|raise NotImplementedError")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert not found


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_documents_name_commands_that_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)(?=[\s`]|$)", text)) - {"and"}
    assert named and named <= make_targets(), named - make_targets()


def test_readme_names_gyre_commands_that_exist() -> None:
    import typer

    from gyre_core.cli.main import app

    commands = typer.main.get_command(app)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\.venv/bin/gyre ([a-z]+)", text))
    known = set(commands.list_commands(None))  # type: ignore[attr-defined]
    assert named and named <= known, named - known


def test_documents_links_lead_somewhere() -> None:
    broken = []
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)\)?", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


def test_makefile_targets_are_listed_by_help() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make ([a-z-]+)", done.stdout, re.MULTILINE)) == make_targets()


def test_makefile_prints_nothing_after_the_command(tmp_path: Path) -> None:
    """The last line of `make quickstart` is the command's own."""
    (tmp_path / "infra/setup").mkdir(parents=True)
    (tmp_path / "infra/setup/setup.sh").write_text("echo set-up >&2\n")
    gyre = tmp_path / ".venv/bin/gyre"
    gyre.parent.mkdir(parents=True)
    gyre.write_text('#!/bin/sh\necho \'{"run": "x"}\'\n')
    gyre.chmod(0o755)
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "quickstart"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines()[-1] == '{"run": "x"}'
    assert done.stderr == "set-up\n"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/run.toml")), ids=lambda path: path.parent.name)
def test_examples_configs_load(path: Path) -> None:
    assert load_run_config(path).name


def test_distribution_is_installed_as_described() -> None:
    described = project()["project"]
    assert metadata.version(described["name"]) == described["version"]
    assert "Private :: Do Not Upload" in described["classifiers"]
    assert (ROOT / "gyre_core/py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]
    entry = next(point for point in metadata.entry_points(group="console_scripts") if point.name == "gyre")
    assert entry.value == "gyre_core.cli:main"


def test_packages_have_no_module_named_like_the_standard_library_or_a_dependency() -> None:
    dependencies = {Requirement(text).name.replace("-", "_") for text in project()["project"]["dependencies"]}
    taken = sys.stdlib_module_names | dependencies
    assert not {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} & taken
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "infra/setup").rglob("__init__.py"))


def test_changelog_fragments_have_a_kind_and_a_text() -> None:
    kinds = {kind["directory"] for kind in project()["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    for path in fragments:
        assert re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(kinds)})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip()


def test_ci_script_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "make test" in text and "make lint" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
