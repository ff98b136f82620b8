"""A real SGLang server adds its own spans to the trace of the rollout whose call it serves."""

from pathlib import Path

import pytest

from gyre_core.config.models import EngineConfig
from gyre_core.engine.sglang import SGLangServer
from gyre_core.tracing.settings import TracingSettings
from gyre_core.tracing.spans import root_context
from tests.support.collector import ReceivedSpan, running_collector
from tests.support.proxies import running_proxy
from tests.support.tiny_model import CONTEXT_LENGTH, save_tiny_model

pytestmark = pytest.mark.integration


def below_ours(spans: list[ReceivedSpan]) -> bool:
    """Whether a span of SGLang's, which come in several batches, hangs below the proxy's try on the engine."""
    tries = {span.span_id for span in spans if span.name == "engine.generate"}
    return any(span.service == "sglang" and span.parent_id in tries for span in spans)


async def test_spans_of_proxy_and_engine_are_one_trace(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    with (
        running_collector() as collector,
        SGLangServer(
            EngineConfig(max_total_tokens=4096),
            model,
            context_length=CONTEXT_LENGTH,
            slots=4,
            log_path=tmp_path / "engine.log",
            otlp_endpoint=collector.url,
        ) as server,
    ):
        settings = TracingSettings(export="otlp", endpoint=collector.url, run="r1", folder=tmp_path)
        clients = {server.url: server.client(timeout_s=120)}
        async with running_proxy(model, clients, context_length=CONTEXT_LENGTH, tracing=settings) as proxy:
            harness = await proxy.open("s0000-p1-00")
            reply = await harness.chat([{"role": "user", "content": "hello"}], max_tokens=8)
            assert reply.status_code == 200
        spans = collector.wait_for(below_ours)
    root = root_context("r1", "rollout/s0000-p1-00")
    ours = {span.name: span for span in spans if span.service == "gyre-proxy"}
    assert ours["chat"].parent_id == f"{root.span_id:016x}"
    assert ours["engine.generate"].parent_id == ours["chat"].span_id
    assert {span.trace_id for span in spans} == {f"{root.trace_id:032x}"}
