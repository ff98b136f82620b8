"""One call on whatever engines there are: waits for a slot, survives engines that fail, keeps partial outputs.

Enters: a prompt's exact ids and how to sample. Leaves: one `Generation` whose spans name every policy version that
sampled a part of it. An engine that ends a call early (its cell changes role, it stops) is not an end: the call goes on
elsewhere, or on the same engine when it returns, with prompt + partial output as its prompt.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gyre_core.clock import Clock, SystemClock
from gyre_core.engine.client import EngineClient
from gyre_core.engine.router import EngineSlot, Grant, Router, backoff_s
from gyre_core.errors import EngineError
from gyre_core.proxy.drains import DrainReport, Drains
from gyre_core.proxy.settings import EngineEntry
from gyre_core.types import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan

logger = logging.getLogger(__name__)

COUNTERS = ("engine_errors", "calls_resumed", "calls_moved", "tokens_recomputed")  # shown from the start, as zeros

Connect = Callable[[str, str | None], EngineClient]  # url and key -> client


class Sampler:
    """Runs calls on the router's engines; one for a proxy process."""

    def __init__(self, router: Router, connect: Connect, *, attempts: int, clock: Clock | None = None) -> None:
        """`connect` makes the client of an engine's url and key; `attempts` bounds tries in a row without a token."""
        self.router = router
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._drains = Drains(router, clock or SystemClock())
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
        call = _Call(session_id=session_id, call_id=call_id, prompt_ids=prompt_ids, params=params, seed=seed)
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

    async def _fly(self, call: "_Call", grant: Grant) -> bool:
        """Go on with a call on one engine. True when it is complete; raises EngineError, counted already."""
        failed: bool | None = None
        moved = given_up = False
        num_tokens = 0
        try:
            if self.router.state.moving(grant):  # drained between the grant and now
                moved = True
                return False
            resumed, call.sent = call.sent, True
            rid = f"{call.session_id}/{call.call_id}/{grant.ticket}.{call.next_try()}"
            generation = await self._drains.fly(grant, self._client(grant), call.ids(), call.rest(), rid=rid)
            moved = self.router.state.moving(grant)
            given_up = generation is None
            if generation is None:
                return False
            num_tokens = len(generation.output_ids)
            if resumed and num_tokens:
                self.counters["tokens_recomputed"] += max(0, generation.prompt_tokens - generation.cached_tokens)
            # An abort without a token that we did not ask for is an engine that stops working: let it rest.
            failed = not num_tokens and not moved
            call.add(generation)
            if failed:
                call.fruitless += 1
            if call.complete(generation):
                moved = False
                return True
            if generation.finish_reason is FinishReason.ABORT:
                self.counters["calls_resumed"] += 1
                logger.info("call %s was interrupted on %s after %d tokens", call.call_id, grant.url, call.num_done)
            return False
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
            self.router.release(grant, failed=failed)
            self._drains.left(grant, moved=moved, num_tokens=num_tokens, given_up=given_up)

    def _leave(self, call: "_Call") -> None:
        if call.ticket is not None:
            self.router.leave(call.ticket)

    async def set_engines(self, engines: Sequence[EngineEntry], version: int) -> None:
        """Replace the engines that take calls, and close the clients of engines that are gone and have no calls."""
        self._keys |= {engine.url: engine.api_key for engine in engines}
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A call over all engines that it meets."""

    session_id: str
    call_id: str
    prompt_ids: TokenIds
    params: SamplingParams
    seed: int | None
    parts: list[Generation] = field(default_factory=list)  # what engines sampled of it so far
    num_done: int = 0  # tokens of all parts
    fruitless: int = 0  # tries in a row without a token
    num_refused: int = 0  # answers that no retry mends
    num_tries: int = 0
    sent: bool = False  # some engine saw it
    ticket: int | None = None

    def next_try(self) -> int:
        self.num_tries += 1
        return self.num_tries

    def ids(self) -> TokenIds:
        """The prompt and what was sampled."""
        if not self.parts:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, *(part.output_ids for part in self.parts)])

    def rest(self) -> SamplingParams:
        """How to sample what is missing."""
        return replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - self.num_done,
            seed=call_seed(self.seed, self.call_id, len(self.parts)),
        )

    def add(self, part: Generation) -> None:
        if len(part.output_ids):
            self.parts.append(part)
            self.num_done += len(part.output_ids)
            self.fruitless = 0

    def complete(self, last: Generation) -> bool:
        """Whether nothing is missing after this part. A call without any token never is."""
        ended = last.finish_reason is not FinishReason.ABORT or self.num_done >= self.params.max_new_tokens
        return ended and bool(self.parts)


def joined(parts: Sequence[Generation], *, prompt_tokens: int) -> Generation:
    """Successive parts of one output as one generation; neighbouring spans of one version are joined."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.spans:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                spans[-1] = replace(spans[-1], end=end)
            else:
                spans.append(VersionSpan(version=span.version, start=start, end=end))
        offset += len(part.output_ids)
    last = parts[-1].finish_reason
    return Generation(
        output_ids=np.concatenate([part.output_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish_reason=FinishReason.LENGTH if last is FinishReason.ABORT else last,
        spans=tuple(spans),
        prompt_tokens=prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
    )


def call_seed(seed: int | None, call_id: str, part: int) -> int | None:
    """A sampling seed that depends on the session's seed, the call and the part only: [0, 2**31)."""
    if seed is None:
        return None
    text = f"{seed}/{call_id.rpartition('-')[2]}/{part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
