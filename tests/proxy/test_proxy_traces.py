"""A call's spans: the call below its rollout, and one try below it for each engine that it met."""

import asyncio
from pathlib import Path

import pytest

from gyre_core.engine.fake import FakeEngine
from gyre_core.tracing.read import read_trace
from gyre_core.tracing.settings import TracingSettings
from tests.support.proxies import ADMIN_HEADERS, running_proxy
from tests.support.tokenizer import VOCAB_SIZE


@pytest.fixture
def settings(tmp_path: Path) -> TracingSettings:
    return TracingSettings(export="file", run="r1", folder=tmp_path / "traces")


async def test_a_moved_call_has_a_span_on_each_engine(model_path: Path, settings: TracingSettings) -> None:
    engines = {f"http://e{i}": FakeEngine(vocab_size=VOCAB_SIZE, seed=3, mean_length=2**60) for i in range(2)}
    async with running_proxy(model_path, engines, tracing=settings) as proxy:
        await proxy.engines(*engines)
        for engine in engines.values():
            engine.hold(4)
        harness = await proxy.open("a", sampling={"temperature": 0.0, "max_new_tokens": 12})
        call = asyncio.create_task(harness.chat([{"role": "user", "content": "go"}]))
        first = "http://e0"
        await engines[first].running(tokens=4)
        await proxy.client.post("/admin/drain", json={"url": first}, headers=ADMIN_HEADERS)
        for engine in engines.values():
            engine.release()
        assert (await call).status_code == 200
    (chat,) = read_trace(settings.folder, "r1", "rollout/a")
    second = next(url for url in engines if url != first)
    assert [(span.name, span.attributes["server.address"]) for span in chat.children] == [
        ("engine.generate", first),
        ("engine.generate", second),
    ]
    assert [span.attributes["gyre.finish_reason"] for span in chat.children] == ["abort", "length"]
    assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in chat.children) == 12
    assert chat.attributes["gen_ai.usage.output_tokens"] == 12
