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
from dataclasses import replace

import numpy as np

from gyre_core.engine.client import EngineClient
from gyre_core.engine.router import EngineSlot, Grant, Router, backoff_s
from gyre_core.errors import EngineError
from gyre_core.proxy.settings import EngineEntry
from gyre_core.types import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan

logger = logging.getLogger(__name__)

Connect = Callable[[str, str | None], EngineClient]  # url and key -> client


class Sampler:
    """Runs calls on the router's engines; one for a proxy process."""

    def __init__(self, router: Router, connect: Connect, *, attempts: int) -> None:
        """`connect` makes the client of an engine's url and key; `attempts` bounds tries in a row without a token."""
        self.router = router
        self.counters: Counter[str] = Counter()
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
        parts: list[Generation] = []
        num_done = 0
        fruitless = 0
        num_refused = 0  # answers that no retry mends
        while True:
            if num_refused:
                # The fault may be the call's: engines that serve others well must not rest for it again and again.
                await asyncio.sleep(backoff_s(num_refused - 1))
            grant = await self.router.acquire(session_id)
            failed = False
            try:
                generation = await self._client(grant).generate(
                    np.concatenate([prompt_ids, *(part.output_ids for part in parts)]) if parts else prompt_ids,
                    replace(
                        params,
                        max_new_tokens=params.max_new_tokens - num_done,
                        seed=call_seed(seed, call_id, len(parts)),
                    ),
                    rid=f"{session_id}/{call_id}/{grant.ticket}",
                    cache_salt=str(grant.version),
                )
                # An abort without a token is an engine that stops working: let it rest like one that failed.
                failed = not len(generation.output_ids)
            except EngineError as error:
                failed = True
                self.counters["engine_errors"] += 1
                fruitless += 1
                logger.warning("call %s on %s, try %d: %s", call_id, grant.url, fruitless, error)
                if (not error.retryable or fruitless >= self._attempts) and not patient():
                    raise
                num_refused += not error.retryable
                continue
            finally:
                self.router.release(grant, failed=failed)
            if len(generation.output_ids):
                parts.append(generation)
                num_done += len(generation.output_ids)
                fruitless = 0
            else:
                fruitless += 1
                if fruitless >= self._attempts and not patient():
                    raise EngineError(f"call {call_id}: {fruitless} tries without a token", retryable=True)
            if generation.finish_reason is not FinishReason.ABORT or num_done >= params.max_new_tokens:
                if parts:
                    return joined(parts, prompt_tokens=len(prompt_ids))
                continue
            self.counters["calls_resumed"] += 1
            logger.info("call %s was interrupted on %s after %d tokens", call_id, grant.url, num_done)

    async def set_engines(self, engines: Sequence[EngineEntry], version: int) -> None:
        """Replace the engines that take calls, and close the clients of engines that are gone and have no calls."""
        self._keys |= {engine.url: engine.api_key for engine in engines}
        self.router.set_engines([EngineSlot(url=engine.url, slots=engine.slots) for engine in engines], version)
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
