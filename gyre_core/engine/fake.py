"""A deterministic stand-in for an SGLang server, for tests: the same wire contract, no weights.

Enters: HTTP requests of the paths that Gyre uses. Leaves: replies in SGLang 0.5.23's form. The server runs in a thread
of its own, so synchronous and asynchronous tests and child processes can all call it. Nothing waits for time: a call is
stopped between two tokens by `hold` and goes on with `release`.

Outputs are, in this order: what was left of a call that was aborted (when its prompt comes back with the partial
output), the next scripted output, or a sequence that depends only on the seed, the weights' version and the ids before
each token. A scripted output without a stop token ends as if a stop string had matched.

Example:
    with FakeEngineServer(outputs=[[5, 6, 2]], stop_token_ids={2}) as engine:
        client = SGLangClient(engine.url, vocab_size=engine.vocab_size)
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import orjson
import uvicorn
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_core.types import Json

Output = Sequence[int]
Script = Iterable[Output] | Callable[[list[int]], Output]


@dataclass(slots=True)
class FakeCall:
    """A /generate request as the fake engine saw it, and what became of it."""

    rid: str
    input_ids: list[int]
    sampling_params: Json
    cache_salt: str
    output_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, start, end]
    aborted: bool = False
    finished: bool = False


class FakeEngineServer:
    """The fake engine. All methods may be called from any thread."""

    def __init__(
        self,
        outputs: Script = (),
        *,
        vocab_size: int = 1024,
        stop_token_ids: Iterable[int] = (),
        version: int = 0,
        seed: int = 0,
        mean_length: int = 16,
        port: int = 0,
    ) -> None:
        """`outputs` is a script (one a call) or a function of the prompt; `stop_token_ids` end unscripted ones."""
        self.vocab_size = vocab_size
        self.version = str(version)
        self.calls: list[FakeCall] = []
        self.paths: list[str] = []  # of all requests, in order
        self._function = outputs if callable(outputs) else None
        self._script: deque[list[int]] = deque() if callable(outputs) else deque(list(ids) for ids in outputs)
        self._stop_token_ids = sorted(stop_token_ids)
        self._seed = seed
        self._mean_length = mean_length
        self._remainders: dict[tuple[str, ...], list[int]] = {}
        self._running: dict[str, FakeCall] = {}
        self._hold_after: int | None = None
        self._paused = False
        self._failures: deque[int] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._state = threading.Condition()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # Life

    def __enter__(self) -> "FakeEngineServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve; returns when the port answers."""
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        ready: Future[None] = Future()

        async def serve() -> None:
            assert self._server is not None
            self._loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.001)
            ready.set_result(None)
            await task

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake-engine", daemon=True)
        self._thread.start()
        ready.result(10)

    def stop(self) -> None:
        """Cut all connections, as an engine does that dies. Calls in flight fail."""
        if self._server is None or self._thread is None:
            return
        self._server.force_exit = True
        self._server.should_exit = True
        self._call_soon(self._cut)
        self._thread.join(10)
        self._socket.close()
        self._server = None

    # What a test can do to it

    def add_outputs(self, outputs: Iterable[Output]) -> None:
        """Append to the script."""
        self._script.extend(list(ids) for ids in outputs)

    def hold(self, after: int = 0) -> None:
        """Stop every call once it has `after` output tokens, until `release`."""
        self._hold_after = after
        self._wake()

    def release(self) -> None:
        """Let held calls go on."""
        self._hold_after = None
        self._wake()

    def fail_next(self, *statuses: int) -> None:
        """Answer the next calls with these HTTP statuses (0: close the connection without an answer)."""
        self._failures.extend(statuses)

    def set_version(self, version: int) -> None:
        """New weights: tokens sampled from now on carry this version."""
        self.version = str(version)
        self._wake()

    def abort_all(self) -> None:
        """End every running call with its partial output."""
        for call in list(self._running.values()):
            call.aborted = True
        self._wake()

    def wait_running(self, num_calls: int = 1, *, tokens: int = 0, timeout_s: float = 10.0) -> None:
        """Block until `num_calls` calls run, each with at least `tokens` output tokens; TimeoutError otherwise."""

        def enough() -> bool:
            return sum(len(call.output_ids) >= tokens for call in list(self._running.values())) >= num_calls

        with self._state:
            if not self._state.wait_for(enough, timeout_s):
                raise TimeoutError(f"fewer than {num_calls} calls run on the fake engine after {timeout_s} s")

    # Wire

    def _app(self) -> Starlette:
        routes = {
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
        return Starlette(routes=[Route(path, handler, methods=["GET", "POST"]) for path, handler in routes.items()])

    async def _generate(self, request: Request) -> Response:
        self.paths.append("/generate")
        body = orjson.loads(await request.body())
        if self._failures and (status := self._failures.popleft()) != 200:
            if status == 0:
                return self._hang_up(request)
            return _json({"error": {"message": f"fake engine: planned failure {status}"}}, status)
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ids):
            return self._hang_up(request)  # a real server dies of an id outside the vocabulary
        call = FakeCall(
            rid=body.get("rid") or f"fake-{len(self.calls)}",
            input_ids=ids,
            sampling_params=dict(body.get("sampling_params") or {}),
            cache_salt=body.get("cache_salt") or "",
        )
        cached = self._cached_tokens(call)
        self.calls.append(call)
        self._running[call.rid] = call
        try:
            reason = await self._sample(call)
        finally:
            self._running.pop(call.rid, None)
            call.finished = True
            self._notify()
        return _json(self._reply(call, reason, cached, bool(body.get("return_logprob"))))

    async def _sample(self, call: FakeCall) -> Json:
        params = call.sampling_params
        limit = int(params.get("max_new_tokens", 128))
        stops = set(params.get("stop_token_ids") or ())
        planned = self._planned(call)
        while True:
            self._notify()
            self._changed.clear()
            if call.aborted:
                if planned is not None:
                    rest = planned[len(call.output_ids) :]
                    self._remainders[_key(call.input_ids + call.output_ids)] = rest
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            if self._paused or (self._hold_after is not None and len(call.output_ids) >= self._hold_after):
                await self._changed.wait()
                continue
            if len(call.output_ids) >= limit:
                return {"type": "length", "length": len(call.output_ids)}
            if planned is not None:
                if len(call.output_ids) >= len(planned):
                    return {"type": "stop", "matched": ""}
                token = planned[len(call.output_ids)]
            else:
                token = self._next_token(call)
            self._append(call, token)
            if token in stops:
                return {"type": "stop", "matched": token}

    def _planned(self, call: FakeCall) -> list[int] | None:
        remainder = self._remainders.pop(_key(call.input_ids), None)
        if remainder is not None:
            return remainder
        if self._function is not None:
            return list(self._function(call.input_ids))
        return self._script.popleft() if self._script else None

    def _append(self, call: FakeCall, token: int) -> None:
        position = len(call.output_ids)
        call.output_ids.append(token)
        if call.spans and call.spans[-1][0] == int(self.version):
            call.spans[-1][2] = position + 1
        else:
            call.spans.append([int(self.version), position, position + 1])

    def _next_token(self, call: FakeCall) -> int:
        state = _digest(call.input_ids + call.output_ids)
        draw = xxhash.xxh3_64_intdigest(state, seed=self._seed + int(self.version))
        if self._stop_token_ids and draw % self._mean_length == 0:
            return self._stop_token_ids[0]
        token = (draw >> 16) % self.vocab_size
        return token if token not in self._stop_token_ids else (token + 1) % self.vocab_size

    def _cached_tokens(self, call: FakeCall) -> int:
        """The longest prefix shared with one of the last calls of the same salt; the last token is always computed."""
        best = 0
        for other in self.calls[-16:]:
            if other.cache_salt == call.cache_salt:
                known = other.input_ids + other.output_ids
                size = min(len(known), len(call.input_ids) - 1)
                if known[:size] == call.input_ids[:size]:
                    best = max(best, size)
        return best

    def _reply(self, call: FakeCall, reason: Json, cached: int, with_logprobs: bool) -> Json:
        meta: Json = {
            "id": call.rid,
            "finish_reason": reason,
            "prompt_tokens": len(call.input_ids),
            "weight_version": self.version,
            "completion_tokens": len(call.output_ids),
            "cached_tokens": cached,
            "weight_versions": [
                {"version": str(version), "start": start, "end": end} for version, start, end in call.spans
            ],
        }
        if with_logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[fake_logprob(token), token, None] for token in call.output_ids]
        return {"text": "", "output_ids": call.output_ids, "meta_info": meta}

    async def _abort_request(self, request: Request) -> Response:
        self.paths.append("/abort_request")
        body = orjson.loads(await request.body())
        for rid, call in list(self._running.items()):
            if body.get("abort_all") or rid == body.get("rid"):
                call.aborted = True
        self._wake()
        return Response("")

    async def _pause(self, request: Request) -> Response:
        self.paths.append("/pause_generation")
        mode = orjson.loads(await request.body() or b"{}").get("mode", "abort")
        if mode == "abort":
            self.abort_all()
        self._paused = True
        self._wake()
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        self.paths.append("/continue_generation")
        self._paused = False
        self._wake()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: Request) -> Response:
        self.paths.append("/update_weights_from_disk")
        body = orjson.loads(await request.body())
        self.version = str(body.get("weight_version") or self.version)
        return _json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _update_version(self, request: Request) -> Response:
        self.paths.append("/update_weight_version")
        self.version = str(orjson.loads(await request.body())["new_version"])
        return _json({"success": True, "message": "Weight version updated", "new_version": self.version})

    async def _flush_cache(self, request: Request) -> Response:
        self.paths.append("/flush_cache")
        return Response("Cache flushed.\n", status_code=400 if self._running else 200)

    async def _model_info(self, request: Request) -> Response:
        return _json({"model_path": "fake", "is_generation": True, "weight_version": self.version})

    async def _ok(self, request: Request) -> Response:
        return Response("")

    # Threads

    def _wake(self) -> None:
        self._call_soon(self._changed.set)

    def _call_soon(self, function: Callable[[], Any]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

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

    def _notify(self) -> None:
        with self._state:
            self._state.notify_all()


def fake_logprob(token: int) -> float:
    """The log-prob the fake engine reports for a token: exact in float32, so that tests may compare with ==."""
    return -1.0 - (token % 64) / 64.0


def _json(data: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


def _digest(ids: list[int]) -> bytes:
    return xxhash.xxh3_64_digest(orjson.dumps(ids))


def _key(ids: list[int]) -> tuple[str, ...]:
    return (str(len(ids)), xxhash.xxh3_128_hexdigest(orjson.dumps(ids)))
