"""docs/commands.md from the command line itself: `python infra/docs/cli_reference.py` writes it, `--check` compares."""

from collections.abc import Iterator
from typing import Any

import typer
from generated import write_or_check

from gyre_core.cli.main import app

HEAD = """# Commands

`gyre COMMAND --help` says the same. This page is made from the code: `python infra/docs/cli_reference.py`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, command in commands(typer.main.get_command(app), "gyre"):
        context = command.make_context(name, [], resilient_parsing=True)
        pieces = " ".join(piece for piece in command.collect_usage_pieces(context))
        parts.append(f"\n## {name}\n\n```\n{name} {pieces}\n```\n")
        parts.append(" ".join((command.help or "").split("\f")[0].split()) + "\n")
        rows = [record for one in command.params if (record := _row(one)) is not None]
        if rows:
            parts.append("\n".join(["| option | what it does |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name."""
    context = command.make_context(name, [], resilient_parsing=True)
    if hasattr(command, "list_commands"):  # a group; Typer's own class, whatever it is derived from
        for key in command.list_commands(context):
            below = command.get_command(context, key)
            if below is not None and not below.hidden:
                yield from commands(below, f"{name} {key}")
    else:
        yield name, command


def _row(parameter: Any) -> str | None:
    if "--help" in parameter.opts or getattr(parameter, "hidden", False):
        return None
    names = ", ".join(parameter.opts)
    if parameter.param_type_name == "argument":
        names = parameter.name.upper()
    text = " ".join(str(getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if default is not None and not callable(default) and default is not False and default != () and default != []:
        text = f"{text} (default: {default})".strip()
    return f"| `{names}` | {text} |".replace("\n", " ")


if __name__ == "__main__":
    raise SystemExit(write_or_check("commands.md", page, "infra/docs/cli_reference.py", __doc__))
