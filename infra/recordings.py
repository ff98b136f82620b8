#!/usr/bin/env python3
"""Recordings of real harnesses: replay them through the proxy, distil fixtures without anybody's text.

A recording is a file of JSON lines, one HTTP request of a harness each: run, n (its number), t (seconds), api, method,
path, query, headers, request (the body; a tool is its name and the names of its parameters), inflight, fault, and
response: outcome, t, emitted_blocks (what the model said: thinking, text, tools with their raw arguments), stop.
"""

import argparse
import asyncio
import gzip
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The calls of a recording, plain or gzipped."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from (orjson.loads(line) for line in data.splitlines() if line)


# Distilling. What decides how the proxy matches messages stays: which texts are equal, begin or end alike, their
# whitespace and punctuation, the spelling of JSON. Letters go: each becomes another one, drawn by the word up to it.

VERBATIM = re.compile(r"…\[len=\d+\]|\b(?:call|toolu)_lab\d+\b|\bcd(?= )|\btrue\b|\bfalse\b|\bnull\b")
KEPT_FIELDS = {
    *("type", "role", "id", "name", "tool_use_id", "tool_call_id", "call_id", "signature", "namespace", "tool_choice"),
    *("model", "status", "display", "effort", "params", "tools", "phase", "stop", "encrypted_content", "summary"),
}
DROPPED_FIELDS = {
    *("metadata", "client_metadata", "prompt_cache_key", "context_management", "prompt_cache_retention", "include"),
    *("parallel_tool_calls", "text", "reasoning", "diagnostics", "schema"),
}
_JSON_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)("|$)(\s*:)?', re.DOTALL)


class Letters:
    """Which letter stands for which, by the word up to it: one-to-one, and beginnings stay beginnings.

    Drawn with a key of the recording's own, which no fixture holds: nobody can turn the words back.
    """

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(key, digest_size=32).digest()
        self._drawn: dict[str, dict[str, str]] = {}  # word up to a letter -> letter -> what stands for it

    def __call__(self, beginning: str, letter: str) -> str:
        """What stands for `letter` after `beginning`; capitals stay capitals."""
        drawn = self._drawn.setdefault(beginning, {})
        if letter not in drawn:
            digest = hashlib.blake2b((beginning + letter).encode(), digest_size=1, key=self._key).digest()
            first = ord("A") if letter.isupper() else ord("a")
            candidates = (chr(first + (digest[0] + step) % 26) for step in range(26))
            drawn[letter] = next(char for char in candidates if char not in drawn.values())
        return drawn[letter]


def disguise(text: str, letters: Letters) -> str:
    """A text with other letters; whitespace, punctuation, digits and what role tables look for stay."""
    parts: list[str] = []
    end = 0
    for found in _kept().finditer(text):
        parts += [_disguise_words(text[end : found.start()], letters), found[0]]
        end = found.end()
    return "".join(parts) + _disguise_words(text[end:], letters)


@cache
def _kept() -> re.Pattern[str]:
    from gyre_core.proxy.dialects.anthropic import BILLING_PREFIX
    from gyre_core.trajectory.roles import BUILTIN_TABLES

    markers = [BILLING_PREFIX]
    for table in BUILTIN_TABLES:
        for matcher in (*table.aux, *table.sub_agent, *table.summary):
            markers += [matcher.system_contains, matcher.last_user_starts]
    alternatives = [re.escape(marker) for marker in sorted(set(markers), key=len, reverse=True) if marker]
    return re.compile("|".join([*alternatives, VERBATIM.pattern]))


def _disguise_words(text: str, letters: Letters) -> str:
    out: list[str] = []
    word = ""
    for char in text:
        if char.isascii() and char.isalpha():
            out.append(letters(word, char))
            word += char
        else:
            out.append(char)
            word = ""
    return "".join(out)


def disguise_json(text: str, letters: Letters) -> str:
    """JSON text, broken or not: keys and escapes stay, the letters of strings go as in the parsed text."""

    def string(found: re.Match[str]) -> str:
        if found[3]:
            return found[0]
        units = _JSON_UNIT.findall(found[1])
        plain = "".join(_char(unit) for unit in units)
        spelled = (
            unit if (len(unit) > 1 and not char.isalpha()) or not char.isascii() else char
            for unit, char in zip(units, disguise(plain, letters), strict=True)
        )
        return f'"{"".join(spelled)}{found[2]}'

    return _JSON_STRING.sub(string, text)


def _char(unit: str) -> str:
    """What a character or an escape of a JSON string stands for, as one character."""
    if len(unit) == 1:
        return unit
    if unit[1] == "u":
        return chr(int(unit[2:], 16))
    return {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}.get(unit[1], unit[1] if unit[1] in '"\\/' else "\0")


def disguise_value(value: Any, letters: Letters, key: str = "") -> Any:
    """A JSON value without anybody's text."""
    if isinstance(value, str):
        if key in KEPT_FIELDS:
            return value
        return disguise_json(value, letters) if key in ("arguments", "raw") else disguise(value, letters)
    if isinstance(value, list):
        return value if key in KEPT_FIELDS else [disguise_value(item, letters, key) for item in value]
    if isinstance(value, dict):
        # The input of a tool: all of it is arguments, whatever their names.
        return {name: disguise_value(item, letters, "" if key == "input" else name) for name, item in value.items()}
    return value


def distilled(row: dict[str, Any], letters: Letters) -> dict[str, Any]:
    """One call as a fixture holds it."""
    from gyre_core.trajectory.roles import BUILTIN_TABLES

    wanted = {name for table in BUILTIN_TABLES for name in table.hints}
    wanted |= {m.header for t in BUILTIN_TABLES for m in (*t.aux, *t.sub_agent, *t.summary) if m.header}
    headers = {name: value for name, value in row["headers"].items() if name in wanted}
    if turn := headers.get("x-codex-turn-metadata"):
        kind = re.search(r'"request_kind":"\w+"', turn)
        headers["x-codex-turn-metadata"] = f"{{{kind[0]}}}" if kind else "{}"
    request = row["request"]
    if isinstance(request, dict):
        request = {
            key: disguise_value(value, letters, "" if key == "input" else key)
            for key, value in request.items()
            if key not in DROPPED_FIELDS
        }
    response = row["response"]
    if response is not None:
        blocks = response.get("emitted_blocks") or []
        response = {
            "outcome": response.get("outcome"),
            "t": response["t"],
            "events_sent": response.get("events_sent"),
            "stop": response.get("stop"),
            "emitted_blocks": [
                {key: disguise_value(value, letters, key) for key, value in block.items() if key != "args"}
                for block in blocks
            ],
        }
    fields = ("run", "n", "t", "api", "method", "path", "query", "inflight")
    return {key: row[key] for key in fields} | {"headers": headers, "request": request, "response": response}


def distil(source: Path, target: Path) -> None:
    """Write a recording as a fixture."""
    letters = Letters(source.read_bytes())
    lines = b"".join(orjson.dumps(distilled(row, letters)) + b"\n" for row in read(source))
    target.write_bytes(gzip.compress(lines, 9, mtime=0))
    print(f"{target}: {len(lines)} bytes, {target.stat().st_size} compressed")


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
    print(f"{'run':22} calls sampled refused branches  substitutions, branches by role, counters")
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


def golden(folder: Path) -> None:
    """Write what every run of a folder becomes into its golden.json; the reasons that people wrote there stay."""
    from tests.support.replay import replay as play
    from tests.support.tokenizer import save_model_folder

    target = folder / "golden.json"
    before: dict[str, Any] = orjson.loads(target.read_bytes()) if target.exists() else {}
    after: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model_path = save_model_folder(Path(scratch))
        for path in sorted(folder.glob("*.jsonl.gz")):
            harness, version = harness_of(path)
            known = before.get(f"{harness} {version}", {})
            runs = after.setdefault(f"{harness} {version}", {})
            for run, rows in runs_of(path).items():
                result = asyncio.run(play(model_path, rows, harness=harness, version=version))
                runs[run] = {"why": known.get(run, {}).get("why", ""), "calls": len(rows), **result.summary()}
    target.write_bytes(orjson.dumps(after, option=orjson.OPT_INDENT_2) + b"\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("replay", help="play all recordings of a folder and print a table")
    command.add_argument("folder", type=Path)
    command.set_defaults(run=lambda args: int(replay(args.folder) > 0))
    command = commands.add_parser(
        "golden", help="rewrite a folder's golden.json; read the difference before you commit"
    )
    command.add_argument("folder", type=Path)
    command.set_defaults(run=lambda args: golden(args.folder))
    command = commands.add_parser("distil", help="turn a recording into a fixture that holds nobody's text")
    command.add_argument("source", type=Path, metavar="IN.jsonl")
    command.add_argument("target", type=Path, metavar="OUT.jsonl.gz")
    command.set_defaults(run=lambda args: distil(args.source, args.target))
    args = parser.parse_args()
    return args.run(args) or 0


if __name__ == "__main__":
    sys.exit(main())
