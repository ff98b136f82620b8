"""The `gyre` command: errors become one clear message and a non-zero exit code; tracebacks only with GYRE_DEBUG=1.

Standard output holds results (with --json: one JSON object, last line); everything else goes to standard error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_core.cli.store import store_app
from gyre_core.errors import GyreError

app = typer.Typer(
    name="gyre",
    help="Elastic reinforcement learning for coding agents. Start with: gyre doctor; gyre train CONFIG; gyre inspect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measurements: each prints a table, or one JSON object with --json.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
problems_app = typer.Typer(
    help="Problems: check what a run would train on, convert other layouts.", no_args_is_help=True
)
app.add_typer(problems_app, name="problems")

ConfigArgument = Annotated[Path, typer.Argument(help="run configuration (TOML)", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="folder of runs")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a key: --set train.steps=4 (repeatable)")]


def print_result(result: dict[str, Any]) -> None:
    """One line of JSON on standard output, the last thing a command prints there."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


@app.command()
def train(
    config: ConfigArgument,
    run: Annotated[str | None, typer.Option("--run", help="name of the run; default: config name and time")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the newest run of this config, or --run's")
    ] = False,
    overrides: SetOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress on standard error")] = False,
) -> None:
    """Train a policy: rollouts, grading, selection, optimizer steps, publication. Ends with one JSON line."""
    from gyre_core.cli.train import run_training

    print_result(run_training(config, run_id=run, resume=resume, overrides=overrides or [], quiet=quiet))


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
    if as_json:
        print_result(result)
    else:
        sys.stdout.write(text + "\n")


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
    if as_json:
        print_result(result)
    else:
        sys.stdout.write(text + "\n")
    if not result["ok"]:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Report what this machine has and lacks, with the command that mends it. Exit code 1 when something lacks."""
    from gyre_core.doctor import run_checks

    checks = run_checks()
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


@bench_app.command()
def parity(
    run: Annotated[str | None, typer.Argument(help="run (default: the newest)")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    synthetic: Annotated[bool, typer.Option("--synthetic", help="only random models and trees: needs no run")] = False,
    as_json: JsonOption = False,
) -> None:
    """Sampler against trainer log-probs on a recorded run, and tree-packed against branch-by-branch training."""
    from gyre_core.bench.parity import bench_parity, synthetic_parity

    result = synthetic_parity() if synthetic else bench_parity(runs_dir, run)
    if as_json:
        print_result(result)
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:36s} {value}\n")


@bench_app.command()
def tree(
    tokens: Annotated[int, typer.Option(help="tokens of the rollout, each shared prefix counted once")] = 700_000,
    calls: Annotated[int, typer.Option(help="model calls of the rollout")] = 500,
    seed: Annotated[int, typer.Option(help="of the synthetic rollout")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Record a synthetic rollout of many calls: build time, memory for each unique token, journal and seal."""
    from gyre_core.bench.tree import bench_tree, tree_rows

    result = bench_tree(num_tokens=tokens, num_calls=calls, seed=seed)
    if as_json:
        print_result(result)
    else:
        for name, value in tree_rows(result):
            sys.stdout.write(f"{name:20s} {value}\n")


@bench_app.command(name="select")
def bench_select_command(
    rollouts: Annotated[int, typer.Option(help="rollouts, in groups of 16")] = 1000,
    calls: Annotated[int, typer.Option(help="model calls of one rollout")] = 500,
    tokens: Annotated[int, typer.Option(help="tokens of one rollout, each shared prefix counted once")] = 200_000,
    branching: Annotated[float, typer.Option(help="scales sub-agents, retries and steps back")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the synthetic rollouts and the selection")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Graded rollouts to training branches: tokens a second, and what a cap J and shared prefixes save in training."""
    from gyre_core.bench.select import bench_select, select_rows

    result = bench_select(num_rollouts=rollouts, num_calls=calls, num_tokens=tokens, seed=seed, branching=branching)
    if as_json:
        print_result(result)
    else:
        sys.stdout.write("\n".join(select_rows(result)) + "\n")


@bench_app.command(name="proxy")
def bench_proxy_command(
    quick: Annotated[bool, typer.Option("--quick", help="a part of the table, in about a minute")] = False,
    without_litellm: Annotated[bool, typer.Option("--without-litellm", help="measure Gyre's proxy alone")] = False,
    litellm_venv: Annotated[
        Path, typer.Option(help="environment that LiteLLM is installed into on demand (from the configured index)")
    ] = Path(".bench/litellm"),
    as_json: JsonOption = False,
) -> None:
    """What the proxy adds to a call, beside what LiteLLM's proxy adds: same client, same engine, same rounds."""
    from gyre_core.bench.proxy import FULL, QUICK, bench_proxy, proxy_lines

    result = bench_proxy(
        QUICK if quick else FULL,
        litellm_environment=None if without_litellm else litellm_venv,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        print_result(result)
    else:
        sys.stdout.write("\n".join(proxy_lines(result)) + "\n")


@bench_app.command(name="transfer")
def bench_transfer_command(
    size: Annotated[
        list[int] | None, typer.Option("--size", help="MiB of a buffer (repeatable); default: 256 and 512")
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds; the median counts")] = 9,
    without_mooncake: Annotated[bool, typer.Option("--without-mooncake", help="leave Mooncake out")] = False,
    as_json: JsonOption = False,
) -> None:
    """Buffers of the size of weights and gradients between two processes: Mooncake, a plain socket, shared memory."""
    from gyre_core.bench.transfer import WEIGHTS_AND_GRADIENTS_MIB, bench_transfer, transfer_lines

    sizes = size or list(WEIGHTS_AND_GRADIENTS_MIB)
    result = bench_transfer(sizes, rounds=rounds, with_mooncake=not without_mooncake)
    if as_json:
        print_result(result)
    else:
        sys.stdout.write("\n".join(transfer_lines(result)) + "\n")


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
    _print_outcome(result, text, as_json)


@problems_app.command(name="convert")
def convert_problems_command(
    source: Annotated[Path, typer.Argument(help="a task with task.yaml, or a folder of them", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="folder that gets one folder a problem", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Convert tasks of terminal-bench's first layout. Exit code 1 when one could not be converted."""
    from gyre_core.cli.problems import convert_problems

    result, text = convert_problems(source, destination)
    _print_outcome(result, text, as_json)


def _print_outcome(result: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_result(result)
    else:
        sys.stdout.write(text + "\n")
    if not result["ok"]:
        raise typer.Exit(1)


@bench_app.command("store")
def bench_store_command(
    url: Annotated[str | None, typer.Option(help="folder or s3://...; default: a temporary folder")] = None,
    rollouts: Annotated[int, typer.Option(help="synthetic rollouts in one commit")] = 12,
    calls: Annotated[int, typer.Option(help="model calls of a rollout")] = 300,
    tokens: Annotated[int, typer.Option(help="unique tokens of a rollout")] = 500_000,
    repeats: Annotated[int, typer.Option(help="rounds of writing and reading, in turns")] = 15,
    as_json: JsonOption = False,
) -> None:
    """Bytes a token, and write and read speed of the store beside plain pyarrow on the same data."""
    from gyre_core.bench.store import bench_store

    result = bench_store(url, num_rollouts=rollouts, num_calls=calls, num_tokens=tokens, repeats=repeats)
    if as_json:
        print_result(result)
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:26s} {value}\n")


@bench_app.command(name="tree-train")
def bench_tree_train_command(
    quick: Annotated[bool, typer.Option("--quick", help="a small model, in seconds")] = False,
    seed: Annotated[int, typer.Option(help="of the synthetic trees and the weights")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of the trainer")] = 1,
    as_json: JsonOption = False,
) -> None:
    """A training step with shared prefixes computed once and branch by branch, beside what sharing could save."""
    from gyre_core.bench.tree_train import FULL, QUICK, bench_tree_train, tree_train_lines

    result = bench_tree_train(
        QUICK if quick else FULL,
        seed=seed,
        threads=threads,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        print_result(result)
    else:
        sys.stdout.write("\n".join(tree_train_lines(result)) + "\n")


def main() -> None:
    """Entry point of the `gyre` script."""
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
