#!/usr/bin/env python3
"""Recordings of real harnesses: replay them through the proxy, distil fixtures without anybody's text.

A recording is a file of JSON lines, one HTTP request of a harness each: run, n (its number), t (seconds), api, method,
path, query, headers, request (the body; a tool is its name and the names of its parameters), inflight, fault, and
response: outcome, t, emitted_blocks (what the model said: thinking, text, tools with their raw arguments), stop.
"""

import argparse
import asyncio
import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The calls of a recording, plain or gzipped."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from (orjson.loads(line) for line in data.splitlines() if line)


def harness_of(path: Path) -> tuple[str, str]:
    """Harness and version by the file's name: claude-code-2.1.220.jsonl."""
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    name, _, version = stem.rpartition("-")
    return (name, version) if name and version[0].isdigit() else (stem, "")


def runs_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """A recording's calls by run, in order."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in read(path):
        runs.setdefault(row["run"], []).append(row)
    return runs


def replay(folder: Path) -> int:
    """Play every recording of a folder; returns the number of refused calls."""
    from tests.support.replay import replay as play
    from tests.support.tokenizer import save_model_folder

    totals = [0, 0, 0]
    print(
        f"{'run':22} {'calls':>5} {'sampled':>7} {'refused':>7} {'branches':>8}  substitutions, branches by role, counters"
    )
    with tempfile.TemporaryDirectory() as scratch:
        model_path = save_model_folder(Path(scratch))
        for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
            harness, version = harness_of(path)
            for run, rows in runs_of(path).items():
                result = asyncio.run(play(model_path, rows, harness=harness, version=version))
                summary = result.summary()
                num_branches = sum(summary["branches"].values())
                print(
                    f"{run:22} {len(rows):5} {summary['sampled_calls']:7} {summary['refused']:7} {num_branches:8}  "
                    f"{summary['substitutions']} {summary['branches']} {summary['counters']}"
                )
                for refusal in result.refusals:
                    print(f"    refused: {refusal}")
                totals = [totals[0] + len(rows), totals[1] + summary["refused"], totals[2] + num_branches]
    print(f"{totals[0]} calls in, {totals[1]} refused, {totals[2]} branches")
    return totals[1]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("replay", help="play all recordings of a folder and print a table")
    command.add_argument("folder", type=Path)
    command.set_defaults(run=lambda args: int(replay(args.folder) > 0))
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
