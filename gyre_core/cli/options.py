"""What the commands share: arguments that several take, and how a result is printed.

Standard output holds results (with --json: one JSON object, last line); everything else goes to standard error.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigArgument = Annotated[Path, typer.Argument(help="run configuration (TOML)", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="folder of runs")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a key: --set train.steps=4 (repeatable)")]


def print_result(result: dict[str, Any]) -> None:
    """One line of JSON on standard output, the last thing a command prints there."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def print_text(result: dict[str, Any], text: str, as_json: bool) -> None:
    """The result for a program or the text for a person."""
    if as_json:
        print_result(result)
    else:
        sys.stdout.write(text + "\n")


def print_outcome(result: dict[str, Any], text: str, as_json: bool) -> None:
    """The same, and exit code 1 when the result is not `ok`."""
    print_text(result, text, as_json)
    if not result["ok"]:
        raise typer.Exit(1)
