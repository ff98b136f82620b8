"""Pages of docs/ that are made from code: written, or compared with what they should be."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def write_or_check(name: str, page: Callable[[], str], script: str, description: str | None) -> int:
    """The command line of a page's script: write docs/`name`, or with `--check` say that it is old (exit code 1)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is not this")
    target = DOCS / name
    if not parser.parse_args().check:
        target.write_text(page(), encoding="utf-8")
    elif target.read_text(encoding="utf-8") != page():
        print(f"docs/{name} is old: run python {script}", file=sys.stderr)
        return 1
    return 0
