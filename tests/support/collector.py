"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as the wire had it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


@dataclass
class Collector:
    """What arrived so far."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def wait_for(self, wanted: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20.0) -> list[ReceivedSpan]:
        """The spans once they satisfy `wanted`."""
        deadline = time.monotonic() + timeout_s
        while not wanted(self.spans):
            assert time.monotonic() < deadline, f"only {[(span.service, span.name) for span in self.spans]} arrived"
            time.sleep(0.05)
        return list(self.spans)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of 127.0.0.1."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request.ParseFromString(body)
            assert self.path == "/v1/traces"
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                        collector.spans.append(ReceivedSpan(names["service.name"], span.name, *ids))
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
