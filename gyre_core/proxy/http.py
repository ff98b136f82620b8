"""The proxy's HTTP/1.1 server: uvicorn's parser with bounds that uvicorn has not.

Enters: connections. Leaves: requests to the application, each with a way to cut its connection. A connection that sends
no whole request head in time, or a head without end, is closed: uvicorn would wait for ever and keep every byte.
"""

import asyncio
import logging
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gyre_core.proxy.delivery import ABORT_EXTENSION

HEAD_TIMEOUT_S = 30.0  # from the connection's begin, or a request's first byte, to the end of its head
MAX_HEAD_BYTES = 64 * 1024  # what nginx, Node and h11 allow at most
MAX_CONNECTIONS = 16_384  # idle ones included; some 10 KB each
KEEP_ALIVE_S = 75  # longer than the clients' pools keep idle connections

_NO_NEWS = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounded heads, and bounded leftovers of bodies that nobody wants."""

    head_timeout_s = HEAD_TIMEOUT_S
    _in_head = True
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None  # cuts the connection
    _active: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the newest one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._disconnect_active()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._expect_head()  # of the next request
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request head is too large.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._disconnect_active()  # the transport is closed, and whoever writes to it now fails

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        extensions: dict[str, Any] = {ABORT_EXTENSION: self.transport.abort}
        self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_timer()

    def on_response_complete(self) -> None:
        unread = self.cycle.more_body
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._start_timer()  # for the rest of a body whose request was refused

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect_active(self) -> None:
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()

    def _expect_head(self) -> None:
        self._in_head = True
        self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def server_config(app: Any, *, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    """How the proxy's application is served; lifespan "off" leaves the application open when the server ends.

    Example: uvicorn.Server(server_config(create_app(settings))).run(sockets=[listener])
    """
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=GuardedProtocol,
        ws="none",
        lifespan=lifespan,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of uvicorn's is about us: one line for each broken request would let clients fill disks."""
    return not record.getMessage().startswith(_NO_NEWS)
