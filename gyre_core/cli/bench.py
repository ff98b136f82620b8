"""`gyre bench NAME`: measurements; the measuring itself is in gyre_core/bench.

Standard output gets a table, or with --json one JSON object; progress goes to standard error.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_core.cli.options import JsonOption, RunsDirOption, print_text

bench_app = typer.Typer(help="Measurements: each prints a table, or one JSON object with --json.", no_args_is_help=True)


def _columns(rows: Iterable[tuple[str, Any]], width: int) -> str:
    return "\n".join(f"{name:{width}s} {value}" for name, value in rows)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
    print_text(result, _columns(result.items(), 36), as_json)


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
    print_text(result, _columns(tree_rows(result), 20), as_json)


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
    print_text(result, "\n".join(select_rows(result)), as_json)


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
        QUICK if quick else FULL, litellm_environment=None if without_litellm else litellm_venv, report=_report
    )
    print_text(result, "\n".join(proxy_lines(result)), as_json)


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
    print_text(result, "\n".join(transfer_lines(result)), as_json)


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
    print_text(result, _columns(result.items(), 26), as_json)


@bench_app.command(name="tree-train")
def bench_tree_train_command(
    quick: Annotated[bool, typer.Option("--quick", help="a small model, in seconds")] = False,
    seed: Annotated[int, typer.Option(help="of the synthetic trees and the weights")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads of the trainer")] = 1,
    as_json: JsonOption = False,
) -> None:
    """A training step with shared prefixes computed once and branch by branch, beside what sharing could save."""
    from gyre_core.bench.tree_train import FULL, QUICK, bench_tree_train, tree_train_lines

    result = bench_tree_train(QUICK if quick else FULL, seed=seed, threads=threads, report=_report)
    print_text(result, "\n".join(tree_train_lines(result)), as_json)


@bench_app.command(name="switch")
def bench_switch_command(
    calls: Annotated[int, typer.Option(help="live calls at once")] = 8,
    rounds: Annotated[int, typer.Option(help="rounds, each with two role changes in each direction")] = 5,
    tokens: Annotated[int, typer.Option(help="sampled tokens of a call")] = 400,
    as_json: JsonOption = False,
) -> None:
    """Role changes of real tiny cells under live calls, phase by phase, with a KV store and without."""
    from gyre_core.bench.switch import bench_switch, switch_lines

    result = bench_switch(calls=calls, rounds=rounds, max_tokens=tokens, report=_report)
    print_text(result, "\n".join(switch_lines(result)), as_json)


@bench_app.command(name="elastic")
def bench_elastic_command(
    preset: Annotated[
        list[str] | None, typer.Option("--preset", help="of gyre simulate (repeatable); default: the published cases")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="repeatable; default: all")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="few groups and steps: minutes a policy")] = False,
    groups: Annotated[int | None, typer.Option(help="groups of a batch that are emulated")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps of each run")] = None,
    control_share: Annotated[
        float | None, typer.Option(help="share of a step that the control plane itself may take")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the rollouts")] = 0,
    folder: Annotated[Path | None, typer.Option(help="keep the runs here; default: a temporary folder")] = None,
    soak: Annotated[float | None, typer.Option(help="minutes: one run, with memory and file growth instead")] = None,
    trace: Annotated[
        str | None, typer.Option(help="a stored run once more, beside what it measured and the simulator says")
    ] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Emulated cells under the real control plane: every policy on the same work, beside the lower bound."""
    from gyre_core.bench.elastic import bench_elastic, default_cases, effort_of, elastic_lines
    from gyre_core.bench.elastic_soak import bench_soak, server_environment, soak_lines
    from gyre_core.bench.elastic_trace import bench_trace, trace_lines

    effort = effort_of(quick=quick, groups=groups, steps=steps, control_share=control_share, policies=policy)
    names = preset or default_cases()
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-elastic-")))
        if soak is not None:
            os.environ.update(server_environment(soak))
        stack.enter_context(_prefect_server(root / "runs"))
        if soak is not None:
            grown = bench_soak(names[0], effort, minutes=soak, seed=seed, folder=root, report=_report)
            print_text(grown, "\n".join(soak_lines(grown)), as_json)
            return
        if trace is not None:
            again = bench_trace(runs_dir, trace, policies=policy or (), folder=root, report=_report)
            print_text(again, "\n".join(trace_lines(again)), as_json)
            return
        result = bench_elastic(names, effort, seed=seed, folder=root, report=_report)
    print_text(result, "\n".join(elastic_lines(result)), as_json)


@contextlib.contextmanager
def _prefect_server(runs_dir: Path) -> Iterator[None]:
    """One server for all runs of a measurement."""
    from gyre_core.config import PrefectConfig
    from tasks.prefect_server import ensure_server

    server = ensure_server(PrefectConfig(port=0), runs_dir, timeout_s=300.0)
    try:
        yield
    finally:
        server.stop()
