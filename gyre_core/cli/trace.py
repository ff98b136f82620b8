"""`gyre trace`: where the time of a rollout or a step went, from the spans that its processes wrote."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_core.cli.options import JsonOption, RunsDirOption, print_text

_SHOWN = ("gyre.call", "gyre.cell", "server.address", "gyre.outcome", "gyre.reward", "gyre.finish_reason", "gyre.step")
_COUNTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gyre.cached_tokens", "gyre.targets")
_LISTED = 20
_BAR = 30  # characters


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def trace(
    run: Annotated[str | None, typer.Argument(help="run (default: the newest)")] = None,
    rollout: Annotated[str | None, typer.Argument(help="rollout id, whole or any unique part of it")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="a step instead, from 1")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Show where the time went: the slowest rollouts, one rollout's spans, or a step's (tracing.export = "file")."""
    from gyre_core.errors import ConfigError
    from gyre_core.store.run_store import newest_run

    if rollout is not None and step is not None:
        raise ConfigError("give a rollout or --step, not both")
    folder = newest_run(runs_dir, run)
    place = folder.path / "traces"
    if step is not None:
        result, text = show_trace(place, folder.run_id, f"step/{step - 1}")
    elif rollout is not None:
        result, text = show_trace(place, folder.run_id, f"rollout/{find_rollout(place, rollout)}")
    else:
        result, text = list_rollouts(place, folder.run_id)
    print_text(result, text, as_json)


def find_rollout(place: Path, part: str) -> str:
    """The rollout whose id holds this; raises StoreError for none and for several."""
    from gyre_core.errors import StoreError
    from gyre_core.tracing.read import read_roots

    ids = {str(span.attributes["gyre.rollout"]) for span in read_roots(place, "rollout")}
    found = [part] if part in ids else sorted(one for one in ids if part in one)
    if len(found) != 1:
        shown = ", ".join((found or sorted(ids))[:8])
        raise StoreError(f"{len(found)} traced rollouts fit {part!r}; there are {shown}, ...")
    return found[0]


def list_rollouts(place: Path, run: str) -> tuple[dict[str, Any], str]:
    """The finished rollouts, longest first."""
    from gyre_core.tracing.read import read_roots

    roots = read_roots(place, "rollout")
    rows = [
        {
            "rollout": span.attributes["gyre.rollout"],
            "seconds": round(span.seconds, 3),
            "calls": span.attributes.get("gyre.calls", 0),
            "sampled_tokens": span.attributes.get("gyre.sampled_tokens", 0),
            "outcome": span.attributes.get("gyre.outcome", ""),
            "reward": span.attributes.get("gyre.reward"),
        }
        for span in roots
    ]
    lines = [f"{'rollout':32s} {'seconds':>9s} {'calls':>6s} {'sampled':>8s}  outcome"]
    for row in rows[:_LISTED]:
        reward = "" if row["reward"] is None else f" {row['reward']:g}"
        lines.append(
            f"{row['rollout']:32s} {row['seconds']:9.2f} {row['calls']:6d} {row['sampled_tokens']:8d}  "
            f"{row['outcome']}{reward}"
        )
    if len(rows) > _LISTED:
        lines.append(f"... and {len(rows) - _LISTED} shorter ones; gyre trace {run} ROLLOUT shows one")
    return {"run": run, "rollouts": rows}, "\n".join(lines)


def show_trace(place: Path, run: str, what: str) -> tuple[dict[str, Any], str]:
    """One trace as a tree, with a bar for when each span was."""
    from gyre_core.tracing.read import read_trace

    spans = [pair for top in read_trace(place, run, what) for pair in top.walk()]
    first_s = min(span.start_s for _, span in spans)
    whole_s = max(span.end_s for _, span in spans) - first_s
    lines, rows = [], []
    for depth, span in spans:
        begin_s = span.start_s - first_s
        about = [str(span.attributes[name]) for name in _SHOWN if name in span.attributes]
        about += [f"{span.attributes[name]} {name.rpartition('.')[2]}" for name in _COUNTS if name in span.attributes]
        about += [f"error: {span.error}"] if span.error else []
        lines.append(
            f"{begin_s:9.2f} {span.seconds:9.3f} s |{_bar(begin_s, span.seconds, whole_s)}| "
            f"{'  ' * depth}{span.name} [{span.process}] {', '.join(about)}".rstrip()
        )
        rows.append(
            {
                "name": span.name,
                "process": span.process,
                "depth": depth,
                "start_s": round(begin_s, 6),
                "seconds": round(span.seconds, 6),
                "error": span.error,
                "attributes": span.attributes,
            }
        )
    return {"run": run, "trace": what, "seconds": round(whole_s, 6), "spans": rows}, "\n".join(lines)


def _bar(begin_s: float, seconds: float, whole_s: float) -> str:
    if whole_s <= 0:
        return "#" * _BAR
    first = min(_BAR - 1, int(begin_s / whole_s * _BAR))
    length = max(1, min(_BAR - first, round(seconds / whole_s * _BAR)))
    return (" " * first + "#" * length).ljust(_BAR)
