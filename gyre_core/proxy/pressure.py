"""How much work a proxy process takes at once: a bound on open requests and on the bytes of their bodies.

Enters: requests, before their bodies are read. Leaves: a pass, or a refusal that the client may retry. A body counts
from its first byte until its call has ended and its response is closed: that is how long the parsed request may be in
memory (parsed JSON takes some times its bytes).
"""

from collections import Counter
from dataclasses import dataclass, field

from gyre_core.proxy.refusal import Refusal, RefusalKind

RETRY_AFTER_S = 5  # a proxy that is full stays full for some calls' time


@dataclass(slots=True, kw_only=True)
class Pressure:
    """The counts of one process."""

    max_requests: int
    max_bytes: int
    requests: int = 0
    bytes: int = 0
    counters: Counter[str] = field(default_factory=Counter)

    def enter(self) -> "Pass":
        """Take a request; raises Refusal when there are too many."""
        if self.requests >= self.max_requests:
            raise self.full("requests", f"{self.requests} requests are open")
        self.requests += 1
        return Pass(self)

    def full(self, what: str, why: str) -> Refusal:
        """A refusal, counted."""
        self.counters[f"full_{what}"] += 1
        return Refusal(RefusalKind.UNAVAILABLE, f"the proxy is full, try again: {why}", retry_after_s=RETRY_AFTER_S)


class Pass:
    """One request's share. It is given back when all its holders (the connection, its call) have dropped it."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._bytes = 0
        self._holders = 1

    def grow(self, total_bytes: int) -> None:
        """The body has this many bytes, or will have them; raises Refusal when that is too much for the process."""
        more = total_bytes - self._bytes
        if more <= 0:
            return
        if self._pressure.bytes + more > self._pressure.max_bytes:
            raise self._pressure.full("bytes", f"{self._pressure.bytes} bytes of requests are open")
        self._pressure.bytes += more
        self._bytes += more

    def hold(self) -> None:
        """One more holder."""
        self._holders += 1

    def drop(self) -> None:
        """One holder less."""
        self._holders -= 1
        if self._holders == 0:
            self._pressure.requests -= 1
            self._pressure.bytes -= self._bytes
