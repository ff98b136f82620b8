"""The cell host's control API: small, authenticated, JSON in and out (micro-steps come as Arrow IPC)."""

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gyre_core.cells.host import CellHost
from gyre_core.cells.settings import CellSettings
from gyre_core.errors import GyreError

logger = logging.getLogger(__name__)


def create_app(settings: CellSettings) -> Starlette:
    """An ASGI app that boots the cell when it starts and stops it when it ends."""
    host = _host(settings)
    expected = f"Bearer {settings.secret}".encode()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            phases = await host.start()
            logger.info("%s is warm: %s", settings.cell_id, phases)
            yield
        finally:
            await host.stop()

    async def authenticate(request: Request, forward: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, expected):
            return JSONResponse({"error": "wrong or missing bearer token", "kind": "ValueError"}, 401)
        return await forward(request)

    async def status(_: Request) -> Response:
        return JSONResponse({**host.describe(), "engine_key": host.engine_key})

    def verb(action: Callable[[Any], Awaitable[Any]], *, raw: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                body = await request.body() if raw else await request.json()
                result = await action(body)
            except (ValueError, KeyError) as error:
                logger.warning("%s refused: %s", request.url.path, error)
                return JSONResponse({"error": str(error), "kind": type(error).__name__}, 400)
            except GyreError as error:
                logger.error("%s failed: %s", request.url.path, error)
                return JSONResponse({"error": str(error), "kind": type(error).__name__}, 500)
            except Exception as error:
                logger.exception("%s failed", request.url.path)
                return JSONResponse({"error": repr(error), "kind": type(error).__name__}, 500)
            return JSONResponse(result if result is not None else {"ok": True})

        return endpoint

    async def train_group(request: Request) -> Response:
        async def group(body: bytes) -> dict[str, Any]:
            return await host.train_group(request.query_params["group_id"], body)

        return await verb(group, raw=True)(request)

    async def train_finish(request: Request) -> Response:
        async def finish(body: dict[str, Any]) -> dict[str, Any]:
            return await host.train_finish(**body) or {"running": True}

        reply = await verb(finish)(request)
        if reply.status_code == 200 and reply.body == b'{"running":true}':
            reply.status_code = 202
        return reply

    async def train_step(request: Request) -> Response:
        query = request.query_params

        async def step(body: bytes) -> dict[str, Any]:
            rate = query.get("learning_rate")
            return await host.train_step(
                body,
                num_rollouts=int(query["num_rollouts"]),
                policy_version=int(query["policy_version"]),
                learning_rate=None if rate is None else float(rate),
            )

        return await verb(step, raw=True)(request)

    async def role(body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("policy_version")
        return await host.role(
            str(body["to"]), epoch=int(body["epoch"]), policy_version=None if version is None else int(version)
        )

    routes = [
        Route("/status", status),
        Route("/role", verb(role), methods=["POST"]),
        Route("/weights/refresh", verb(lambda body: host.refresh(int(body["policy_version"]))), methods=["POST"]),
        Route("/train/open", verb(lambda body: host.train_open(**body)), methods=["POST"]),
        Route("/train/group", train_group, methods=["POST"]),
        Route("/train/seal", verb(lambda body: host.train_seal(**body)), methods=["POST"]),
        Route("/train/finish", train_finish, methods=["POST"]),
        Route("/train/abort", verb(lambda _: host.train_abort()), methods=["POST"]),
        Route("/train/cut_off", verb(lambda body: host.cut_off(str(body["trainer"]))), methods=["POST"]),
        Route("/train/sum/begin", verb(lambda _: host.sum_begin()), methods=["POST"]),
        Route("/train/sum/end", verb(lambda _: host.sum_end()), methods=["POST"]),
        Route("/train/micro_step", verb(host.micro_step, raw=True), methods=["POST"]),
        Route("/train/optimizer_step", verb(lambda body: host.optimizer_step(**body)), methods=["POST"]),
        Route("/train/step", train_step, methods=["POST"]),
        Route("/train/skip_step", verb(lambda body: host.skip_step(**body)), methods=["POST"]),
        Route("/train/reset", verb(lambda _: host.reset_gradients()), methods=["POST"]),
        Route("/train/weights", verb(lambda _: host.weights()), methods=["POST"]),
        Route("/publish", verb(lambda _: host.publish()), methods=["POST"]),
        Route(
            "/checkpoint/save",
            verb(lambda body: host.save_checkpoint(Path(body["path"]), body["extra"])),
            methods=["POST"],
        ),
        Route("/checkpoint/finish", verb(lambda _: host.finish_checkpoint()), methods=["POST"]),
        Route("/checkpoint/export", verb(lambda body: host.export_hf(Path(body["path"]))), methods=["POST"]),
        Route("/checkpoint/compare", verb(lambda body: host.compare_checkpoint(Path(body["path"]))), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(BaseHTTPMiddleware, dispatch=authenticate)]
    )
    app.state.host = host
    return app


def _host(settings: CellSettings) -> CellHost:
    """The cell, or an emulated one."""
    if settings.emulate is None:
        return CellHost(settings)
    from gyre_core.cells.emulated import EmulatedCellHost

    return EmulatedCellHost(settings)
