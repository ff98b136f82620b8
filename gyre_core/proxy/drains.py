"""Drains: calls in flight are taken off an engine, keep what they sampled, and go on elsewhere.

Enters: engines that stop serving, calls that run on them. Leaves: `DrainReport`s. The router holds slots elsewhere;
this module ends the calls on the engine; `Sampler` sends them on.

Invariants: every call of a drained engine leaves it in about `ABORT_GRACE_S` at most, whatever the engine does: one
that is granted but not sent is not sent, one that runs is aborted (again and again, because an abort that overtakes its
call is forgotten by the engine), one whose engine does not answer is given up with what it sampled since it came there.
A call that ends by itself meanwhile is over and not moved.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_core.clock import Clock
from gyre_core.engine.client import EngineClient
from gyre_core.engine.router import Grant, Router
from gyre_core.errors import EngineError
from gyre_core.types import Generation, SamplingParams, TokenIds

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 5.0  # an abort is answered in 7 to 36 ms (measured); behind a long prefill in seconds
ABORT_TRY_S = 1.0  # for an engine to take one abort
FIRST_REPEAT_S = 0.05  # between two aborts of one call; doubles up to:
MAX_REPEAT_S = 1.0
MAX_OVER = 256  # drains that are over and remembered: engines that were replaced never come back by their url


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What became of a drain.

    Example: DrainReport(moved=3, partial_tokens=1210, left=0, given_up=0, seconds=0.04)
    """

    moved: int  # calls that go on elsewhere
    partial_tokens: int  # that they had sampled on this engine, and keep
    left: int  # calls that have not left it yet
    given_up: int  # of those moved, without an answer of the engine: what they sampled on it is sampled again
    seconds: float  # until the last one had left, or until now


NOTHING_TO_DRAIN = DrainReport(moved=0, partial_tokens=0, left=0, given_up=0, seconds=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A call on an engine."""

    client: EngineClient
    rid: str
    limit: asyncio.Timeout
    aborting: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Drain:
    started_s: float
    tickets: set[int] = field(default_factory=set)  # of the calls that have not left yet
    moved: int = 0
    partial_tokens: int = 0
    given_up: int = 0
    seconds: float | None = None  # None while calls are left
    over: asyncio.Event = field(default_factory=asyncio.Event)  # all have left, or the engine is back


class Drains:
    """The calls on all engines, and the drains that end them. One event loop owns it."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._flights: dict[int, _Flight] = {}  # by ticket
        self._drains: dict[str, _Drain] = {}  # by url, until the engine is back

    async def fly(
        self, grant: Grant, client: EngineClient, input_ids: TokenIds, params: SamplingParams, *, rid: str
    ) -> Generation | None:
        """Run a call on its engine; None when a drain had to give it up. Errors are the client's."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                flight = self._flights[grant.ticket] = _Flight(client=client, rid=rid, limit=limit)
                try:
                    return await client.generate(input_ids, params, rid=rid, cache_salt=str(grant.version))
                finally:
                    del self._flights[grant.ticket]
                    if flight.aborting is not None:
                        flight.aborting.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("call %s left %s without an answer to its abort", rid, grant.url)
            return None

    def left(self, grant: Grant, *, moved: bool, num_tokens: int = 0, given_up: bool = False) -> None:
        """A call has left its engine; `moved`: to go on elsewhere, with `num_tokens` that it sampled there."""
        drain = self._drains.get(grant.url)
        if drain is None or grant.ticket not in drain.tickets:
            return
        drain.tickets.discard(grant.ticket)
        drain.moved += moved
        drain.partial_tokens += num_tokens if moved else 0
        drain.given_up += given_up
        if not drain.tickets:
            drain.seconds = self._clock.monotonic_s() - drain.started_s
            drain.over.set()

    def begin(self, url: str) -> None:
        """Let an engine get nothing new and tell its calls to end there. Again is no error and changes nothing."""
        drain = self._drains.setdefault(url, _Drain(started_s=self._clock.monotonic_s()))
        over = [known for known, other in self._drains.items() if other is not drain and not other.tickets]
        for known in over[:-MAX_OVER]:
            del self._drains[known]
        for grant in self._router.drain(url):
            drain.tickets.add(grant.ticket)
            flight = self._flights.get(grant.ticket)
            if flight is not None and flight.aborting is None:
                flight.limit.reschedule(asyncio.get_running_loop().time() + ABORT_GRACE_S)
                flight.aborting = asyncio.create_task(_abort(flight), name=f"abort {flight.rid}")
        if not drain.tickets and drain.seconds is None:
            drain.seconds = 0.0
            drain.over.set()

    async def wait(self, url: str, timeout_s: float) -> DrainReport:
        """Wait until no call of a drain is left on the engine, or it is back, or time runs out."""
        drain = self._drains.get(url)
        if drain is None:
            return NOTHING_TO_DRAIN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await drain.over.wait()
        seconds = drain.seconds if drain.seconds is not None else self._clock.monotonic_s() - drain.started_s
        return DrainReport(
            moved=drain.moved,
            partial_tokens=drain.partial_tokens,
            left=len(drain.tickets),
            given_up=drain.given_up,
            seconds=round(seconds, 6),
        )

    def forget(self, listed: Iterable[str]) -> None:
        """Forget the drains of engines that are listed again; their calls still leave."""
        for url in listed:
            drain = self._drains.pop(url, None)
            if drain is not None:
                drain.over.set()


async def _abort(flight: _Flight) -> None:
    """Tell the engine to end a call until the call has ended, which cancels this."""
    pause_s = FIRST_REPEAT_S
    while True:
        try:
            async with asyncio.timeout(ABORT_TRY_S):
                await flight.client.abort(flight.rid)
        except (EngineError, TimeoutError) as error:
            logger.warning("abort of %s: %r", flight.rid, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_REPEAT_S)
