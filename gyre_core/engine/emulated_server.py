"""An emulated engine behind SGLang's HTTP contract, in a thread of its own.

Enters: HTTP requests of the paths that Gyre uses, with the engine's key. Leaves: replies in SGLang's form, after the
time that the cost model says. Verbs about memory and weights are answered at once: what they cost is the cell's.
"""

import asyncio
import socket
import threading
from concurrent.futures import Future
from types import TracebackType

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_core.engine.emulated import EmulatedEngine
from gyre_core.engine.serve import RequireKey
from gyre_core.process import listen
from gyre_core.types import Json


class EmulatedServer:
    """Serves an `EmulatedEngine`, as a context.

    Example: with EmulatedServer(EmulatedEngine(config, slots=8, letters=[64]), api_key="secret") as server: server.url
    """

    def __init__(self, engine: EmulatedEngine, *, api_key: str, port: int = 0) -> None:
        self.engine = engine
        self.api_key = api_key
        self._listener: socket.socket = listen("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> "EmulatedServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def running(self) -> bool:
        """Whether it serves."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Serve; returns when the port answers."""
        config = uvicorn.Config(self._app(), log_level="warning", lifespan="off", access_log=False)
        server = self._server = uvicorn.Server(config)
        ready: Future[None] = Future()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(server.serve(sockets=[self._listener]))
            while not server.started and not task.done():
                await asyncio.sleep(0.001)
            ready.set_result(None)
            await task

        self._thread = threading.Thread(target=lambda: uvloop.run(serve()), name="emulated-engine", daemon=True)
        self._thread.start()
        ready.result(10)

    def stop(self) -> None:
        """End the calls with what they have, and the server."""
        if self._server is None or self._thread is None or self._loop is None:
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.engine.abort)
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()
        self._server = None

    def _app(self) -> Starlette:
        handlers = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._update,
            "/flush_cache": self._flush,
            "/model_info": self._model_info,
        }
        routes = [Route(path, handler, methods=["GET", "POST"]) for path, handler in handlers.items()]
        routes.append(Route("/{path:path}", self._ok, methods=["GET", "POST"]))
        return Starlette(routes=routes, middleware=[Middleware(RequireKey, key=self.api_key)])

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        try:
            reply = await self.engine.generate(
                str(body["rid"]), body["input_ids"], dict(body.get("sampling_params") or {}), body.get("cache_salt", "")
            )
        except (KeyError, ValueError) as error:
            return _json({"error": {"message": f"the emulated engine cannot serve this: {error!r}"}}, 400)
        return _json(reply)

    async def _abort(self, request: Request) -> Response:
        body = await _body(request)
        self.engine.abort(None if body.get("abort_all") else str(body.get("rid")))
        return Response("")

    async def _pause(self, request: Request) -> Response:
        if (await _body(request)).get("mode", "abort") == "abort":
            self.engine.abort()
        self.engine.pause()
        return _json({"status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await _body(request)
        self.engine.pause(False)
        return _json({"status": "ok"})

    async def _update(self, request: Request) -> Response:
        body = await _body(request)
        version = body.get("weight_version", body.get("new_version"))
        if version is not None:
            self.engine.set_version(int(version))
        return _json({"success": True, "message": "emulated"})

    async def _flush(self, request: Request) -> Response:
        await _body(request)
        return Response("Cache flushed.\n")

    async def _model_info(self, request: Request) -> Response:
        return _json({"model_path": "emulated", "is_generation": True, "weight_version": str(self.engine.version)})

    async def _ok(self, request: Request) -> Response:
        await _body(request)
        return _json({"success": True, "status": "ok", "busy_s": self.engine.busy_s, **self.engine.counters})


async def _body(request: Request) -> Json:
    return orjson.loads(await request.body() or b"{}")


def _json(data: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")
