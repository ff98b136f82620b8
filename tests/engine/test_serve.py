"""The door in front of SGLang, without SGLang (tests/integration/test_engine_key.py has the real server)."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from gyre_core.engine import serve
from gyre_core.engine.serve import RequireKey

KEY = "the-key"


class Behind:
    """The app behind the door: keeps what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])


async def knock(kind: str, *headers: tuple[bytes, bytes], **scope: Any) -> tuple[Behind, list[dict[str, Any]]]:
    behind, sent = Behind(), []

    async def receive() -> Any:
        raise AssertionError("a request's body is not read before its key fits")

    async def send(message: Any) -> None:
        sent.append(message)

    await RequireKey(behind, key=KEY)({"type": kind, "headers": list(headers), **scope}, receive, send)
    return behind, sent


@pytest.mark.parametrize("path", ["/generate", "/health", "/metrics", "/"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
async def test_request_without_the_key_is_refused_on_any_path(path: str, method: str) -> None:
    behind, sent = await knock("http", method=method, path=path)
    assert behind.reached == []
    assert [message.get("status") for message in sent] == [401, None]
    assert KEY.encode() not in sent[1]["body"]


@pytest.mark.parametrize(
    "value", [b"", b"Bearer", b"Bearer ", b"Bearer the-ke", b"Bearer the-key ", b"bearer the-key", b"the-key", b"\xff"]
)
async def test_request_with_another_key_is_refused(value: bytes) -> None:
    behind, sent = await knock("http", (b"authorization", value))
    assert behind.reached == [] and sent[0]["status"] == 401


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_request_with_the_key_goes_through(kind: str) -> None:
    behind, sent = await knock(kind, (b"host", b"x"), (b"authorization", b"Bearer the-key"))
    assert behind.reached == [kind] and sent == []


async def test_websocket_without_the_key_is_closed() -> None:
    behind, sent = await knock("websocket")
    assert behind.reached == [] and sent == [{"type": "websocket.close", "code": 1008}]


async def test_lifespan_needs_no_key() -> None:
    behind, _ = await knock("lifespan")
    assert behind.reached == ["lifespan"]


def test_memory_url_is_read_from_the_command_line() -> None:
    assert serve.memory_url(["serve.py", "--port", "1", "--engine-info-bootstrap-port", "30002", "--x"]) == (
        "http://127.0.0.1:30002/"
    )
    assert serve.memory_url(["serve.py", "--port", "1"]) is None


@pytest.fixture
def record_factory() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


@pytest.mark.usefixtures("record_factory")
def test_log_lines_never_show_the_key(caplog: pytest.LogCaptureFixture) -> None:
    serve.hide_in_logs(KEY)
    with caplog.at_level(logging.INFO):
        logging.getLogger("sglang").info(f"server_args={{'api_key': '{KEY}', 'port': 1}}")
        logging.getLogger("sglang").info("key %s of %d", KEY, 3)
        logging.getLogger("sglang").info("other %s", "line")
    assert caplog.messages == ["server_args={'api_key': '***', 'port': 1}", "key *** of 3", "other line"]


def test_own_requests_bring_the_key_to_the_memory_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(requests.api, "request", lambda method, url, **kw: seen.append(kw.get("headers")))
    serve.bring_key(KEY, "http://127.0.0.1:30002/")
    requests.put("http://127.0.0.1:30002/register", json={}, timeout=1)
    requests.get("http://127.0.0.1:30002/info", params={"rank": 0}, headers={"a": "b"}, timeout=1)
    requests.get("http://127.0.0.1:300021/info", timeout=1)
    requests.post("http://example.test/", timeout=1)
    brought = {"Authorization": "Bearer the-key"}
    assert seen == [brought, {"a": "b", **brought}, None, None]
