"""Where spans go: a file of the run's folder, or a collector.

A file has one line of OTLP JSON for each batch of spans: what the OpenTelemetry collector's `otlpjsonfile` receiver
reads, and viewers load. A collector gets OTLP over HTTP, the SDK's own exporter; OTEL_EXPORTER_OTLP_HEADERS holds what
it asks for as a key.
"""

import base64
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gyre_core.tracing.settings import TracingSettings

_IDS = ("traceId", "spanId", "parentSpanId")


def open_exporter(settings: TracingSettings, process: str) -> SpanExporter:
    """The exporter of the settings; raises OSError for a folder that cannot be written."""
    if settings.export == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=f"{settings.endpoint.rstrip('/')}/v1/traces")
    settings.folder.mkdir(parents=True, exist_ok=True)
    return FileExporter(settings.folder / f"{process}-{os.getpid()}.jsonl")


class FileExporter(SpanExporter):
    """Appends batches to a file, each line whole or, in a process that was killed, torn at the end."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line; FAILURE, which drops the batch, when the disk takes none."""
        line = json.dumps(_otlp_json(spans), separators=(",", ":"))
        try:
            with self._lock:
                self._file.write(line + "\n")
                self._file.flush()
        except (OSError, ValueError):
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file; again is no error."""
        with self._lock:
            self._file.close()


def _otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """OTLP's JSON: protobuf's, with ids in hexadecimal and enumerations as numbers."""
    data = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in data["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in _IDS:
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return data
