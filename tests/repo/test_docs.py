"""The documentation: pages made from code are those of this code, every page is in the navigation, commands exist."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "infra" / "docs"))

import cli_reference  # noqa: E402  (a script's folder, not a package)
import config_reference  # noqa: E402
import hooks  # noqa: E402

PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")


def test_configuration_page_is_what_the_models_say() -> None:
    assert (DOCS / "configuration.md").read_text() == config_reference.page(), "python infra/docs/config_reference.py"


def test_commands_page_is_what_the_command_line_says() -> None:
    assert (DOCS / "commands.md").read_text() == cli_reference.page(), "python infra/docs/cli_reference.py"


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def pages_of(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for below in node.values() if isinstance(node, dict) else node:  # type: ignore[attr-defined]
            yield from pages_of(below)


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_code_blocks_exist_with_their_options(page: Path) -> None:
    known = {
        name: {option for one in command.params for option in one.opts}
        for name, command in cli_reference.commands(cli_reference.typer.main.get_command(cli_reference.app), "gyre")
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong = []
    for block in [*code_blocks(page, ""), *code_blocks(page, "(?:bash|sh|console)")]:
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("#")[0].strip()
            for found in re.finditer(r"(?:^|[\s(])(?:\S*/)?gyre ([a-z][^|;&)]*)", line):
                words = found[1].split()
                name = next((n for n in (f"gyre {' '.join(words[:2])}", f"gyre {words[0]}") if n in known), None)
                options = set(_OPTION.findall(found[1])) - {"--help"}
                if name is None or not options <= known[name]:
                    wrong.append(f"{found[0].strip()}: {options - known.get(name or '', set()) or 'no such command'}")
            for target in re.findall(r"^make ([a-z-]+)", line):
                if target not in targets:
                    wrong.append(f"make {target}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_toml_blocks_name_sections_and_keys_of_the_configuration(page: Path) -> None:
    models = dict(config_reference.sections(config_reference.RunConfig, ""))
    unknown = []
    for block in code_blocks(page, "toml"):
        tree = tomllib.loads(block)
        if page.name == "problems.md" and not tree.keys() & models.keys():
            continue  # a list of problems
        for section, values in tree.items():
            model = models.get(section)
            if model is None:
                unknown.append(section)
            elif isinstance(values, dict):
                unknown += [f"{section}.{key}" for key in values if key not in model.model_fields]
    assert not unknown


def test_links_out_of_the_site_become_names() -> None:
    text = "see [the file](../infra/prefect.yaml), [README](../../README.md) and [cells](elastic.md#faults)"
    assert hooks.on_page_markdown(text) == (
        "see the file (`infra/prefect.yaml`), README (`README.md`) and [cells](elastic.md#faults)"
    )


def test_the_quickstarts_own_problem_is_one(tmp_path: Path) -> None:
    """The page's commands make a problem that `gyre problems check --run-solution` accepts."""
    (block,) = code_blocks(DOCS / "quickstart.md", "sh")
    subprocess.run(["bash", "-eu", "-c", block], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "gyre_core.cli", "problems", "check", "my-problems", "--run-solution"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "find-elbow: solution 1, untouched below 1" in done.stdout
