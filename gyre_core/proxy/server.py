"""The proxy's HTTP surface: harnesses on one side, the flow's admin on the other.

Enters: HTTP. Leaves: replies in each API's own form. A harness names its session by a base URL (`/s/<session id>`, 128
random bits) or by its key (`gyre-<session id>-<token>`); the admin by its own secret. Secrets are compared in constant
time. Nothing that a client sends can end the server or touch another session.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict

import orjson
import xxhash
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gyre_core.clock import Clock, SystemClock
from gyre_core.engine.client import EngineClient
from gyre_core.engine.router import Router
from gyre_core.errors import ProxyError
from gyre_core.proxy.conversation import ChatRequest
from gyre_core.proxy.delivery import ReplyResponse
from gyre_core.proxy.dialects.anthropic import MessagesDialect
from gyre_core.proxy.dialects.base import Dialect
from gyre_core.proxy.dialects.chat import ChatDialect
from gyre_core.proxy.dialects.responses import ResponsesDialect
from gyre_core.proxy.journal import Journal, JournalFolder
from gyre_core.proxy.pressure import Pass, Pressure
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request
from gyre_core.proxy.render import PromptRenderer
from gyre_core.proxy.sampling import Connect, Sampler
from gyre_core.proxy.session import Session
from gyre_core.proxy.settings import DrainRequest, EnginesUpdate, ProxySettings, SessionSettings
from gyre_core.tracing.spans import Tracing
from gyre_core.trajectory.roles import BUILTIN_TABLES, role_table
from gyre_core.types import Json

logger = logging.getLogger(__name__)

# An empty array takes two bytes of a body and 72 once it is parsed. Code in real histories has one bracket in 30 bytes.
LONG_BODY = 256 * 1024  # bytes; shorter ones are not worth counting
BYTES_PER_NODE = 16
MAX_PARTS = 4096  # of a body in memory: a client that sends single bytes must not cost an object for each
KEY_PREFIX = "gyre-"  # of the keys that name a session

_MESSAGES = MessagesDialect()
_CHAT = ChatDialect()
_RESPONSES = ResponsesDialect()
_ENDPOINTS: dict[str, tuple[Dialect, bool]] = {  # path -> dialect, whether it only counts tokens
    "v1/messages": (_MESSAGES, False),
    "v1/messages/count_tokens": (_MESSAGES, True),
    "v1/chat/completions": (_CHAT, False),
    "chat/completions": (_CHAT, False),  # base URLs without /v1
    "v1/responses": (_RESPONSES, False),
    "responses": (_RESPONSES, False),
}


class Proxy:
    """The state of one proxy process."""

    def __init__(self, settings: ProxySettings, *, connect: Connect | None = None, clock: Clock | None = None) -> None:
        """Load the tokenizer and restore the journal's sessions; raises SetupError or ConfigError."""
        self.settings = settings
        self.clock = clock or SystemClock()
        self.tracing = Tracing(settings.tracing, settings.name)
        self.renderer = PromptRenderer.load(settings.model_path, settings.renderer, settings.thinking_retention)
        self.renderer.context_length = settings.context_length
        self.router = Router(self.clock)
        self.sampler = Sampler(
            self.router,
            connect or self._connect,
            attempts=settings.engine_attempts,
            clock=self.clock,
            decode=self.renderer.decode,
            tracing=self.tracing,
        )
        self.sessions: dict[str, tuple[Session, bytes]] = {}  # with the SHA-256 of the key's token
        self.counters: Counter[str] = Counter()
        self.pressure = Pressure(max_requests=settings.max_open_calls, max_bytes=settings.max_pending_bytes)
        self._tables = (*(role_table(row) for row in settings.role_tables), *BUILTIN_TABLES)
        self._folder = (
            JournalFolder(settings.journal_dir, sync=settings.journal_sync)
            if settings.journal_dir is not None
            else None
        )
        if self._folder is not None:
            self._restore(self._folder)

    def create_session(self, settings: SessionSettings) -> Json:
        """A new session; raises ProxyError when its journal cannot be made."""
        session_id, token = secrets.token_hex(16), secrets.token_hex(16)
        digest = hashlib.sha256(token.encode()).digest()
        created_s = self.clock.now_s()
        journal = None
        if self._folder is not None:
            record = {"settings": settings.model_dump(mode="json"), "token_sha256": digest.hex()}
            journal = self._folder.create(session_id, {**record, "created_s": created_s})
        self.sessions[session_id] = (self._session(session_id, settings, created_s, journal), digest)
        return {"session_id": session_id, "api_key": f"{KEY_PREFIX}{session_id}-{token}"}

    def find_session(self, path_session: str | None, key: str) -> Session:
        """The session that a request may use; raises Refusal."""
        own_key = key.split("-") if key.startswith(KEY_PREFIX) else []
        if path_session is None and len(own_key) != 3:
            raise Refusal(RefusalKind.AUTHENTICATION, "invalid x-api-key: this proxy needs the key of a session")
        session_id = path_session if path_session is not None else own_key[1]
        session, digest = self.sessions.get(session_id, (None, b"\0" * 32))
        if own_key:
            # A key of ours must fit, whatever the path says: one session's harness never reaches another.
            given = hashlib.sha256(own_key[2].encode()).digest() if len(own_key) == 3 else b""
            fits = hmac.compare_digest(given, digest) and hmac.compare_digest(own_key[1].encode(), session_id.encode())
            if not fits:
                raise Refusal(RefusalKind.AUTHENTICATION, "invalid x-api-key: no session has this key")
        if session is None:
            raise Refusal(RefusalKind.AUTHENTICATION, "invalid x-api-key: no such session")
        return session

    def status(self) -> Json:
        """Counters of the process and its sessions."""
        sessions = [session.status() for session, _ in self.sessions.values()]
        totals: Counter[str] = Counter()
        for row in sessions:
            totals.update(row["counters"])
        state = self.router.state
        own = self.counters + self.pressure.counters
        return {
            "sessions": len(sessions),
            "open_sessions": sum(not row["sealed"] for row in sessions),
            "calls": sum(row["calls"] for row in sessions),
            "in_flight": sum(row["in_flight"] for row in sessions),
            "open_responses": sum(row["open_responses"] for row in sessions),
            "waiting": len(state.waiting),
            "open_requests": self.pressure.requests,
            "pending_bytes": self.pressure.bytes,
            "sampled_tokens": sum(row["sampled_tokens"] for row in sessions),
            "policy_version": state.version,
            "engines": state.describe(),
            "speed": list(self.router.meter.sums),
            "counters": {**self.sampler.counters, **(totals + self.sampler.counters + own)},
        }

    async def aclose(self) -> None:
        """End the calls in flight, close clients and journals; sessions can be restored."""
        for session, _ in self.sessions.values():
            await session.end_calls()
        await self.sampler.aclose()
        for session, _ in self.sessions.values():
            session.close()
        if self._folder is not None:
            self._folder.close()
        await asyncio.to_thread(self.tracing.close)

    def _session(
        self, session_id: str, settings: SessionSettings, created_s: float, journal: Journal | None
    ) -> Session:
        return Session(
            session_id,
            settings,
            renderer=self.renderer,
            sampler=self.sampler,
            tracing=self.tracing,
            tables=self._tables,
            context_length=self.settings.context_length,
            clock=self.clock,
            created_s=created_s,
            journal=journal,
        )

    def _restore(self, folder: JournalFolder) -> None:
        for session_id, journal, records in folder.restore():
            header = records[0][0]
            try:
                settings = SessionSettings.model_validate_json(orjson.dumps(header["settings"]))
                session = self._session(
                    session_id, settings, float(header.get("created_s", self.clock.now_s())), journal
                )
                session.restore(records[1:])
                self.sessions[session_id] = (session, bytes.fromhex(header["token_sha256"]))
            except (ValueError, KeyError, TypeError):
                logger.exception("the journal of session %s cannot be read and is left aside", session_id)
                journal.close()
        if self.sessions:
            logger.info("restored %d sessions from the journal", len(self.sessions))

    def _connect(self, url: str, api_key: str | None) -> EngineClient:
        from gyre_core.engine.sglang_client import SGLangClient

        return SGLangClient(
            url,
            vocab_size=self.renderer.vocab_size,
            api_key=api_key,
            timeout_s=self.settings.engine_call_timeout_s,
        )


def create_app(settings: ProxySettings, *, connect: Connect | None = None, clock: Clock | None = None) -> Starlette:
    """The proxy as an ASGI application; `connect` makes engine clients (SGLang's by default).

    Example: uvicorn.run(create_app(settings), host=settings.host, port=settings.port)
    """
    proxy = Proxy(settings, connect=connect, clock=clock)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await proxy.aclose()

    async def harness(request: Request) -> Response:
        return await _harness(proxy, request)

    async def admin(request: Request) -> Response:
        return await _admin(proxy, request)

    routes = [
        Route("/healthz", _healthz, methods=["GET"]),
        Route("/admin/{verb:path}", admin, methods=["GET", "POST", "PUT", "DELETE"]),
        Route("/{path:path}", harness, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.proxy = proxy
    return app


async def _healthz(_: Request) -> Response:
    return _json({"ok": True})


# Harness side


async def _harness(proxy: Proxy, request: Request) -> Response:
    path: str = request.path_params["path"].strip("/")
    path_session: str | None = None
    if path == "s" or path.startswith("s/"):
        _, _, rest = path.partition("/")
        path_session, _, path = rest.partition("/")
    if request.method in ("GET", "HEAD", "OPTIONS") and "responses/" not in path:  # a stored response is no probe
        return _probe(path)
    dialect, counts_only = _ENDPOINTS.get(path, (_guess_dialect(request, path), False))
    session: Session | None = None
    chat: ChatRequest | None = None
    share: Pass | None = None
    try:
        if path not in _ENDPOINTS or request.method != "POST":
            raise Refusal(RefusalKind.NOT_FOUND, f"no such endpoint: {request.method} /{path}"[:200])
        session = proxy.find_session(path_session, _api_key(request))
        share = proxy.pressure.enter()
        limit = session.settings.limits.max_body_bytes or proxy.settings.max_body_bytes
        body = await _read_body(request, limit, proxy.settings.body_timeout_s, share)
        chat = _parse(dialect, body, request)
        if counts_only:
            return _json({"input_tokens": await session.count_tokens(chat)})
        digest = _digest(path, body)
        response = await _answer(proxy, session, chat, dialect, digest, share)
        share = None  # the response drops it
        return response
    except Refusal as refusal:
        return _refuse(proxy, session, dialect, refusal, chat)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except Exception:
        logger.exception("a request to /%s failed by a fault of ours", path[:100])
        return _refuse(proxy, session, dialect, Refusal(RefusalKind.INTERNAL, "internal error of the proxy"))
    finally:
        if share is not None:
            share.drop()


async def _answer(
    proxy: Proxy, session: Session, chat: ChatRequest, dialect: Dialect, digest: bytes, share: Pass
) -> Response:
    """The response with a call's reply, which may not be there yet. Raises Refusal while there is none."""
    keepalive_s = proxy.settings.keepalive_s
    call = session.call(chat, dialect, digest)
    share.hold()
    call.when_done(share.drop)
    await call.wait(keepalive_s)
    return ReplyResponse(
        call,
        chat,
        dialect,
        keepalive_s=keepalive_s,
        connections=session.connections,
        delivered=lambda reply: session.delivered(digest, reply),
        count=session.count,
        ended=share.drop,
    )


def _refuse(
    proxy: Proxy, session: Session | None, dialect: Dialect, refusal: Refusal, chat: ChatRequest | None = None
) -> Response:
    if session is not None:
        session.count(f"refused_{refusal.kind.value}")
    else:
        proxy.counters[f"refused_{refusal.kind.value}"] += 1
    status, body = dialect.error(refusal)
    unique = secrets.token_hex(8)
    headers = {"request-id": f"req_{unique}", "x-request-id": f"req_{unique}"}  # Anthropic's name, OpenAI's
    if chat is not None and chat.stream:
        events = dialect.error_events(refusal, chat, unique, proxy.clock.now_s())
        if events:
            return Response(events, media_type="text/event-stream", headers=headers)
    if refusal.kind is RefusalKind.UNAVAILABLE:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.kind is RefusalKind.TOO_LARGE:
        headers["connection"] = "close"  # the rest of the body is not read
    return _json(body, status, headers)


def _parse(dialect: Dialect, body: bytes, request: Request) -> ChatRequest:
    if len(body) > LONG_BODY and body.count(b"[") + body.count(b"{") > len(body) // BYTES_PER_NODE:
        raise bad_request("the request body has too many arrays and objects for its size")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request("the request body must be a JSON object")
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        return dialect.parse(data, headers)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise bad_request(f"the request cannot be read: {type(error).__name__}") from error


async def _read_body(request: Request, limit: int, timeout_s: float, share: Pass) -> bytes:
    too_large = Refusal(RefusalKind.TOO_LARGE, f"the request body exceeds {limit} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit():
        if int(length) > limit:
            raise too_large
        share.grow(int(length))
    parts: list[bytes] = []  # joined once: a bytearray that grows costs five times as much for a long history
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                parts.append(chunk)
                if len(parts) > MAX_PARTS:
                    parts = [b"".join(parts)]
                size += len(chunk)
                if size > limit:
                    raise too_large
                share.grow(size)
    except TimeoutError as error:
        raise bad_request(f"the request body did not arrive in {timeout_s:g} s") from error
    return b"".join(parts)


def _digest(path: str, body: bytes) -> bytes:
    digest = xxhash.xxh3_128(path.encode() + b"\n")
    digest.update(body)
    return digest.digest()


def _api_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    keys = (request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else "")
    return next((key for key in keys if key.startswith(KEY_PREFIX)), keys[0] or keys[1])


def _guess_dialect(request: Request, path: str) -> Dialect:
    if "messages" in path or "anthropic-version" in request.headers:
        return _MESSAGES
    return _RESPONSES if "responses" in path else _CHAT


def _probe(path: str) -> Response:
    head, _, name = path.rpartition("models")
    if head not in ("", "v1/") or not path.startswith(f"{head}models"):
        return _json({"ok": True})
    if name.startswith("/"):
        return _json(_model(name[1:]))  # any name is served
    data = [_model("gyre-policy")]
    return _json(
        {"object": "list", "data": data, "has_more": False, "first_id": "gyre-policy", "last_id": "gyre-policy"}
    )


def _model(name: str) -> Json:
    """A model as both Anthropic and OpenAI describe one."""
    openai = {"object": "model", "created": 0, "owned_by": "gyre"}
    return {"id": name, "type": "model", "display_name": name, "created_at": "2025-01-01T00:00:00Z", **openai}


# Admin side


async def _admin(proxy: Proxy, request: Request) -> Response:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    expected = proxy.settings.admin_secret.encode()
    if scheme.lower() != "bearer" or not hmac.compare_digest(secret.strip().encode(), expected):
        return _json({"error": "the admin secret is missing or wrong"}, 401)
    parts = request.path_params["verb"].strip("/").split("/")
    try:
        match request.method, parts:
            case "POST", ["sessions"]:
                settings = SessionSettings.model_validate_json(await _admin_body(request))
                return _json(proxy.create_session(settings))
            case "POST", ["sessions", session_id, "seal"] if session_id in proxy.sessions:
                data = await proxy.sessions[session_id][0].seal()
                return Response(data, media_type="application/vnd.apache.arrow.stream")
            case "DELETE", ["sessions", session_id] if session_id in proxy.sessions:
                session, _ = proxy.sessions.pop(session_id)
                await session.drop()
                return _json({"ok": True})
            case "PUT", ["engines"]:
                update = EnginesUpdate.model_validate_json(await _admin_body(request))
                await proxy.sampler.set_engines(update.engines, update.policy_version)
                return _json({"ok": True})
            case "POST", ["drain"]:
                drain = DrainRequest.model_validate_json(await _admin_body(request))
                report = await proxy.sampler.drain(drain.url, drain.timeout_s, begin=drain.begin)
                return _json(asdict(report))
            case "GET", ["status"]:
                return _json(proxy.status())
            case _:
                return _json(
                    {"error": f"no such session or verb: {request.method} /admin/{'/'.join(parts)}"[:200]}, 404
                )
    except (ValidationError, Refusal) as error:
        return _json({"error": str(error)}, 400)
    except ProxyError as error:
        logger.error("admin call failed: %s", error)
        return _json({"error": str(error)}, 503)


async def _admin_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > 2**20:
            raise bad_request("the body of an admin call exceeds 1 MiB")
    return bytes(body)


def _json(data: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json", headers=headers)
