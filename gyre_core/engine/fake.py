"""A stand-in for an SGLang server, for tests: the wire contract of SGLang 0.5.23 around a `FakeEngine`.

Enters: HTTP requests of the paths that Gyre uses. Leaves: replies in SGLang's form. The server runs in a thread of its
own, so synchronous and asynchronous tests and child processes can all call it.

Example:
    with FakeEngineServer(FakeEngine([[5, 6, 2]])) as server:
        client = SGLangClient(server.url, timeout_s=10, vocab_size=server.engine.vocab_size)
"""

import asyncio
import socket
import threading
from concurrent.futures import Future
from types import TracebackType

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_core.engine.fake_model import FakeCall, FakeEngine, fake_logprob
from gyre_core.engine.serve import RequireKey
from gyre_core.types import Json

__all__ = ["FakeCall", "FakeEngine", "FakeEngineServer", "fake_logprob"]


class FakeEngineServer:
    """Serves a `FakeEngine`; control it through `engine`. With an `api_key` it asks every request for it."""

    def __init__(self, engine: FakeEngine | None = None, *, port: int = 0, api_key: str | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.api_key = api_key
        self.paths: list[str] = []  # of all requests, in order
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; else 40 ms of delayed ACK
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "FakeEngineServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve; returns when the port answers."""
        server = uvicorn.Server(uvicorn.Config(self._app(), log_level="critical", lifespan="off", access_log=False))
        self._server = server
        ready: Future[None] = Future()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            while not server.started and not task.done():
                await asyncio.sleep(0.001)
            ready.set_result(None)
            await task

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake-engine", daemon=True)
        self._thread.start()
        ready.result(10)

    def stop(self) -> None:
        """Cut all connections, as an engine does that dies. Calls in flight fail."""
        if self._server is None or self._thread is None or self._loop is None:
            return
        self._server.force_exit = True
        self._server.should_exit = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cut)
        self._thread.join(10)
        self._socket.close()
        self._server = None

    def _app(self) -> Starlette:
        handlers = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_weights,
            "/update_weight_version": self._update_version,
            "/flush_cache": self._flush_cache,
            "/model_info": self._model_info,
            "/health": self._ok,
            "/ping": self._ok,
        }
        routes = [Route(path, handler, methods=["GET", "POST"]) for path, handler in handlers.items()]
        keys = [] if self.api_key is None else [Middleware(RequireKey, key=self.api_key)]
        return Starlette(routes=routes, middleware=keys)

    async def _generate(self, request: Request) -> Response:
        body = await self._body(request)
        if (status := self.engine.next_failure()) is not None:
            if status == 0:
                return self._hang_up(request)
            return _json({"error": {"message": f"fake engine: planned failure {status}"}}, status)
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < self.engine.vocab_size for i in ids):
            return self._hang_up(request)  # a real server dies of an id outside the vocabulary
        rid = body.get("rid") or f"fake-{len(self.engine.calls)}"
        params = dict(body.get("sampling_params") or {})
        call, reason = await self.engine.run(rid, ids, params, body.get("cache_salt") or "")
        meta: Json = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "weight_version": str(self.engine.version),
            "completion_tokens": len(call.output_ids),
            "cached_tokens": call.cached_tokens,
            "weight_versions": [
                {"version": str(version), "start": start, "end": end} for version, start, end in call.spans
            ],
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[fake_logprob(token), token, None] for token in call.output_ids]
        return _json({"text": "", "output_ids": call.output_ids, "meta_info": meta})

    async def _abort_request(self, request: Request) -> Response:
        body = await self._body(request)
        self.engine.abort_calls(None if body.get("abort_all") else str(body.get("rid")))
        return Response("")

    async def _pause(self, request: Request) -> Response:
        if (await self._body(request)).get("mode", "abort") == "abort":
            self.engine.abort_calls()
        self.engine.pause()
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await self._body(request)
        self.engine.pause(False)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("weight_version") is not None:
            self.engine.set_version(int(body["weight_version"]))
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _update_version(self, request: Request) -> Response:
        self.engine.set_version(int((await self._body(request))["new_version"]))
        version = str(self.engine.version)
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _flush_cache(self, request: Request) -> Response:
        await self._body(request)
        running = any(not call.finished for call in self.engine.calls)
        return Response("Flush cache failed.\n" if running else "Cache flushed.\n", status_code=400 if running else 200)

    async def _model_info(self, request: Request) -> Response:
        await self._body(request)
        return _json({"model_path": "fake", "is_generation": True, "weight_version": str(self.engine.version)})

    async def _ok(self, request: Request) -> Response:
        await self._body(request)
        return Response("")

    async def _body(self, request: Request) -> Json:
        self.paths.append(request.url.path)
        return orjson.loads(await request.body() or b"{}")

    def _cut(self, request: Request | None = None) -> None:
        """Abort the connection of one request, or all."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if request is None or (cycle is not None and cycle.scope is request.scope):
                connection.transport.abort()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def _hang_up(self, request: Request) -> Response:
        self._cut(request)
        return Response("", status_code=500)  # nobody reads it


def _json(data: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")
