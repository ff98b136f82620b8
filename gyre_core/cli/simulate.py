"""`gyre simulate` and `gyre plan`: worlds that cost nothing, on the real scheduler's code."""

import sys
from typing import Annotated

import typer

from gyre_core.cli.options import JsonOption, print_text


def simulate_command(
    preset: Annotated[str, typer.Option("--preset", help="terminal, deepswe, nl2repo-122b or nl2repo-2.4t")] = (
        "nl2repo-2.4t"
    ),
    steps: Annotated[int | None, typer.Option(min=2, help="optimizer steps; default: the preset's")] = None,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="of the batches (repeatable)")] = None,
    as_json: JsonOption = False,
) -> None:
    """One workload under every policy: hours, ratios, and the residuals to what is published."""
    from gyre_core.cli.simulate_text import comparison_text
    from gyre_core.sim.compare import compare
    from gyre_core.sim.presets import HELD_OUT_SEEDS, find_preset

    result = compare(find_preset(preset), steps=steps, seeds=seed or HELD_OUT_SEEDS[:1], report=_progress)
    print_text(result, comparison_text(result), as_json)


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def register(app: typer.Typer) -> None:
    """Add the commands to `gyre`."""
    app.command(name="simulate")(simulate_command)
