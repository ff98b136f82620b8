"""`gyre store ls | verify | gc | compact | export`: what a run's store holds, whether it is whole, and its upkeep.

Each command takes the name of a run (of --runs-dir) or a store's own place: a folder or s3://bucket/prefix.
"""

import io
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre_core.cli.options import JsonOption, RunsDirOption, print_outcome, print_text
from gyre_core.errors import StoreError

if TYPE_CHECKING:  # pyarrow takes half a second to import, and every command of gyre loads this module
    from gyre_core.store import Store

store_app = typer.Typer(help="A run's store: what it holds, whether it is whole, upkeep, export.", no_args_is_help=True)

RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN_OR_URL]", help="run, store folder or s3://bucket/prefix (default: newest run)"),
]
ApplyOption = Annotated[bool, typer.Option("--apply", help="do it; without this nothing is changed")]


def open_store(run_or_url: str | None, runs_dir: Path, *, read_only: bool = True) -> "Store":
    """The store of a run, or the one at the place that was given."""
    from gyre_core.store import Store

    return Store.open(_place(run_or_url, runs_dir), read_only=read_only)


def _place(run_or_url: str | None, runs_dir: Path) -> str:
    from gyre_core.store.run_store import newest_run

    if run_or_url and ("://" in run_or_url or (Path(run_or_url) / "gyre-store.json").is_file()):
        return run_or_url
    folder = newest_run(runs_dir, run_or_url)
    return folder.config().store.url or folder.store_url


@store_app.command()
def ls(
    run_or_url: RunArgument = None,
    files: Annotated[str | None, typer.Option("--files", help="print the places of this table's objects only")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the commits: number, kind, token, rows and bytes of each."""
    store = open_store(run_or_url, runs_dir)
    if files is not None:
        places = store.files(files)
        print_text({"files": places}, "\n".join(places), as_json)
        return
    result = list_store(store)
    print_text(result, "" if as_json else _list_text(result), as_json)


@store_app.command(name="verify")
def verify_command(
    run_or_url: RunArgument = None, runs_dir: RunsDirOption = Path("runs"), as_json: JsonOption = False
) -> None:
    """Read everything once: checksums, links, nothing twice, nothing in part. Exit code 1 when something is wrong."""
    from gyre_core.store import verify

    report = verify(open_store(run_or_url, runs_dir))
    result = {
        "ok": report.ok,
        "commits": report.num_commits,
        "objects": report.num_objects,
        "blobs": report.num_blobs,
        "rollouts": report.num_rollouts,
        "bytes": report.size_bytes,
        "problems": list(report.problems),
        "unreferenced": list(report.unreferenced),
        "foreign": list(report.foreign),
    }
    lines = [f"PROBLEM {problem}" for problem in report.problems]
    if report.unreferenced:
        lines.append(f"{len(report.unreferenced)} objects that no commit needs (gyre store gc removes old ones)")
    lines += [f"foreign, ignored: {key}" for key in report.foreign]
    lines.append(
        f"{'ok' if report.ok else 'NOT OK'}: {report.num_commits} commits, {report.num_objects} objects, "
        f"{report.num_blobs} blobs, {report.num_rollouts} rollouts, {report.size_bytes / 1e6:,.1f} MB"
    )
    print_outcome(result, "\n".join(lines), as_json)


@store_app.command()
def gc(
    run_or_url: RunArgument = None,
    grace_h: Annotated[float, typer.Option(help="hours an object is kept after it was written", min=0)] = 24.0,
    apply: ApplyOption = False,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Remove objects that no commit needs and that are older than a grace period. Safe while a run writes."""
    from gyre_core.store.maintenance import collect

    store = open_store(run_or_url, runs_dir, read_only=not apply)
    report = collect(store, grace_s=grace_h * 3600, apply=apply)
    result = {
        "applied": report.applied,
        "objects": len(report.keys),
        "bytes": report.size_bytes,
        "young": report.num_young,
        "keys": list(report.keys),
    }
    did = "removed" if report.applied else "would remove (--apply does)"
    summary = (
        f"{did} {len(report.keys)} objects, {report.size_bytes / 1e6:,.1f} MB; "
        f"{report.num_young} more are younger than {grace_h:g} h"
    )
    print_text(result, "\n".join([*report.keys, summary]), as_json)


@store_app.command(name="compact")
def compact_command(
    run_or_url: RunArgument = None,
    target_mb: Annotated[int, typer.Option(help="size of the joined objects", min=1)] = 64,
    apply: ApplyOption = False,
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Join many small objects into few; the old ones stay until gc. Safe while a run writes."""
    from gyre_core.store.maintenance import compact

    store = open_store(run_or_url, runs_dir, read_only=not apply)
    report = compact(store, target_bytes=target_mb * 2**20, apply=apply)
    before, after = report.num_before, report.num_after
    result = {"applied": report.applied, "before": before, "after": after, "bytes": report.size_bytes}
    did = "joined" if report.applied else "would join (--apply does)"
    text = f"{did} {before} objects, {report.size_bytes / 1e6:,.1f} MB, into {after}"
    print_text(result, f"{text}; the old ones stay until gyre store gc", as_json)


@store_app.command(name="export")
def export_command(
    run_or_url: Annotated[str, typer.Argument(metavar="RUN_OR_URL", help="run, store folder or s3://bucket/prefix")],
    folder: Annotated[Path, typer.Argument(help="new folder", show_default=False)],
    form: Annotated[str, typer.Option("--format", help="jsonl, or hf: parquet shards and a dataset card")] = "hf",
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Write every table's rows for other programs."""
    from gyre_core.store.export import Format, export

    if form not in ("jsonl", "hf"):
        raise StoreError(f"--format {form}: use jsonl or hf")
    wanted: Format = "jsonl" if form == "jsonl" else "hf"
    report = export(open_store(run_or_url, runs_dir), folder, wanted)
    result = {"folder": str(folder), "files": list(report.files), "rows": report.rows}
    lines = [f"{name:12s} {count:>10,} rows" for name, count in report.rows.items()]
    print_text(result, "\n".join([*lines, f"{len(report.files)} files in {folder}"]), as_json)


def list_store(store: "Store") -> dict[str, Any]:
    """Commits and totals of a store as plain data."""
    commits = []
    rows: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for commit in store.commits():
        kinds[commit.kind] += 1
        own = {name: sum(ref.num_rows for ref in refs) for name, refs in commit.tables.items()}
        rows.update(own)
        size_bytes = sum(ref.size_bytes for refs in commit.tables.values() for ref in refs)
        commits.append(
            {
                "seq": commit.seq,
                "kind": commit.kind,
                "token": commit.token,
                "created_s": commit.created_s,
                "rows": own,
                "bytes": size_bytes,
                "blobs": len(commit.blobs),
                "blob_bytes": sum(blob.size_bytes for blob in commit.blobs),
            }
        )
    live: dict[str, dict[str, int]] = {}
    for name, ref in store.ledger.live_objects().values():
        entry = live.setdefault(name, {"objects": 0, "bytes": 0, "rows": rows[name]})
        entry["objects"] += 1
        entry["bytes"] += ref.size_bytes
    blobs = store.ledger.blobs.values()
    return {
        "store": store.storage.url,
        "commits": commits,
        "kinds": dict(kinds),
        "tables": live,
        "blobs": {"objects": len(blobs), "bytes": sum(blob.size_bytes for blob in blobs)},
    }


def _list_text(result: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    buffer = io.StringIO()
    console = Console(file=buffer, width=max(110, Console().width))
    console.print(f"store {result['store']}", style="bold", highlight=False)
    commits = Table("commit", "kind", "token", "time", "rollouts", "nodes", "calls", "branches", "kB", "blobs")
    for commit in result["commits"]:
        rows = commit["rows"]
        counts = [str(rows.get(name, "")) for name in ("rollouts", "nodes", "calls", "selections")]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit["created_s"]))
        size = f"{commit['bytes'] / 1e3:,.1f}" if commit["bytes"] else ""
        blobs = f"{commit['blobs']} ({commit['blob_bytes'] / 1e3:,.1f} kB)" if commit["blobs"] else ""
        commits.add_row(str(commit["seq"]), commit["kind"], commit["token"], when, *counts, size, blobs)
    console.print(commits)
    tables = Table("table", "rows", "objects", "kB")
    for name, entry in result["tables"].items():
        tables.add_row(name, f"{entry['rows']:,}", str(entry["objects"]), f"{entry['bytes'] / 1e3:,.1f}")
    if result["blobs"]["objects"]:
        tables.add_row("(blobs)", "", str(result["blobs"]["objects"]), f"{result['blobs']['bytes'] / 1e3:,.1f}")
    console.print(tables)
    return buffer.getvalue().rstrip()
