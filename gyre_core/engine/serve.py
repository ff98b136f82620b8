"""The SGLang server behind a key: what the engine's interpreter runs in the place of `sglang.launch_server`.

Enters: SGLang's command line; the key in the environment, never on the command line. Leaves: a server. Invariant: no
request is handled without `Authorization: Bearer <key>`, whatever its path, method or protocol, neither by the server
nor by the small one beside it that knows where the weights lie in memory.

SGLang's own check (`--api-key`) alone is not enough: it lets /health (which samples a token), /ready, /metrics, OPTIONS
and WebSockets through, its log shows the key, and the second server has no check at all. It is switched on all the
same, because SGLang sends that key when it calls itself.

Run as `python -P serve.py ARGUMENTS`: without -P the modules beside this file would stand before the engine's own
packages. Standard library only until `main` runs, and no import of Gyre, which the engine's environment lacks.
"""

import hmac
import importlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

KEY_VARIABLE = "GYRE_ENGINE_KEY"
MEMORY_PORT_FLAG = "--engine-info-bootstrap-port"
REFUSAL = b'{"error":{"message":"this engine asks for its key"}}'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """ASGI middleware: what does not bring the key is refused with 401 (a WebSocket is closed) and goes no further.

    Example: Starlette(routes=routes, middleware=[Middleware(RequireKey, key="secret")])
    """

    def __init__(self, app: App, *, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(_authorization(scope), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})


def _authorization(scope: Message) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"authorization"), b"")


def memory_url(argv: Sequence[str]) -> str | None:
    """Where the server of memory addresses listens, None when the command line starts none."""
    port = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if word == MEMORY_PORT_FLAG), None)
    return f"http://127.0.0.1:{port}/" if port is not None else None


def hide_in_logs(key: str) -> None:
    """Keep the key out of log lines: SGLang logs its whole configuration."""
    make = logging.getLogRecordFactory()

    def make_hidden(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if key in (text := record.getMessage()):
            record.msg, record.args = text.replace(key, "***"), None
        return record

    logging.setLogRecordFactory(make_hidden)


def bring_key(key: str, url: str) -> None:
    """Requests to `url` bring the key from now on: SGLang's own, of this process and those it forks."""
    api: Any = importlib.import_module("requests.api")
    send = api.request

    def send_with_key(method: str, to: str, **kwargs: Any) -> Any:
        if to.startswith(url):
            kwargs["headers"] = {**(kwargs.get("headers") or {}), "Authorization": f"Bearer {key}"}
        return send(method, to, **kwargs)

    api.request = send_with_key  # what requests.get and requests.put call


def main(argv: list[str], key: str) -> None:
    """What `sglang.launch_server` does, with the key in its places first."""
    hide_in_logs(key)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args(argv)
    server_args.api_key, server_args.admin_api_key = key, None
    importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(RequireKey, key=key)
    # The server of memory addresses builds its app when it is made.
    memory_server: Any = importlib.import_module("sglang.srt.entrypoints.engine_info_bootstrap_server")
    middleware = importlib.import_module("starlette.middleware").Middleware(RequireKey, key=key)
    memory_server.FastAPI = partial(memory_server.FastAPI, middleware=[middleware])
    try:
        importlib.import_module("sglang.launch_server").run_server(server_args)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # the latter: a worker that was spawned, not forked; it registers weights
    own_key, own_memory_url = os.environ[KEY_VARIABLE], memory_url(sys.argv)
    if own_memory_url is not None:
        bring_key(own_key, own_memory_url)
    if __name__ == "__main__":
        main(sys.argv[1:], own_key)
