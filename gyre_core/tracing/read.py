"""Reads what `tracing.export = "file"` wrote: the spans of a run, by trace, with their parents."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_core.errors import StoreError
from gyre_core.tracing.spans import root_context


@dataclass(slots=True, kw_only=True)
class StoredSpan:
    """One span, and those below it in the order of their starts.

    Example: for span in read_trace(folder, "r1", "rollout/s0000-p07-03"): print(span.name, span.seconds)
    """

    name: str
    process: str
    start_s: float  # since the epoch
    end_s: float
    attributes: dict[str, Any]
    error: str
    span_id: str
    parent_id: str
    children: list["StoredSpan"] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "StoredSpan"]]:
        """This span and all below it, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def read_trace(folder: Path, run: str, what: str) -> list[StoredSpan]:
    """The top spans of a rollout's or a step's trace ("rollout/ID", "step/N"): its root, or the parts of one that has
    none yet. Raises StoreError when there is no span of it.
    """
    root = root_context(run, what)
    spans = [span for trace_id, span in _spans(folder) if trace_id == f"{root.trace_id:032x}"]
    if not spans:
        raise StoreError(f"{folder} holds no span of {what}: was it sampled (tracing.sample_ratio), and has it begun?")
    by_id = {span.span_id: span for span in spans}
    top = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        parent = by_id.get(span.parent_id)
        (parent.children if parent is not None and parent is not span else top).append(span)
    return top


def read_roots(folder: Path, name: str) -> list[StoredSpan]:
    """All root spans of this name ("rollout", "step"), longest first; those of a rollout that ran twice are two."""
    roots = [span for _, span in _spans(folder) if not span.parent_id and span.name == name]
    return sorted(roots, key=lambda span: -span.seconds)


def _spans(folder: Path) -> Iterator[tuple[str, StoredSpan]]:
    """(trace id, span) of all files; a torn last line (killed process) is left out. Raises StoreError for no file."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise StoreError(f'no traces in {folder}: they are written with tracing.export = "file"')
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
            except json.JSONDecodeError:
                continue
            for resource in data["resourceSpans"]:
                process = _attributes(resource["resource"]).get("service.instance.id", "").partition("/")[0]
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        yield span["traceId"], _span(span, process)


def _span(span: dict[str, Any], process: str) -> StoredSpan:
    status = span.get("status", {})
    return StoredSpan(
        name=span["name"],
        process=process,
        start_s=int(span["startTimeUnixNano"]) / 1e9,
        end_s=int(span["endTimeUnixNano"]) / 1e9,
        attributes=_attributes(span),
        error=(status.get("message") or "error") if status.get("code") == 2 else "",
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
    )


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """OTLP's list of typed values as a dictionary."""
    found: dict[str, Any] = {}
    for item in holder.get("attributes", ()):
        (kind, value), *_ = item["value"].items()
        found[item["key"]] = int(value) if kind == "intValue" else value
    return found
