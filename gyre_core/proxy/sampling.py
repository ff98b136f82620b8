"""One call on whatever engines there are: waits for a slot, survives engines that fail, keeps partial outputs.

Enters: a prompt's exact ids and how to sample. Leaves: one `Generation` whose spans name every policy version that
sampled a part of it. An engine that ends a call early (its cell changes role, it stops) is not an end: the call goes on
elsewhere, or on the same engine when it returns, with prompt + partial output as its prompt.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from opentelemetry.trace import SpanKind

from gyre_core.clock import Clock, SystemClock
from gyre_core.engine.client import EngineClient
from gyre_core.engine.router import EngineSlot, Grant, Router, backoff_s
from gyre_core.errors import EngineError
from gyre_core.proxy.drains import DrainReport, Drains
from gyre_core.proxy.parts import Decode, PartialCall, joined
from gyre_core.proxy.settings import EngineEntry
from gyre_core.tracing.spans import NO_TRACING, Tracing, note
from gyre_core.types import FinishReason, Generation, SamplingParams, TokenIds

logger = logging.getLogger(__name__)

COUNTERS = ("engine_errors", "calls_resumed", "calls_moved", "tokens_recomputed")  # shown from the start, as zeros

Connect = Callable[[str, str | None], EngineClient]  # url and key -> client


class Sampler:
    """Runs calls on the router's engines; one for a proxy process."""

    def __init__(
        self,
        router: Router,
        connect: Connect,
        *,
        attempts: int,
        clock: Clock | None = None,
        decode: Decode | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`connect` makes the client of an engine's url and key; `attempts` bounds tries in a row without a token.

        `decode` gives the text of ids, for stop strings that begin before a move and end after it.
        """
        self.router = router
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._clock = clock or SystemClock()
        self._drains = Drains(router, self._clock)
        self._decode = decode
        self._tracing = tracing
        self._kv_write_s: dict[str, float] = {}  # by url, of the same ones
        self._connect = connect
        self._clients: dict[tuple[str, str | None], EngineClient] = {}  # by url and key
        self._keys: dict[str, str | None] = {}  # by url, of the engines on the list and of those with calls
        self._attempts = attempts

    async def sample(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        session_id: str,
        call_id: str,
        seed: int | None,
        patient: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Sample until the call really ends.

        Raises EngineError when engines failed `attempts` times in a row or one gave an answer that no retry mends,
        but not while `patient()`: then engines are tried without bound. ValueError for a prompt that no engine may
        see. Cancelling aborts the call on its engine.
        """
        call = PartialCall(
            session_id=session_id,
            call_id=call_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=seed,
            decode=self._decode,
        )
        try:
            while True:
                if call.num_refused:
                    # The fault may be the call's: engines that serve others well must not rest for it again and again.
                    self._leave(call)
                    await asyncio.sleep(backoff_s(call.num_refused - 1))
                if call.fruitless > 1:
                    self._leave(call)  # it has had its turn and got nothing: who waits comes first
                    call.ticket = None
                grant = await self.router.acquire(session_id, call.ticket)
                call.ticket = grant.ticket
                try:
                    if await self._fly(call, grant):
                        return joined(call.parts, prompt_tokens=len(prompt_ids))
                except EngineError as error:
                    if (not error.retryable or call.fruitless >= self._attempts) and not patient():
                        raise
                else:
                    if call.fruitless >= self._attempts and not patient():
                        raise EngineError(f"call {call_id}: {call.fruitless} tries without a token", retryable=True)
        finally:
            self._leave(call)

    async def drain(self, url: str, timeout_s: float, *, begin: bool = True) -> DrainReport:
        """Move the calls off an engine, which gets no new ones until it is listed again; waits until none is left."""
        if begin:
            self._drains.begin(url)
        return await self._drains.wait(url, timeout_s)

    async def _fly(self, call: PartialCall, grant: Grant) -> bool:
        """Go on with a call on one engine. True when it is complete; raises EngineError, counted already."""
        failed: bool | None = None
        moved = given_up = False
        num_tokens = 0
        try:
            resumed = call.left_url is not None
            await self._settle(call, grant)
            if self.router.state.moving(grant):  # drained between the grant and now
                moved = True
                return False
            call.left_url, call.settled_s = grant.url, 0.0
            rid = call.next_rid()
            generation = await self._generate(call, grant, rid)
            moved = self.router.state.moving(grant)
            if generation is None:
                given_up = True
                return False
            num_tokens = len(generation.output_ids)
            if resumed and num_tokens:
                self.counters["tokens_recomputed"] += max(0, generation.prompt_tokens - generation.cached_tokens)
            # An abort without a token that we did not ask for is an engine that stops working: let it rest.
            failed = not num_tokens and not moved
            complete = call.add(generation)
            call.fruitless += failed
            if complete:
                moved = False
            elif generation.finish_reason is FinishReason.ABORT:
                call.settled_s = self._clock.monotonic_s() + self._kv_write_s.get(grant.url, 0.0)
                self.counters["calls_resumed"] += 1
                logger.info("call %s was interrupted on %s after %d tokens", call.call_id, grant.url, call.num_done)
            return complete
        except EngineError as error:
            failed = True
            self.counters["engine_errors"] += 1
            moved = self.router.state.moving(grant)
            if moved:
                logger.warning("call %s on %s, which is drained: %s", call.call_id, grant.url, error)
                return False
            call.fruitless += 1
            call.num_refused += not error.retryable
            logger.warning("call %s on %s, try %d: %s", call.call_id, grant.url, call.fruitless, error)
            raise
        finally:
            self.counters["calls_moved"] += moved
            self.router.release(grant, failed=failed, tokens=num_tokens)
            self._drains.left(grant, moved=moved, num_tokens=num_tokens, given_up=given_up)

    async def _generate(self, call: PartialCall, grant: Grant, rid: str) -> Generation | None:
        """One try on an engine, as a span below the call's."""
        about = {"server.address": grant.url, "gyre.policy_version": grant.version, "gyre.try": call.num_tries}
        with self._tracing.span("engine.generate", about, kind=SpanKind.CLIENT) as span:
            generation = await self._drains.fly(grant, self._client(grant), call.ids(), call.rest(), rid=rid)
            if generation is not None:
                note(
                    span,
                    {
                        "gen_ai.usage.input_tokens": generation.prompt_tokens,
                        "gen_ai.usage.output_tokens": len(generation.output_ids),
                        "gyre.cached_tokens": generation.cached_tokens,
                        "gyre.finish_reason": generation.finish_reason.value,
                    },
                )
            return generation

    async def _settle(self, call: PartialCall, grant: Grant) -> None:
        """Wait, on the slot, until the engine that a call left has written its keys and values for the others."""
        left_s = call.settled_s - self._clock.monotonic_s()
        if left_s > 0 and grant.url != call.left_url:
            await asyncio.sleep(left_s)

    def _leave(self, call: PartialCall) -> None:
        if call.ticket is not None:
            self.router.leave(call.ticket)

    async def set_engines(self, engines: Sequence[EngineEntry], version: int) -> None:
        """Replace the engines that take calls, and close the clients of engines that are gone and have no calls."""
        self._keys |= {engine.url: engine.api_key for engine in engines}
        self._kv_write_s |= {engine.url: engine.kv_write_s for engine in engines}
        self._drains.forget(engine.url for engine in engines)
        self.router.set_engines(
            [
                EngineSlot(url=engine.url, slots=engine.slots, version=engine.version, rank=engine.rank)
                for engine in engines
            ],
            version,
        )
        busy = {url for url, engine in self.router.state.engines.items() if engine.busy}
        wanted = busy | {engine.url for engine in engines}
        self._keys = {url: key for url, key in self._keys.items() if url in wanted}
        self._kv_write_s = {url: seconds for url, seconds in self._kv_write_s.items() if url in wanted}
        for address in self._clients.keys() - self._keys.items():
            if address[0] not in busy:
                with contextlib.suppress(Exception):
                    await self._clients.pop(address).aclose()

    async def aclose(self) -> None:
        """Close all clients."""
        while self._clients:
            await self._clients.popitem()[1].aclose()

    def _client(self, grant: Grant) -> EngineClient:
        address = (grant.url, self._keys.get(grant.url))
        if address not in self._clients:
            self._clients[address] = self._connect(*address)
        return self._clients[address]
