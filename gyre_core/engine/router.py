"""Which engine serves which call: sessions stay where their prefix is cached, slots are hard limits, calls wait.

Enters: the engines that take calls now, sessions that want to make a call, reports of failed engines. Leaves: grants.
The rules are in `RouterState`, pure: it takes the time as an argument and returns what was granted. `Router` is the
asyncio shell around it.

Rules: a session goes to the engine that served it last while that has a free slot, else to the engine with the most
free slots (the first of equals); who waits is served in order of arrival; an engine that failed takes no call for a
while that doubles with each failure in a row; engines that are taken off the list finish what they run and get nothing
new.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_core.clock import Clock, SystemClock

FIRST_BACKOFF_S = 0.25  # an engine that hiccups is asked again soon
MAX_BACKOFF_S = 8.0  # one that is gone costs a call this much at most between tries


def backoff_s(failures: int) -> float:
    """How long to leave an engine alone after so many failures before this one."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 32))  # an outage may last thousands of tries


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """An engine that takes calls.

    Example: EngineSlot(url="http://127.0.0.1:30000", slots=16)
    """

    url: str
    slots: int  # calls at once

    def __post_init__(self) -> None:
        if self.slots < 1 or not self.url:
            raise ValueError(f"engine {self.url!r} needs a url and at least one slot (it has {self.slots})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A slot on an engine, to be given back with `release`.

    Example: Grant(ticket=4, session_id="s", url="http://127.0.0.1:30000", version=3)
    """

    ticket: int
    session_id: str
    url: str
    version: int  # policy version of the engines when the slot was granted


@dataclass(slots=True, kw_only=True)
class _Engine:
    slots: int
    busy: int = 0
    failures: int = 0
    not_before_s: float = 0.0

    def free(self, now_s: float) -> int:
        return self.slots - self.busy if now_s >= self.not_before_s else 0


@dataclass(slots=True, kw_only=True)
class RouterState:
    """The rules above as data and pure transitions."""

    version: int = 0
    engines: dict[str, _Engine] = field(default_factory=dict)
    waiting: OrderedDict[int, str] = field(default_factory=OrderedDict)  # ticket -> session
    sticky: dict[str, str] = field(default_factory=dict)  # session -> engine that served it last
    next_ticket: int = 0

    def set_engines(self, engines: Iterable[EngineSlot], version: int) -> None:
        """Replace the list and forget failures; calls that run keep their slots, on engines that leave the list too."""
        old = self.engines
        self.engines = {
            engine.url: _Engine(slots=engine.slots, busy=old[engine.url].busy if engine.url in old else 0)
            for engine in engines
        }
        for url, engine in old.items():
            if engine.busy and url not in self.engines:
                self.engines[url] = _Engine(
                    slots=0, busy=engine.busy
                )  # no new call; comes back with what it still runs
        self.version = version

    def enqueue(self, session_id: str) -> int:
        """Ask for a slot; returns the ticket."""
        ticket = self.next_ticket
        self.next_ticket += 1
        self.waiting[ticket] = session_id
        return ticket

    def withdraw(self, ticket: int) -> None:
        """Ask no longer."""
        self.waiting.pop(ticket, None)

    def grants(self, now_s: float) -> list[Grant]:
        """Give out the free slots, in order of arrival."""
        granted = []
        while self.waiting:
            ticket, session_id = next(iter(self.waiting.items()))
            url = self._choose(session_id, now_s)
            if url is None:
                break
            del self.waiting[ticket]
            self.engines[url].busy += 1
            self.sticky[session_id] = url
            granted.append(Grant(ticket=ticket, session_id=session_id, url=url, version=self.version))
        return granted

    def release(self, grant: Grant) -> None:
        """Give a slot back."""
        engine = self.engines.get(grant.url)
        if engine is not None:
            engine.busy = max(0, engine.busy - 1)

    def failed(self, url: str, now_s: float) -> None:
        """An engine did not answer well."""
        engine = self.engines.get(url)
        if engine is not None:
            engine.not_before_s = now_s + backoff_s(engine.failures)
            engine.failures += 1

    def succeeded(self, url: str) -> None:
        """An engine answered well."""
        engine = self.engines.get(url)
        if engine is not None:
            engine.failures, engine.not_before_s = 0, 0.0

    def forget(self, session_id: str) -> None:
        """A session ended."""
        self.sticky.pop(session_id, None)

    def next_change_s(self, now_s: float) -> float | None:
        """When an engine that rests may be asked again, None when none rests or nobody waits."""
        times = [engine.not_before_s for engine in self.engines.values() if engine.not_before_s > now_s]
        return min(times) if times and self.waiting else None

    def _choose(self, session_id: str, now_s: float) -> str | None:
        last = self.sticky.get(session_id)
        if last in self.engines and self.engines[last].free(now_s) > 0:
            return last
        best = max(self.engines, key=lambda url: self.engines[url].free(now_s), default=None)
        return best if best is not None and self.engines[best].free(now_s) > 0 else None


class Router:
    """Hands out slots to coroutines. One event loop owns it.

    A waiting coroutine is woken by a released slot, a new list of engines, or the end of an engine's rest.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._futures: dict[int, asyncio.Future[Grant]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.state = RouterState()

    async def acquire(self, session_id: str) -> Grant:
        """Wait for a slot. Cancelling gives up the place in the queue."""
        ticket = self.state.enqueue(session_id)
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            self.state.withdraw(ticket)
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise
        finally:
            self._futures.pop(ticket, None)

    def release(self, grant: Grant, *, failed: bool = False) -> None:
        """Give a slot back and say whether the engine did its work."""
        self.state.release(grant)
        if failed:
            self.state.failed(grant.url, self._clock.monotonic_s())
        else:
            self.state.succeeded(grant.url)
        self._dispatch()

    def set_engines(self, engines: Iterable[EngineSlot], version: int) -> None:
        """Replace the engines that take calls; an empty list makes calls wait."""
        self.state.set_engines(engines, version)
        self._dispatch()

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session that ended."""
        self.state.forget(session_id)

    def _dispatch(self) -> None:
        now_s = self._clock.monotonic_s()
        for grant in self.state.grants(now_s):
            future = self._futures.get(grant.ticket)
            if future is not None and not future.done():
                future.set_result(grant)
            else:
                self.state.release(grant)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        change_s = self.state.next_change_s(now_s)
        if change_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, change_s - now_s) + 1e-3, self._dispatch)
