"""Spans of a run's processes, in traces whose ids follow from what they are about.

    trace of a rollout:  rollout > prepare, harness, seal, grade        the flow
                                   chat > engine.generate               the proxy (and SGLang's own spans below it)
                                   train                                the flow: from its group's hand-over to the step
                                   train.micro_step                     the cells
    trace of a step:     step > rollouts, train, publish                the flow

Enters: times, names and attributes. Leaves: spans in files or on their way to a collector; never an error. No context
travels with a rollout, because its harness would not pass one on: trace and root span have ids that are hashes of the
run and the rollout, so that every process knows them, one that was started again too. What is sampled follows from the
trace's id alike, in every process.

Without settings every method costs a function call and does nothing; the OpenTelemetry SDK is not imported.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from gyre_core.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]
FLUSH_S = 5.0  # of a process that ends: a collector that is gone must not hold it

_root: ContextVar[SpanContext | None] = ContextVar("root of the span that begins", default=None)


class Tracing:
    """One process's spans. Threads and event loops may share it.

    Example: with Tracing(settings, "proxy-0") as tracing, tracing.span("chat", parent=tracing.rollout("r1")): ...
    """

    def __init__(self, settings: TracingSettings | None, process: str) -> None:
        """`process` is the name that its spans carry; settings None: no spans."""
        self._run = settings.run if settings is not None else ""
        self._ratio = settings.sample_ratio if settings is not None else 0.0
        self._exporter = _exporter(settings, process) if settings is not None else None
        self._provider: TracerProvider | None = None
        if settings is not None and self._exporter is not None:
            self._provider = _provider(settings, process, self._exporter)
        self._tracer = self._provider.get_tracer("gyre") if self._provider is not None else NoOpTracer()

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    def rollout(self, rollout_id: str) -> Context | None:
        """The parent of spans that belong to a rollout."""
        return self._parent(f"rollout/{rollout_id}")

    def step(self, step: int) -> Context | None:
        """The parent of spans that belong to a step, from 0."""
        return self._parent(f"step/{step}")

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """A span around the block, the current one in it; below the current one unless a parent is given.

        An exception ends it as an error, a cancellation only is noted.
        """
        with self._tracer.start_as_current_span(name, context=parent, kind=kind, attributes=attributes) as span:
            yield span

    def record(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        *,
        parent: Context | None,
        error: str = "",
    ) -> None:
        """A span of something that is over; times in seconds since the epoch."""
        span = self._tracer.start_span(name, context=parent, start_time=_ns(start_s), attributes=attributes)
        self._end(span, end_s, error)

    def record_rollout(
        self, rollout_id: str, start_s: float, end_s: float, attributes: Attributes | None = None, *, error: str = ""
    ) -> None:
        """The root span of a rollout's trace."""
        self._record_root(f"rollout/{rollout_id}", "rollout", start_s, end_s, attributes, error)

    def record_step(self, step: int, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """The root span of a step's trace."""
        self._record_root(f"step/{step}", "step", start_s, end_s, attributes, "")

    def close(self) -> None:
        """Write or send what is still in memory; gives up after a few seconds. Again is no error."""
        provider, exporter = self._provider, self._exporter
        if provider is None or exporter is None:
            return
        self._provider = None
        # The SDK waits half a minute and more for a collector that is gone; a shut exporter ends its retries.
        flush = threading.Thread(target=provider.force_flush, name="trace flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            exporter.shutdown()
        provider.shutdown()

    def __enter__(self) -> "Tracing":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_root(
        self, what: str, name: str, start_s: float, end_s: float, attributes: Attributes | None, error: str
    ) -> None:
        if not self.enabled:
            return
        token = _root.set(root_context(self._run, what, self._ratio))
        try:
            span = self._tracer.start_span(name, context=Context(), start_time=_ns(start_s), attributes=attributes)
        finally:
            _root.reset(token)
        self._end(span, end_s, error)

    def _end(self, span: Span, end_s: float, error: str) -> None:
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(end_s))

    def _parent(self, what: str) -> Context | None:
        if not self.enabled:
            return None
        return trace.set_span_in_context(NonRecordingSpan(root_context(self._run, what, self._ratio)), Context())


NO_TRACING = Tracing(None, "")


def root_context(run: str, what: str, ratio: float = 1.0) -> SpanContext:
    """Trace and root span of something that a run does. Example: root_context("r1", "rollout/s0000-p07-03")"""
    digest = hashlib.blake2b(f"{run}/{what}".encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
    sampled = trace_id & (2**64 - 1) < round(ratio * 2**64)  # as OpenTelemetry's TraceIdRatioBased decides
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED if sampled else 0))


def current_headers() -> dict[str, str]:
    """HTTP headers that tell a server (SGLang) which span calls it; none outside of a span."""
    span = trace.get_current_span()
    if not span.get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def note(span: Span, attributes: Attributes) -> None:
    """Attributes that are known at a span's end."""
    for name, value in attributes.items():
        span.set_attribute(name, value)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _exporter(settings: TracingSettings, process: str) -> "SpanExporter | None":
    from gyre_core.tracing.export import open_exporter

    try:
        return open_exporter(settings, process)
    except OSError as error:
        logger.warning("no traces of %s: %s", process, error)
        return None


def _provider(settings: TracingSettings, process: str, exporter: "SpanExporter") -> "TracerProvider":
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    class Ids(RandomIdGenerator):
        """Random ids, but for the roots."""

        def generate_span_id(self) -> int:
            root = _root.get()
            return super().generate_span_id() if root is None else root.span_id

        def generate_trace_id(self) -> int:
            root = _root.get()
            return super().generate_trace_id() if root is None else root.trace_id

    resource = Resource.create(
        {
            "service.name": f"gyre-{process.partition('-')[0]}",
            "service.instance.id": f"{process}/{os.getpid()}",
            "gyre.run": settings.run,
        }
    )
    # atexit would flush a second time, after the process's loggers are gone.
    provider = TracerProvider(
        resource=resource,
        id_generator=Ids(),
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
