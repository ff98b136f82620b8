"""The admin API from the other side: what rollouts and flows use to run sessions on a proxy."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import httpx

from gyre_core.errors import ProxyError
from gyre_core.proxy.drains import DrainReport
from gyre_core.proxy.settings import (
    DrainRequest,
    EngineEntry,
    EnginesUpdate,
    HarnessName,
    LimitSettings,
    SamplingSettings,
)
from gyre_core.proxy.settings import SessionSettings as SessionSettings
from gyre_core.trajectory.arrow import trajectory_from_ipc
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Json


class CreatedSession:
    """How a harness reaches its session: `base_url` with any key, or the proxy's own URL with `api_key`."""

    def __init__(self, session_id: str, api_key: str, proxy_url: str) -> None:
        self.session_id = session_id
        self.api_key = api_key
        self.base_url = f"{proxy_url}/s/{session_id}"


class ProxyAdmin:
    """A proxy's admin verbs. Every failure is a ProxyError.

    Example: admin = ProxyAdmin("http://127.0.0.1:8080", secret); session = await admin.create_session(rollout_id="r1")
    """

    def __init__(self, base_url: str, secret: str, *, timeout_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {secret}"},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
            trust_env=False,
        )

    async def __aenter__(self) -> "ProxyAdmin":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def create_session(
        self,
        *,
        rollout_id: str,
        policy_version: int = 0,
        sampling: SamplingSettings | None = None,
        limits: LimitSettings | None = None,
        harness: HarnessName | None = None,
    ) -> CreatedSession:
        """Open a session for a rollout."""
        settings = SessionSettings(
            rollout_id=rollout_id,
            policy_version=policy_version,
            sampling=sampling or SamplingSettings(),
            limits=limits or LimitSettings(),
            harness=harness or HarnessName(),
        )
        data = (await self._call("POST", "/admin/sessions", settings.model_dump(mode="json"))).json()
        return CreatedSession(data["session_id"], data["api_key"], self.base_url)

    async def seal(self, session_id: str) -> Trajectory:
        """End a session (calls in flight are aborted) and fetch what it recorded; may be called again."""
        response = await self._call("POST", f"/admin/sessions/{session_id}/seal")
        try:
            return trajectory_from_ipc(response.content)
        except ValueError as error:
            raise ProxyError(f"the proxy's trajectory of session {session_id} cannot be read: {error}") from error

    async def delete(self, session_id: str) -> None:
        """Forget a session, its journal included; one that is unknown already is no error."""
        await self._call("DELETE", f"/admin/sessions/{session_id}", missing_ok=True)

    async def set_engines(self, engines: Iterable[EngineEntry], policy_version: int) -> None:
        """Say which engines take calls now. None: calls wait until engines return."""
        update = EnginesUpdate(engines=tuple(engines), policy_version=policy_version)
        await self._call("PUT", "/admin/engines", update.model_dump(mode="json"))

    async def drain(self, url: str, *, timeout_s: float = 30.0, begin: bool = True) -> DrainReport:
        """Move the calls off an engine, which gets no new ones until it is listed again; may be called again.

        Returns when none is left on it or after `timeout_s`; 0 only tells them. `begin=False` only waits.
        """
        request = DrainRequest(url=url, timeout_s=timeout_s, begin=begin)
        response = await self._call("POST", "/admin/drain", request.model_dump(mode="json"), wait_s=timeout_s)
        return DrainReport(**response.json())

    async def status(self) -> Json:
        """Counters of the proxy."""
        return (await self._call("GET", "/admin/status")).json()

    async def _call(
        self, method: str, path: str, body: Any = None, *, missing_ok: bool = False, wait_s: float = 0.0
    ) -> httpx.Response:
        try:
            response = await self._client.request(method, path, json=body, timeout=self._timeout_s + wait_s)
        except httpx.HTTPError as error:
            message = f"the proxy {self.base_url} does not answer ({method} {path}): {error!r}"
            raise ProxyError(message, retryable=True) from error
        if response.status_code == 404 and missing_ok:
            return response
        if response.status_code != 200:
            raise ProxyError(f"the proxy refused {method} {path}: {response.status_code} {response.text[:500]}")
        return response
