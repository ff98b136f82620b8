"""The `gyre` command: errors become one clear message and a non-zero exit code; tracebacks only with GYRE_DEBUG=1.

Standard output holds results (with --json: one JSON object, last line); everything else goes to standard error.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gyre_core.cli import cell_node as further_node
from gyre_core.cli import deploy as deployment
from gyre_core.cli import simulate as simulation
from gyre_core.cli import trace as traces
from gyre_core.cli import up as team
from gyre_core.cli.bench import bench_app
from gyre_core.cli.options import (
    ConfigArgument,
    JsonOption,
    RunsDirOption,
    SetOption,
    print_outcome,
    print_result,
    print_text,
)
from gyre_core.cli.store import store_app
from gyre_core.errors import GyreError
from gyre_core.process import end_with_parent

app = typer.Typer(
    name="gyre",
    help="Elastic reinforcement learning for coding agents. Start with: gyre doctor; gyre train CONFIG; gyre inspect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
simulation.register(app)
deployment.register(app)
team.register(app)
traces.register(app)
further_node.register(app)
problems_app = typer.Typer(
    help="Problems: check what a run would train on, convert other layouts.", no_args_is_help=True
)
app.add_typer(problems_app, name="problems")


@app.command()
def train(
    config: ConfigArgument,
    run: Annotated[str | None, typer.Option("--run", help="name of the run; default: config name and time")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the newest run of this config, or --run's")
    ] = False,
    overrides: SetOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress on standard error")] = False,
    max_wall_s: Annotated[
        float | None,
        typer.Option("--max-wall-s", min=1, help="stop at the step boundary that still fits, to be resumed"),
    ] = None,
) -> None:
    """Train a policy: rollouts, grading, selection, optimizer steps, publication. Ends with one JSON line."""
    from gyre_core.cli.train import run_training

    print_result(
        run_training(config, run_id=run, resume=resume, overrides=overrides or [], quiet=quiet, max_wall_s=max_wall_s)
    )


@app.command()
def evaluate(
    config: ConfigArgument,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="a run's checkpoint folder")] = None,
    run: Annotated[str | None, typer.Option("--run", help="evaluate this run's newest checkpoint")] = None,
    overrides: SetOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress on standard error")] = False,
) -> None:
    """Held-out reward of a policy: the config's own model, or a run's newest checkpoint. Ends with one JSON line."""
    from gyre_core.cli.train import run_evaluation

    print_result(run_evaluation(config, from_run=run, checkpoint=checkpoint, overrides=overrides or [], quiet=quiet))


@app.command()
def inspect(
    run: Annotated[str | None, typer.Argument(help="run (default: the newest)")] = None,
    rollout: Annotated[str | None, typer.Argument(help="rollout id, whole or any unique part of it")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a self-contained page instead of text")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show a run's steps and rollouts, or one rollout's tree with its trained tokens marked."""
    from gyre_core.cli.inspect import inspect_rollout, inspect_run, write_html

    if html is not None:
        result, text = write_html(runs_dir, run, rollout, html)
    elif rollout is None:
        result, text = inspect_run(runs_dir, run)
    else:
        result, text = inspect_rollout(runs_dir, run or "", rollout)
    print_text(result, text, as_json)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="run", show_default=False)],
    step: Annotated[int, typer.Option("--step", help="step, from 1 as `gyre inspect` counts", show_default=False)],
    settings: Annotated[list[str] | None, typer.Argument(help="with --reselect: J=3, min_group=2, ...")] = None,
    regrade: Annotated[bool, typer.Option("--regrade", help="grade kept workspaces with today's verifiers")] = False,
    reselect: Annotated[bool, typer.Option("--reselect", help="select with other settings and compare")] = False,
    retrain: Annotated[bool, typer.Option("--retrain", help="train again; must give the same bits")] = False,
    role_order: Annotated[str | None, typer.Option("--role-order", help="with --reselect: main,sub-agent,...")] = None,
    problems: Annotated[Path | None, typer.Option("--problems", help="with --regrade: another folder of them")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Tell a stored step again: check it, or --reselect, --regrade, --retrain it. Writes nothing to the run's store.

    Exit code 1 when what is computed again is not what is stored.
    """
    from gyre_core.cli.replay import run_replay

    result, text = run_replay(
        runs_dir,
        run,
        step,
        chosen={"regrade": regrade, "reselect": reselect, "retrain": retrain},
        settings=settings or [],
        role_order=role_order,
        problems=problems,
    )
    print_outcome(result, text, as_json)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="check a configuration instead: layout, memory, staleness; no GPU")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="with --config: TOML with the machines and a cell's layout")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report what this machine has and lacks, with the command that mends it. Exit code 1 when something lacks."""
    from gyre_core.doctor import run_checks

    if config is None:
        checks = run_checks()
    else:
        from gyre_core.config import load_run_config
        from gyre_core.doctor_config import config_checks
        from gyre_core.sizing import read_cluster

        machines = None if cluster is None else read_cluster(cluster)
        checks = config_checks(load_run_config(config, overrides or []), machines)
    missing = [check for check in checks if check.ok == "missing"]
    if as_json:
        rows = [
            {"name": check.name, "ok": check.ok, "detail": check.detail, "fix": check.fix_command} for check in checks
        ]
        print_result({"ok": not missing, "checks": rows})
    else:
        for check in checks:
            mark = {"ok": "ok     ", "warn": "warn   ", "missing": "MISSING"}[check.ok]
            sys.stdout.write(f"{mark} {check.name}: {check.detail}\n")
            if check.fix_command:
                sys.stdout.write(f"        mend it with: {check.fix_command}\n")
    if missing:
        raise typer.Exit(1)


@app.command()
def ui(
    runs_dir: RunsDirOption = Path("runs"),
    port: Annotated[int, typer.Option(help="port of the UI; 0: any free one")] = 4200,
) -> None:
    """Serve the Prefect UI on the database of a folder of runs, until interrupted."""
    from gyre_core.cli.ui import serve_ui

    serve_ui(runs_dir, port)


@app.command()
def proxy(settings: Annotated[Path, typer.Option("--settings", help="JSON file of ProxySettings")]) -> None:
    """Run one proxy process (a run starts its own)."""
    from gyre_core.proxy.__main__ import main as proxy_main

    sys.argv = ["gyre proxy", "--settings", str(settings)]
    proxy_main()


@app.command()
def cell(settings: Annotated[Path, typer.Option("--settings", help="JSON file of CellSettings")]) -> None:
    """Run one cell host (a run starts its own)."""
    from gyre_core.cells.__main__ import main as cell_main

    sys.argv = ["gyre cell", "--settings", str(settings)]
    cell_main()


@problems_app.command(name="check")
def check_problems_command(
    source: Annotated[Path, typer.Argument(help="folder of problems, or manifest.toml#split", show_default=False)],
    run_solution: Annotated[
        bool, typer.Option("--run-solution", help="run solution/solve.sh and the verifier in a sandbox; expect 1")
    ] = False,
    sandbox: Annotated[str, typer.Option(help="auto, bubblewrap or namespaces")] = "auto",
    timeout_s: Annotated[float, typer.Option(help="of a verifier whose task names no limit")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """List what is wrong with each problem. Exit code 1 when something is."""
    from gyre_core.cli.problems import check_problems

    result, text = check_problems(source, run_solution=run_solution, sandbox=sandbox, timeout_s=timeout_s)
    print_outcome(result, text, as_json)


@problems_app.command(name="convert")
def convert_problems_command(
    source: Annotated[Path, typer.Argument(help="a task with task.yaml, or a folder of them", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="folder that gets one folder a problem", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Convert tasks of terminal-bench's first layout. Exit code 1 when one could not be converted."""
    from gyre_core.cli.problems import convert_problems

    result, text = convert_problems(source, destination)
    print_outcome(result, text, as_json)


def main() -> None:
    """Entry point of the `gyre` script."""
    end_with_parent()  # one that a benchmark started
    try:
        app()
    except (GyreError, ValueError) as error:
        if os.environ.get("GYRE_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; continue a training run with `gyre train CONFIG --resume`\n")
        sys.exit(130)
