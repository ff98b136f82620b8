"""The queue's service from a member's side. Blocking, one request at a time.

A request whose answer was lost may be sent again: the service gives the open lease once more, counts a completion once
and takes an offer as often as it comes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from gyre_core.errors import GyreError, TrainError
from gyre_core.train.queue import CutOffError
from gyre_core.train.queue_records import StaleStepError
from gyre_core.train.queue_service import LEASE_HEADER, MAX_WAIT_S
from gyre_core.transfer.gradients import BufferOffer

_REFUSALS: dict[str, type[TrainError]] = {"CutOffError": CutOffError, "StaleStepError": StaleStepError}


class CoreUnreachableError(GyreError):
    """The core does not answer: try again later, it may be restarting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWork:
    """A micro-step to compute. Example: MemberWork(micro_step="g0.0", attempt=1, body=b"...")"""

    micro_step: str
    attempt: int
    body: bytes  # branches as Arrow IPC


class QueueClient:
    """Talks to one core. Methods raise CutOffError, StaleStepError, CoreUnreachableError, or GyreError for the rest.

    Example: with QueueClient("http://127.0.0.1:8101", secret) as client: client.join("cell-1", ...)
    """

    def __init__(self, url: str, secret: str, *, wait_s: float = 10.0, answer_s: float = 20.0) -> None:
        """`wait_s`: how long a request waits for news; `answer_s`: how much longer until the core is taken for gone."""
        self.url = url
        self._wait_s = min(wait_s, MAX_WAIT_S)
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(self._wait_s + answer_s, connect=5.0),
            limits=httpx.Limits(keepalive_expiry=2.0),
            trust_env=False,
        )

    def weights(
        self, policy_version: int, weights: str | None, *, trainer: str = "", wait_s: float | None = None
    ) -> tuple[int, BufferOffer] | None:
        """The snapshot to hold, when it is not this version with this checksum; None when there is no other yet."""
        body = {
            "policy_version": policy_version,
            "weights": weights,
            "trainer": trainer,
            "wait_s": self._wait_s if wait_s is None else wait_s,
        }
        reply = self._post("weights", body)
        if reply is None:
            return None
        body = reply.json()
        return int(body["policy_version"]), BufferOffer.from_json(body["offer"])

    def join(self, trainer: str, *, policy_version: int, weights: str) -> str | None:
        """A session of the running step; None while none runs."""
        body = {"trainer": trainer, "policy_version": policy_version, "weights": weights, "wait_s": self._wait_s}
        reply = self._post("join", body)
        return None if reply is None else str(reply.json()["session"])

    def claim(self, session: str) -> MemberWork | str | None:
        """Work, an instruction (hand_over, rejoin, over), or None when there is nothing yet."""
        reply = self._post("claim", {"session": session, "wait_s": self._wait_s})
        if reply is None:
            return None
        if LEASE_HEADER in reply.headers:
            lease = json.loads(reply.headers[LEASE_HEADER])
            return MemberWork(micro_step=lease["micro_step"], attempt=lease["attempt"], body=reply.content)
        return str(reply.json()["do"])

    def complete(self, session: str, work: MemberWork, stats: Mapping[str, float]) -> None:
        """The micro-step's gradient is in this member's buffer."""
        self._post("complete", {**_lease(session, work), "stats": dict(stats)})

    def fail(self, session: str, work: MemberWork, reason: str) -> None:
        """The micro-step was refused here and the gradient dropped. The session has ended."""
        self._post("fail", {**_lease(session, work), "reason": reason})

    def offer(self, session: str, offer: BufferOffer, micro_steps: Sequence[str]) -> None:
        """The gradient lies ready."""
        self._post("offer", {"session": session, "offer": offer.to_json(), "micro_steps": list(micro_steps)})

    def leave(self, trainer: str) -> None:
        """This member goes: its waiting requests (also another thread's) end, and it gets no more work."""
        self._post("leave", {"trainer": trainer})

    def stay_present(self, trainer: str) -> None:
        """Stand until the connection breaks or the client is closed: by it the core sees that this process lives."""
        timeout = httpx.Timeout(5.0, read=None)
        try:
            with self._http.stream("POST", "/members/presence", json={"trainer": trainer}, timeout=timeout) as reply:
                for _ in reply.iter_raw():
                    pass
        except (httpx.HTTPError, RuntimeError) as error:  # closed by another thread
            raise CoreUnreachableError(f"the connection to the core at {self.url} broke: {error!r}") from error

    def status(self) -> dict[str, Any]:
        """Version and step as the service sees them."""
        return self._send("GET", "status", None).json()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "QueueClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, verb: str, body: dict[str, Any]) -> httpx.Response | None:
        reply = self._send("POST", verb, body)
        return None if reply.status_code == 204 else reply

    def _send(self, method: str, verb: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            reply = self._http.request(method, f"/members/{verb}", json=body)
        except httpx.HTTPError as error:
            raise CoreUnreachableError(f"the core at {self.url} does not answer {verb}: {error!r}") from error
        if reply.status_code < 400:
            return reply
        if reply.status_code == 503:
            raise CoreUnreachableError(f"{verb}: the core at {self.url} is not ready: {reply.text[:200]}")
        try:
            data = reply.json()
        except ValueError:
            data = {}
        kind = _REFUSALS.get(data.get("kind", ""), GyreError)
        raise kind(f"{verb}: {data.get('error', reply.text[:500])}")


def _lease(session: str, work: MemberWork) -> dict[str, Any]:
    return {"session": session, "micro_step": work.micro_step, "attempt": work.attempt}
