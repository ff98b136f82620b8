"""A Prometheus endpoint for any process of Gyre: on when the environment names a folder of metrics, else not there.

    GYRE_METRICS_DIR/token           what a scrape must bring (Authorization: Bearer ...), for its owner alone
    GYRE_METRICS_DIR/targets/*.json  one file a live process, in Prometheus's file_sd format

Enters: a function that gives samples. Leaves: an HTTP server on 127.0.0.1 at a free port, its target file, both gone
with the block. A port is not closed to agents in a sandbox that share the host's network: hence the token. A scrape
calls the function in a thread of its own, or in the process's event loop (`add_metrics`), and never waits for long.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "GYRE_METRICS_DIR"
_LOOP_TIMEOUT_S = 5.0  # a busy event loop must not hang Prometheus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number now.

    Example: Sample(name="gyre_proxy_calls_in_flight", value=12, labels={"engine": "http://127.0.0.1:4000"})
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


Collect = Callable[[], Iterable[Sample]]


@contextlib.contextmanager
def serve_metrics(process: str, collect: Collect, *, run: str = "") -> Iterator[str | None]:
    """Serve a process's samples while the block runs; gives the URL, None when GYRE_METRICS_DIR is not set.

    A server that cannot be started is logged, never an error: metrics do not stop a run.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield None
        return
    try:
        server = _Server(Path(folder), collect)
        target = _announce(Path(folder), process, run, server.server_port)
    except OSError as error:
        logger.warning("no metrics of %s: %s", process, error)
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        target.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()


def add_metrics(app: Any, process: str, collect: Collect, *, run: str = "") -> None:
    """Serve metrics while a Starlette application lives; `collect` is called in its event loop.

    Example: add_metrics(app, "proxy", lambda: proxy_samples(app.state.proxy.status()))
    """
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()

        async def call() -> list[Sample]:
            return list(collect())

        def in_loop() -> Iterable[Sample]:
            return asyncio.run_coroutine_threadsafe(call(), loop).result(_LOOP_TIMEOUT_S)

        async with inner(served) as state:
            serving = serve_metrics(process, in_loop, run=run)
            serving.__enter__()
            try:
                yield state
            finally:  # in a thread: a scrape that is going on needs this loop
                await asyncio.to_thread(serving.__exit__, None, None, None)

    app.router.lifespan_context = lifespan


def metrics_token(folder: Path) -> str:
    """The folder's token, made when there is none."""
    path = folder / "token"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        temporary = folder / f".token-{os.getpid()}-{threading.get_ident()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(24))
        try:
            os.link(temporary, path)  # the first of several processes wins
        finally:
            temporary.unlink()
    return path.read_text(encoding="utf-8").strip()


def _announce(folder: Path, process: str, run: str, port: int) -> Path:
    """Write the target file, and drop those of processes that were killed."""
    targets = folder / "targets"
    targets.mkdir(parents=True, exist_ok=True)
    for path in targets.glob("*.json"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
    name = "-".join(part for part in (run, process, str(os.getpid())) if part)
    labels = {"process": process, **({"run": run} if run else {})}
    target = targets / f"{name}.json"
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": labels}]), encoding="utf-8")
    temporary.rename(target)
    return target


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, collect: Collect) -> None:
        self.collect = collect
        self.expected = f"Bearer {metrics_token(folder)}".encode()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # of a client that says nothing

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, server.expected):
            self._reply(401, "text/plain", b"wrong or missing bearer token\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._reply(404, "text/plain", b"/metrics\n")
        else:
            try:
                samples = list(server.collect())
            except Exception as error:
                logger.warning("no metrics this time: %r", error)
                self._reply(503, "text/plain", b"the process is busy\n")
                return
            content, kind = exposition(samples)
            self._reply(200, kind, content)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def exposition(samples: Iterable[Sample]) -> tuple[bytes, str]:
    """Samples in Prometheus's text format, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    families: dict[str, GaugeMetricFamily] = {}
    for sample in samples:
        names = sorted(sample.labels)
        family = families.setdefault(sample.name, GaugeMetricFamily(sample.name, sample.name, labels=names))
        family.add_metric([sample.labels[name] for name in names], float(sample.value))

    class Collected:
        def collect(self) -> Iterable[GaugeMetricFamily]:
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
