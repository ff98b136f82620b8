"""The queue over HTTP, for members of other processes. JSON in and out; branches go out as Arrow IPC.

    POST /members/weights   the snapshot to hold: its version and where to read it; waits for another than one has
    POST /members/join      a session of the running step; waits for one to run
    POST /members/claim     a micro-step, or what to do; waits for either
    POST /members/complete, /members/fail, /members/offer
    POST /members/leave     no more work for this member: its gradient is taken early
    POST /members/presence  stands as long as the member's process does; when it breaks the member is cut off
    GET  /members/status

Enters: requests with the bearer secret. Leaves: answers of the step's queue. 204 means: nothing yet, ask again. 409
means: clear the gradient; the body's `kind` says whether to join again (CutOffError) or to pull the weights first
(StaleStepError). 503 means: the core was started anew and has not opened its step yet, keep the gradient and ask again.
A request that waits counts as a sign of life while its connection stands.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gyre_core.errors import GyreError
from gyre_core.train.queue import CutOffError, Lease
from gyre_core.train.queue_records import StaleStepError, Work
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.gradients import BufferOffer

logger = logging.getLogger(__name__)
T = TypeVar("T")

ARROW = "application/vnd.apache.arrow.stream"
LEASE_HEADER = "gyre-lease"
MAX_WAIT_S = 20.0
_LOOK_S = 0.5  # how often a waiting request looks whether its peer is still there
_BACK_S = 1.0  # a member whose connection broke has so long to come back: then its process is taken for dead


class MemberBoard:
    """What members see: the current step and the current weights. Thread-safe.

    Example: board = MemberBoard(); board.publish_weights(3, offer); board.open_step(queue)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: StepQueue | None = None
        self._weights: tuple[int, BufferOffer] | None = None
        self._listeners: list[Callable[[], None]] = []
        self._leaving: set[str] = set()
        self._present: Counter[str] = Counter()
        self.closed = False

    def open_step(self, queue: StepQueue) -> None:
        """Members work off this one from now on."""
        with self._lock:
            self._queue = queue
        self._tell()

    def publish_weights(self, policy_version: int, offer: BufferOffer) -> None:
        """Members pull these weights before they join."""
        with self._lock:
            self._weights = (policy_version, offer)
        self._tell()

    @property
    def queue(self) -> StepQueue | None:
        """The newest step's queue."""
        with self._lock:
            return self._queue

    @property
    def weights(self) -> tuple[int, BufferOffer] | None:
        """Policy version and offer of the newest snapshot."""
        with self._lock:
            return self._weights

    def leave(self, trainer: str) -> None:
        """The member goes: its waiting requests end, its session gets no more work."""
        with self._lock:
            self._leaving.add(trainer)
            queue = self._queue
        if queue is not None:
            queue.leave(trainer)
        self._tell()

    def asks(self, trainer: str) -> None:
        """The member is here (again)."""
        with self._lock:
            self._leaving.discard(trainer)

    def leaves(self, trainer: str) -> bool:
        """Whether it has said that it goes, and nothing since."""
        with self._lock:
            return trainer in self._leaving

    def gone(self, trainer: str, reason: str) -> tuple[str, ...]:
        """The member's process has ended; returns the sessions that were lost with it."""
        queue = self.queue
        return queue.gone(trainer, reason) if queue is not None and not self.closed else ()

    def present(self, trainer: str, change: int) -> bool:
        """One connection of the member's process more or less; returns whether one is left."""
        with self._lock:
            self._present[trainer] += change
            return self._present[trainer] > 0

    def close(self) -> None:
        """The service ends: that connections break now says nothing about the members."""
        self.closed = True

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change, also of the step's queue, until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)
            queue = self._queue
        remove_inner = queue.on_change(listener) if queue is not None else (lambda: None)

        def remove() -> None:
            remove_inner()
            with self._lock:
                self._listeners.remove(listener)

        return remove

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def member_routes(board: MemberBoard, secret: str) -> list[Route]:
    """The routes, to be mounted in the core's own application."""
    expected = f"Bearer {secret}".encode()

    def verb(action: Callable[[Any, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, expected):
                return _error(401, ValueError("wrong or missing bearer token"))
            try:
                body = await request.json() if request.method == "POST" else {}
                if not isinstance(body, dict):
                    raise ValueError("the body is not a JSON object")
                return await action(body, request)
            except ClientDisconnect:  # a member that died in the middle of its request
                return Response(status_code=400)
            except (CutOffError, StaleStepError) as error:
                return _error(409, error)
            except _NotOpenError as error:
                return _error(503, error)
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s refused: %r", request.url.path, error)
                return _error(400, error)
            except GyreError as error:
                logger.error("%s failed: %s", request.url.path, error)
                return _error(500, error)

        return endpoint

    async def weights(body: dict[str, Any], request: Request) -> Response:
        held = (body.get("policy_version"), body.get("weights"))
        trainer = str(body.get("trainer", ""))
        board.asks(trainer)

        def newer() -> Response | None:
            if board.leaves(trainer):
                return Response(status_code=204)
            found = board.weights
            if found is None or (found[0], found[1].checksum) == held:
                return None
            return JSONResponse({"policy_version": found[0], "offer": found[1].to_json()})

        return await _until(board, request, body, newer) or Response(status_code=204)

    async def join(body: dict[str, Any], request: Request) -> Response:
        trainer = str(body["trainer"])
        board.asks(trainer)

        def joined() -> Response | None:
            if board.leaves(trainer):
                return Response(status_code=204)
            queue, current = board.queue, board.weights
            held = (body["policy_version"], body["weights"])
            if queue is None or (queue.over and current is not None and (current[0], current[1].checksum) == held):
                return None  # between two steps
            session = queue.join(trainer, policy_version=int(body["policy_version"]), weights=str(body["weights"]))
            return JSONResponse({"session": session, "step": queue.identity.step})

        return await _until(board, request, body, joined) or Response(status_code=204)

    async def claim(body: dict[str, Any], request: Request) -> Response:
        session = str(body["session"])

        def claimed() -> Response | None:
            if board.queue is None:  # the core was started anew, and opens its step soon
                return None
            found = _step(board).claim(session)
            if isinstance(found, Work):
                lease = {"micro_step": found.lease.micro_step_id, "attempt": found.lease.attempt}
                return Response(found.body, media_type=ARROW, headers={LEASE_HEADER: json.dumps(lease)})
            return None if found is None else JSONResponse({"do": found})

        return await _until(board, request, body, claimed) or Response(status_code=204)

    async def complete(body: dict[str, Any], _: Request) -> Response:
        stats = {str(name): float(value) for name, value in body.get("stats", {}).items()}
        _step(board).complete(_lease(body), stats)
        return JSONResponse({"ok": True})

    async def fail(body: dict[str, Any], _: Request) -> Response:
        _step(board).fail(_lease(body), str(body["reason"])[:500])
        return JSONResponse({"ok": True})

    async def offer(body: dict[str, Any], _: Request) -> Response:
        micro_steps = [str(name) for name in body["micro_steps"]]
        _step(board).offer(str(body["session"]), BufferOffer.from_json(body["offer"]), micro_steps)
        return JSONResponse({"ok": True})

    async def leave(body: dict[str, Any], _: Request) -> Response:
        board.leave(str(body["trainer"]))
        return JSONResponse({"ok": True})

    async def presence(body: dict[str, Any], _: Request) -> Response:
        return _Presence(board, str(body["trainer"]))

    async def status(_: dict[str, Any], __: Request) -> Response:
        queue, current = board.queue, board.weights
        return JSONResponse(
            {"policy_version": current[0] if current else None, "step": queue.status() if queue is not None else None}
        )

    posts = {
        "weights": weights,
        "join": join,
        "claim": claim,
        "complete": complete,
        "fail": fail,
        "offer": offer,
        "leave": leave,
        "presence": presence,
    }
    routes = [Route(f"/members/{name}", verb(action), methods=["POST"]) for name, action in posts.items()]
    return [*routes, Route("/members/status", verb(status))]


def create_member_app(board: MemberBoard, secret: str) -> Starlette:
    """The routes as an application of their own."""
    return Starlette(routes=member_routes(board, secret))


class _NotOpenError(GyreError):
    """This core has opened no step since it was started: a session of before may be known once it has."""


class _Presence(Response):
    """An answer that does not end before the member's connection does."""

    def __init__(self, board: MemberBoard, trainer: str) -> None:
        super().__init__()
        self._board, self._trainer = board, trainer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        board, trainer = self._board, self._trainer
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        board.present(trainer, 1)
        message = asyncio.ensure_future(receive())  # nothing but the connection's end can come
        try:
            while not message.done() and not board.closed:
                await asyncio.wait([message], timeout=_LOOK_S)
            if not message.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            message.cancel()
            if not board.present(trainer, -1):
                asyncio.get_running_loop().call_later(_BACK_S, self._look)

    def _look(self) -> None:
        if not self._board.present(self._trainer, 0):
            self._board.gone(self._trainer, "its process has ended")


async def _until(
    board: MemberBoard, request: Request, body: dict[str, Any], attempt: Callable[[], T | None]
) -> T | None:
    """The attempt's first result, or None after the body's `wait_s` or when the peer has gone."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(MAX_WAIT_S, max(0.0, float(body.get("wait_s", 0.0))))
    while True:
        changed = asyncio.Event()

        def wake(event: asyncio.Event = changed) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and this request with it
                loop.call_soon_threadsafe(event.set)

        remove = board.on_change(wake)
        try:
            result = attempt()
            left = deadline - loop.time()
            if result is not None or left <= 0:
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(_LOOK_S, left))
        finally:
            remove()
        if await request.is_disconnected():
            return None


def _step(board: MemberBoard) -> StepQueue:
    queue = board.queue
    if queue is None:
        raise _NotOpenError("no step was opened yet")
    return queue


def _lease(body: dict[str, Any]) -> Lease:
    return Lease(
        micro_step_id=str(body["micro_step"]),
        session=str(body["session"]),
        attempt=int(body["attempt"]),
        deadline_s=0.0,
    )


def _error(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error), "kind": type(error).__name__}, status)
