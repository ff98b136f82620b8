"""`gyre simulate` and `gyre plan`: what a schedule does, on the real scheduler's code, without a GPU."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_core.cli.options import JsonOption, RunsDirOption, print_text
from gyre_core.errors import ConfigError


def simulate_command(
    preset: Annotated[
        str | None, typer.Option("--preset", help="terminal, deepswe, nl2repo-122b, nl2repo-2.4t (the default)")
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="a stored run: its own measured work")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="optimizer steps; default: the preset's or run's")] = None,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="of the batches (repeatable)")] = None,
    sweep: Annotated[str | None, typer.Option(help="move one parameter: tail=0.5,1,2 or cells=2,4,8")] = None,
    pictures: Annotated[Path | None, typer.Option(help="folder that gets PNGs and one HTML page")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """One workload under every policy: hours, ratios, and the residuals to what is published.

    With --trace the workload is a stored run's, and its own policy's speed stands beside the measured one.
    """
    from gyre_core.cli.simulate_text import comparison_text, sweep_text
    from gyre_core.sim.compare import compare
    from gyre_core.sim.page import write_pictures
    from gyre_core.sim.presets import HELD_OUT_SEEDS, find_preset
    from gyre_core.sim.sweep import parse_sweep
    from gyre_core.sim.sweep import sweep as run_sweep

    if preset is not None and trace is not None:
        raise ConfigError("give --preset or --trace, not both")
    if trace is not None:
        if sweep is not None:
            raise ConfigError("--sweep needs a --preset")
        result, text = _simulate_trace(runs_dir, trace, steps)
        print_text(result, text, as_json)
        return
    chosen = find_preset(preset or "nl2repo-2.4t")
    seeds = seed or HELD_OUT_SEEDS[:1]
    if sweep is not None:
        name, values = parse_sweep(sweep)
        swept = run_sweep(chosen.scenario, name, values, seed=seeds[0], steps=steps or 12, report=_progress)
        print_text(swept, sweep_text(swept), as_json)
        return
    result = compare(chosen, steps=steps, seeds=seeds, report=_progress)
    if pictures is not None:
        result["files"] = write_pictures(pictures, chosen, result, seed=seeds[0])
    print_text(result, comparison_text(result), as_json)


def plan_command(
    workload: Annotated[str, typer.Argument(help="a preset's name, or a stored run (see --runs-dir)")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs in all, 8 a node")],
    max_staleness: Annotated[int, typer.Option(min=0, max=8, help="largest k that training may bear")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="rows of the table")] = 8,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="of the batches (repeatable)")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Cells, split, phi, mu and slots for a workload on so many GPUs, fastest first, with what limits each."""
    from gyre_core.cli.simulate_text import plan_text
    from gyre_core.sim.plan import plan
    from gyre_core.sim.presets import HELD_OUT_SEEDS, PRESETS
    from gyre_core.sim.trace import read_trace

    scenario = PRESETS[workload].scenario if workload in PRESETS else read_trace(runs_dir, workload).as_workload()
    result = plan(
        scenario, gpus=gpus, max_staleness=max_staleness, rows=rows, seeds=seed or HELD_OUT_SEEDS, report=_progress
    )
    result["workload"] = workload
    print_text(result, plan_text(result), as_json)


def _simulate_trace(runs_dir: Path, run: str, steps: int | None) -> tuple[dict[str, Any], str]:
    from gyre_core.cli.simulate_text import trace_text
    from gyre_core.scheduler.policy import POLICIES
    from gyre_core.sim.trace import read_trace, trace_json
    from gyre_core.sim.world import simulate

    trace = read_trace(runs_dir, run)
    scenario = trace.scenario if steps is None else replace(trace.scenario, steps=steps)
    several = scenario.cluster.cells > 1
    policies = [name for name in POLICIES if several or not name.startswith("async")]
    results = {name: simulate(scenario, name, source=trace.source) for name in policies}
    result = {
        **trace_json(trace, results[trace.policy]),
        "steps_per_hour": {name: round(one.steps_per_hour, 2) for name, one in results.items()},
        "policies": {name: one.as_json() for name, one in results.items()},
    }
    return result, trace_text(result)


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def register(app: typer.Typer) -> None:
    """Add the commands to `gyre`."""
    app.command(name="simulate")(simulate_command)
    app.command(name="plan")(plan_command)
