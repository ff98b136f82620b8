"""Recorded replies of a real SGLang server (tests/engine/fixtures)."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "engine" / "fixtures"


def recorded(name: str) -> dict[str, Any]:
    """A reply as recorded: {"status": ..., "body": ...}; a fresh copy each time."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def recorded_body(name: str) -> Any:
    """The reply's body."""
    return recorded(name)["body"]
