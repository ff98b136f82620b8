"""Which engine serves which call: sessions stay where their prefix is cached, slots are hard limits, calls wait.

Enters: the engines that take calls now, sessions that want to make a call, drains, reports of failed engines. Leaves:
grants. The rules are in `RouterState`, pure: it takes the time as an argument and returns what was granted. `Router` is
the asyncio shell around it.

Rules:
- a new call goes to the engine that served its session last while that has a free slot, else to the engine with the
  most free slots (the first of equals); a call that has to go on elsewhere prefers the engine that stays longest;
- a call has one ticket from its arrival to its end, and tickets are served in order: who was served before comes
  before who never was, because it arrived earlier;
- a drained engine gets nothing new; for each call that runs on it a slot elsewhere is held from that moment (or the
  first that becomes free), so that new calls cannot take it before the moved one arrives;
- an engine that failed takes no call for a while that doubles with each failure in a row, then one call, and twice as
  many after each `TRIAL_S` without a failure, until one succeeds: those that wait do not all run into it. Calls that
  fail together are one failure;
- engines that are taken off the list finish what they run and get nothing new.
"""

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_core.clock import Clock, SystemClock
from gyre_core.engine.speed import SpeedMeter
from gyre_core.types import Json

FIRST_BACKOFF_S = 0.25  # an engine that hiccups is asked again soon
MAX_BACKOFF_S = 8.0  # one that is gone costs a call this much at most between tries
TRIAL_S = 0.25  # an engine that is dead or refuses says so in milliseconds


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
    version: int | None = None  # policy version that it serves; None: the one of the whole list
    rank: int = 0  # how long it stays: moved calls prefer the highest

    def __post_init__(self) -> None:
        if self.slots < 1 or not self.url:
            raise ValueError(f"engine {self.url!r} needs a url and at least one slot (it has {self.slots})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A slot on an engine, to be given back with `release`.

    Example: Grant(ticket=4, session_id="s", url="http://127.0.0.1:30000", version=3)
    """

    ticket: int  # of the call; it keeps it when it moves
    session_id: str
    url: str
    version: int  # policy version of the engine when the slot was granted
    granted_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Engine:
    slots: int  # 0: it gets nothing new
    version: int = 0
    rank: int = 0
    busy: int = 0  # calls that run on it, and slots held for calls that come
    failures: int = 0  # in a row
    failed_s: float = float("-inf")  # when the last of them was counted
    not_before_s: float = 0.0
    trials: int = 1  # calls that it may still be given before the next pause, while it has failures
    next_trials: int = 2

    def free(self, now_s: float) -> int:
        if now_s < self.not_before_s:
            return 0
        free = self.slots - self.busy
        return min(free, self.trials) if self.failures else free

    def take(self, now_s: float) -> None:
        self.busy += 1
        if self.failures:
            self.trials -= 1
            if self.trials == 0:
                self.not_before_s = now_s + TRIAL_S
                self.trials, self.next_trials = self.next_trials, 2 * self.next_trials

    def fail(self, now_s: float) -> None:
        self.not_before_s = now_s + backoff_s(self.failures)
        self.failures += 1
        self.failed_s = now_s
        self.trials, self.next_trials = 1, 2


@dataclass(slots=True, kw_only=True)
class _Wait:
    session_id: str
    moved: bool  # it was granted a slot before
    held: bool = False  # nobody waits yet: the call is still on the engine that it has to leave


@dataclass(slots=True, kw_only=True)
class RouterState:
    """The rules above as data and pure transitions.

    A ticket is in `running`, in `waiting` or in none of them; one whose call has to leave its engine is in `running`
    and also in `waiting` or `reserved`.
    """

    version: int = 0
    engines: dict[str, _Engine] = field(default_factory=dict)
    waiting: dict[int, _Wait] = field(default_factory=dict)  # by ticket
    running: dict[int, Grant] = field(default_factory=dict)  # by ticket
    reserved: dict[int, Grant] = field(default_factory=dict)  # slots held for calls that have to move, by ticket
    sticky: dict[str, str] = field(default_factory=dict)  # session -> engine that served it last
    next_ticket: int = 0
    order: list[int] = field(default_factory=list)  # the tickets of `waiting`, sorted

    def set_engines(self, engines: Iterable[EngineSlot], version: int) -> None:
        """Replace the list and forget failures; calls that run keep their slots, on engines that leave the list too.

        Slots that are held for calls on the move are given out anew.
        """
        self._unreserve(self.reserved)
        old = self.engines
        self.engines = {
            engine.url: _Engine(
                slots=engine.slots,
                version=version if engine.version is None else engine.version,
                rank=engine.rank,
                busy=old[engine.url].busy if engine.url in old else 0,
            )
            for engine in engines
        }
        for url, engine in old.items():
            if engine.busy and url not in self.engines:
                # No new call; comes back with what it still runs.
                self.engines[url] = _Engine(slots=0, version=engine.version, rank=engine.rank, busy=engine.busy)
        self.version = version

    def enqueue(self, session_id: str, ticket: int | None = None) -> int:
        """Ask for a slot; returns the ticket. With the ticket that it had, a call gets its old place back."""
        if ticket is not None and ticket in self.waiting:
            self.waiting[ticket].held = False
            return ticket
        moved = ticket is not None
        if ticket is None:
            ticket = self.next_ticket
            self.next_ticket += 1
        self._wait(ticket, _Wait(session_id=session_id, moved=moved))
        return ticket

    def withdraw(self, ticket: int) -> bool:
        """Ask no longer. True when a slot was held for this call, which is free now."""
        if self.waiting.pop(ticket, None) is not None:
            del self.order[bisect_left(self.order, ticket)]
        grant = self.reserved.pop(ticket, None)
        if grant is not None:
            self.engines[grant.url].busy -= 1
        return grant is not None

    def grants(self, now_s: float) -> list[Grant]:
        """Give out the free slots, in order of arrival; those for calls that still run elsewhere are only held."""
        granted = []
        while self.order:
            ticket = self.order[0]
            wait = self.waiting[ticket]
            url = self._choose(wait, now_s)
            if url is None:
                break
            del self.waiting[ticket], self.order[0]
            engine = self.engines[url]
            engine.take(now_s)
            grant = Grant(ticket=ticket, session_id=wait.session_id, url=url, version=engine.version, granted_s=now_s)
            if wait.held:
                self.reserved[ticket] = grant
            else:
                self._start(grant)
                granted.append(grant)
        return granted

    def claim(self, ticket: int) -> Grant | None:
        """The slot that is held for a call which has left its engine, None when there is none yet."""
        grant = self.reserved.pop(ticket, None)
        if grant is not None:
            self._start(grant)
        return grant

    def release(self, grant: Grant) -> None:
        """Give a slot back. What is held or asked for this call elsewhere stays."""
        if self.running.get(grant.ticket) is not None and self.running[grant.ticket].url == grant.url:
            del self.running[grant.ticket]
            self.engines[grant.url].busy -= 1

    def drain(self, url: str) -> tuple[Grant, ...]:
        """Give an engine nothing new until it is listed again; returns the grants of the calls that must leave it."""
        if url in self.engines:
            self.engines[url].slots = 0
        self._unreserve([ticket for ticket, grant in self.reserved.items() if grant.url == url])
        leaving = tuple(grant for grant in self.running.values() if grant.url == url)
        for grant in leaving:
            if not self.moving(grant):
                self._wait(grant.ticket, _Wait(session_id=grant.session_id, moved=True, held=True))
        return leaving

    def moving(self, grant: Grant) -> bool:
        """Whether the call of a grant has to go on elsewhere."""
        return grant.ticket in self.waiting or grant.ticket in self.reserved

    def failed(self, url: str, now_s: float, granted_s: float | None = None) -> None:
        """An engine did not answer well. A call granted before its last failure tells nothing new."""
        engine = self.engines.get(url)
        if engine is not None and (granted_s is None or granted_s > engine.failed_s):
            engine.fail(now_s)
            self._unreserve([ticket for ticket, grant in self.reserved.items() if grant.url == url])

    def succeeded(self, url: str) -> None:
        """An engine answered well."""
        engine = self.engines.get(url)
        if engine is not None:
            engine.failures, engine.not_before_s = 0, 0.0

    def forget(self, session_id: str) -> None:
        """A session ended."""
        self.sticky.pop(session_id, None)

    def residents(self) -> Counter[str]:
        """Of each engine, the open sessions that it served last."""
        return Counter(self.sticky.values())

    def describe(self) -> list[Json]:
        """The engines for the admin. `busy` counts held slots; an engine with 0 slots is drained or off the list."""
        residents = self.residents()
        return [
            {
                "url": url,
                "slots": engine.slots,
                "busy": engine.busy,
                "residents": residents[url],
                "version": engine.version,
                "rank": engine.rank,
            }
            for url, engine in self.engines.items()
        ]

    def next_change_s(self, now_s: float) -> float | None:
        """When an engine that rests may be asked again, None when none rests or nobody waits."""
        times = [engine.not_before_s for engine in self.engines.values() if engine.not_before_s > now_s]
        return min(times) if times and self.waiting else None

    def _choose(self, wait: _Wait, now_s: float) -> str | None:
        last = self.sticky.get(wait.session_id)
        if last in self.engines and self.engines[last].free(now_s) > 0:
            return last
        free = {url: engine.free(now_s) for url, engine in self.engines.items()}
        return max(
            (url for url in free if free[url] > 0),
            key=lambda url: (self.engines[url].rank if wait.moved else 0, free[url]),
            default=None,
        )

    def _start(self, grant: Grant) -> None:
        self.running[grant.ticket] = grant
        self.sticky[grant.session_id] = grant.url

    def _wait(self, ticket: int, wait: _Wait) -> None:
        self.waiting[ticket] = wait
        insort(self.order, ticket)

    def _unreserve(self, tickets: Iterable[int]) -> None:
        """Put calls whose slots were held back to their places in the queue."""
        for ticket in list(tickets):
            grant = self.reserved.pop(ticket)
            self.engines[grant.url].busy -= 1
            self._wait(ticket, _Wait(session_id=grant.session_id, moved=True, held=True))


class Router:
    """Hands out slots to coroutines. One event loop owns it.

    A waiting coroutine is woken by a released slot, a new list of engines, or the end of an engine's rest.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._futures: dict[int, asyncio.Future[Grant]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.state = RouterState()
        self.meter = SpeedMeter()

    async def acquire(self, session_id: str, ticket: int | None = None) -> Grant:
        """Wait for a slot; a call that had one brings its ticket. Cancelling gives up the place in the queue.

        The caller says `leave` when the call ends, because a drain asks for its next slot before it does.
        """
        if ticket is not None and (held := self.state.claim(ticket)) is not None:
            self.meter.begin(held.ticket, held.url, self._clock.monotonic_s())
            return held
        ticket = self.state.enqueue(session_id, ticket)
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._futures[ticket] = future
        self._dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            self.state.withdraw(ticket)
            if future.done() and not future.cancelled():
                self.release(future.result(), failed=None)
            raise
        finally:
            self._futures.pop(ticket, None)

    def release(self, grant: Grant, *, failed: bool | None = False, tokens: int = 0) -> None:
        """Give a slot back and say whether the engine did its work; None when that is not known.

        `tokens`: what was sampled there since the grant.
        """
        self.meter.end(grant.ticket, grant.url, self._clock.monotonic_s(), tokens)
        self.state.release(grant)
        if failed:
            self.state.failed(grant.url, self._clock.monotonic_s(), grant.granted_s)
        elif failed is not None:
            self.state.succeeded(grant.url)
        self._dispatch()

    def leave(self, ticket: int) -> None:
        """A call ended, or waits outside the queue: nothing is asked or held for it any more."""
        if self.state.withdraw(ticket):
            self._dispatch()

    def drain(self, url: str) -> tuple[Grant, ...]:
        """No new calls for an engine; returns the grants of the calls that must leave it. Slots are held for them."""
        leaving = self.state.drain(url)
        self._dispatch()
        return leaving

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
                self.meter.begin(grant.ticket, grant.url, now_s)
                future.set_result(grant)
            else:
                self.state.release(grant)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        change_s = self.state.next_change_s(now_s)
        if change_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, change_s - now_s) + 1e-3, self._dispatch)
