"""An HTTP proxy between an S3 client and its server that fails on demand, request by request.

Requests are forwarded with their headers untouched (the Host too, which the signature covers). What happens to one is
decided by `plan`, a function of its method and path: a Fault, or None to let it through.
"""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Fault(Enum):
    """What goes wrong with a request."""

    SERVER_ERROR = "answered 500, not forwarded"
    LOST_REQUEST = "the connection ends before the request is forwarded"
    LOST_REPLY = "forwarded and done, then the connection ends without a reply"
    FROZEN = "taken, never forwarded, never answered"
    FROZEN_REPLY = "forwarded and done, never answered"
    SHORT_REPLY = "forwarded; the connection ends before the answer's last byte"
    PRETEND_CREATED = "forwarded; a refused condition (412) is answered as if the object had been created"


Plan = Callable[[str, str], Fault | None]


class FaultingProxy:
    """A running proxy. `requests` are the (method, path) seen so far.

    Example: proxy.plan = lambda method, path: Fault.LOST_REPLY if "/manifest/" in path else None
    """

    def __init__(self, upstream_port: int) -> None:
        self.plan: Plan = lambda _method, _path: None
        self.requests: list[tuple[str, str]] = []
        self.met = threading.Event()  # set when a request has met its fault (and was forwarded, if it is to be)
        self._released = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:  # the client went away
                    self.close_connection = True

            def _handle(self) -> None:
                proxy._handle(self, upstream_port)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @contextmanager
    def running(self) -> Iterator["FaultingProxy"]:
        """Serve until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._released.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _handle(self, handler: BaseHTTPRequestHandler, upstream_port: int) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        method, path = handler.command, handler.path
        self.requests.append((method, path))
        fault = self.plan(method, path)
        if fault is Fault.SERVER_ERROR:
            self.met.set()
            handler.send_response(500)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if fault in (Fault.LOST_REQUEST, Fault.FROZEN):
            self._end(handler, frozen=fault is Fault.FROZEN)
            return
        reply, content = _forward(handler, upstream_port, body)
        if fault in (Fault.LOST_REPLY, Fault.FROZEN_REPLY):
            self._end(handler, frozen=fault is Fault.FROZEN_REPLY)
            return
        status = reply.status
        if fault is Fault.PRETEND_CREATED and status == 412:
            status, content = 200, b""
        handler.send_response_only(status)
        for name, value in reply.getheaders():
            if name.lower() not in _HOP_HEADERS | ({"content-length"} if method != "HEAD" else set()):
                handler.send_header(name, value)
        if method != "HEAD":
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if fault is Fault.SHORT_REPLY:
            handler.wfile.write(content[:-1])
            self._end(handler, frozen=False)
            return
        handler.wfile.write(content)

    def _end(self, handler: BaseHTTPRequestHandler, *, frozen: bool) -> None:
        self.met.set()
        if frozen:
            self._released.wait(120)
        handler.close_connection = True
        handler.connection.close()


def _forward(handler: BaseHTTPRequestHandler, port: int, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
        for name, value in handler.headers.items():
            if name.lower() not in _HOP_HEADERS:
                connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()
