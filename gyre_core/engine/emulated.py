"""An engine that takes the time a cost model says: calls share its speed, prompts cost what no cache holds.

Enters: calls, and the time. Leaves: when each call ends, and how many tokens it has. `DecodingState` is pure: every
method takes the time, on the cluster's clock, as an argument. `EmulatedEngine` is the asyncio shell that waits, with
time compressed. Invariants: at most `slots` calls run, the others wait in order; a call that is aborted keeps the whole
tokens it has; the sum of what a call was given before and after a move is what it asked for.
"""

import asyncio
import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import orjson

from gyre_core.clock import Clock, SystemClock
from gyre_core.config.emulation import EmulationConfig, EngineCosts
from gyre_core.engine.emulated_kv import PrefixCache, SharedPages
from gyre_core.types import Json

_EPSILON = 1e-9


@dataclass(slots=True)
class _Call:
    num_tokens: int  # to sample
    prefill_s: float
    context_tokens: int
    start_work: float = 0.0
    state: str = "waiting"  # prefill, decoding, done


class DecodingState:
    """The calls of one engine: slots, prompts one after the other, decoding at 1 / tau(b) tokens a second each.

    Example: state = DecodingState(costs, slots=2); state.start("a", 10, prefill_s=0.0, now_s=0.0); state.next_s()
    """

    def __init__(self, costs: EngineCosts, *, slots: int) -> None:
        self._costs = costs
        self._slots = slots
        self._calls: dict[str, _Call] = {}
        self._waiting: deque[str] = deque()
        self._prefills: list[tuple[float, str]] = []  # (end, rid)
        self._ends: list[tuple[float, str]] = []  # (work, rid)
        self._done: list[str] = []  # not told yet
        self._prefilled_s = 0.0  # when all prompts so far are computed or loaded: one after the other
        self._work = 0.0  # decoding steps done
        self._now_s = 0.0
        self._running = 0  # prefilling or decoding
        self._decoding = 0
        self._context = 0  # prompt tokens of the calls that decode
        self.busy_s = 0.0  # time with at least one call that runs

    def start(self, rid: str, num_tokens: int, *, prefill_s: float, now_s: float, context_tokens: int = 0) -> None:
        """A call of so many tokens behind a prompt of `context_tokens`; raises ValueError for a rid that runs."""
        if rid in self._calls:
            raise ValueError(f"call {rid} runs already")
        self._advance_to(now_s)
        self._calls[rid] = _Call(num_tokens=num_tokens, prefill_s=prefill_s, context_tokens=context_tokens)
        self._waiting.append(rid)
        self._admit()

    def tokens(self, rid: str, now_s: float) -> int:
        """Whole tokens that a call has."""
        self._advance_to(now_s)
        call = self._calls[rid]
        if call.state == "done":
            return call.num_tokens
        if call.state != "decoding":
            return 0
        return min(call.num_tokens, math.floor(self._work - call.start_work + _EPSILON))

    def end(self, rid: str, now_s: float) -> int:
        """Take a call out, finished or not; returns its whole tokens."""
        made = self.tokens(rid, now_s)
        call = self._calls.pop(rid)
        if call.state == "waiting":
            self._waiting.remove(rid)
        self._leave(call)
        return made

    def finished(self, now_s: float) -> list[str]:
        """Calls that got their last token since the last look; they are known until `end`."""
        self._advance_to(now_s)
        done = [rid for rid in self._done if rid in self._calls]
        self._done.clear()
        return done

    def next_s(self) -> float | None:
        """When something changes next, None when nothing runs."""
        if self._done:
            return self._now_s
        next_s = min(self._end_s(), self._prefill_end_s())
        return next_s if next_s < math.inf else None

    def _prefill_end_s(self) -> float:
        while self._prefills and not self._is(self._prefills[0][1], "prefill"):
            heapq.heappop(self._prefills)
        return self._prefills[0][0] if self._prefills else math.inf

    def _end_s(self) -> float:
        """When the first decoding call ends if none joins or leaves before."""
        while self._ends and not self._is(self._ends[0][1], "decoding"):
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return self._now_s + max(0.0, self._ends[0][0] - self._work) * self._token_s()

    def _token_s(self) -> float:
        return self._costs.token_s(self._decoding, self._context)

    def _is(self, rid: str, state: str) -> bool:
        call = self._calls.get(rid)
        return call is not None and call.state == state

    def _admit(self) -> None:
        while self._waiting and self._running < self._slots:
            rid = self._waiting.popleft()
            call = self._calls[rid]
            call.state = "prefill"
            self._running += 1
            self._prefilled_s = max(self._now_s, self._prefilled_s) + call.prefill_s
            heapq.heappush(self._prefills, (self._prefilled_s, rid))
        while self._prefill_end_s() <= self._now_s + _EPSILON:
            _, rid = heapq.heappop(self._prefills)
            call = self._calls[rid]
            call.state, call.start_work = "decoding", self._work
            self._decoding += 1
            self._context += call.context_tokens
            heapq.heappush(self._ends, (self._work + call.num_tokens, rid))

    def _leave(self, call: _Call) -> None:
        """A call runs no longer."""
        if call.state in ("prefill", "decoding"):
            self._running -= 1
            if call.state == "decoding":
                self._decoding -= 1
                self._context -= call.context_tokens
        call.state = "done"
        self._admit()

    def _advance_to(self, now_s: float) -> None:
        """Let time pass, from one change to the next: between two the number of decoding calls is constant."""
        while self._now_s < now_s:
            end_s = self._end_s()
            until_s = max(self._now_s, min(now_s, end_s, self._prefill_end_s()))
            if self._decoding:
                self._work += (until_s - self._now_s) / self._token_s()
            if self._running:
                self.busy_s += until_s - self._now_s
            if until_s >= end_s:  # whatever rounding says of the time that was left
                self._work = max(self._work, self._ends[0][0])
            self._now_s = until_s
            while self._ends and self._ends[0][0] <= self._work + _EPSILON:
                _, rid = heapq.heappop(self._ends)
                if self._is(rid, "decoding"):
                    self._leave(self._calls[rid])
                    self._done.append(rid)
            self._admit()


@dataclass(slots=True)
class _Running:
    input_ids: np.ndarray
    num_tokens: int
    salt: str
    stop_id: int | None
    done: asyncio.Future[str]
    spans: list[list[int]] = field(default_factory=list)  # [version, start, end]


class EmulatedEngine:
    """Calls in, replies in SGLang's form out, after the time they take. One event loop owns it.

    It samples exactly `max_new_tokens` tokens, the last of them the first stop token: how long a call is says its
    client. `letters` are the ids it samples from, in turns.
    """

    def __init__(
        self,
        config: EmulationConfig,
        *,
        slots: int,
        letters: list[int],
        version: int = 0,
        shared: SharedPages | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.version = version
        self.counters = {"calls": 0, "aborted": 0, "prefill_tokens": 0, "moved_tokens": 0, "sampled_tokens": 0}
        self._state = DecodingState(config.engine, slots=slots)
        self._cache = PrefixCache(shared if config.engine.kv == "move" else None)
        self._letters = letters
        self._clock = clock or SystemClock()
        self._started_s = self._clock.monotonic_s()
        self._paused_s = 0.0  # on the cluster's clock, without the pause that lasts
        self._paused_at_s: float | None = None
        self._calls: dict[str, _Running] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy_s(self) -> float:
        """The cluster's seconds with at least one call."""
        self._state.finished(self.now_s())  # to the present
        return self._state.busy_s

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""
        return len(self._calls)

    def now_s(self) -> float:
        """The engine's time: the cluster's, which stands still in a pause."""
        now = (self._clock.monotonic_s() - self._started_s) * self.config.compression
        return (now if self._paused_at_s is None else self._paused_at_s) - self._paused_s

    async def generate(self, rid: str, input_ids: list[int], params: Json, salt: str) -> Json:
        """One call; returns SGLang's reply."""
        ids = np.asarray(input_ids, np.int32)
        local, remote = self._cache.known(ids, salt)
        costs = self.config.engine
        fresh = len(ids) - local - remote
        prefill_s = fresh * costs.prefill_s + remote * costs.move_s
        self.counters["calls"] += 1
        self.counters["prefill_tokens"] += fresh
        self.counters["moved_tokens"] += remote
        stops = params.get("stop_token_ids") or [None]
        call = _Running(
            input_ids=ids,
            num_tokens=int(params.get("max_new_tokens", 1)),
            salt=salt,
            stop_id=stops[0],
            done=asyncio.get_running_loop().create_future(),
        )
        self._state.start(rid, call.num_tokens, prefill_s=prefill_s, now_s=self.now_s(), context_tokens=len(ids))
        self._calls[rid] = call
        self._schedule()
        try:
            how = await call.done
        finally:
            self._mark_version(rid, call)
            del self._calls[rid]
            made = self._state.end(rid, self.now_s())
            self._schedule()
        made = call.num_tokens if how == "stop" else min(made, call.num_tokens - 1)
        output = self._sample(call, made, whole=how == "stop")
        self._cache.add(np.concatenate([ids, np.asarray(output, np.int32)]), salt)
        self.counters["sampled_tokens"] += made
        self.counters["aborted"] += how == "abort"
        return self._reply(rid, call, output, how, cached=local + remote)

    def abort(self, rid: str | None = None) -> None:
        """End one call, or all, with what it has."""
        for name, call in self._calls.items():
            if (rid is None or name == rid) and not call.done.done():
                call.done.set_result("abort")

    def pause(self, paused: bool = True) -> None:
        """Time stands still for the calls."""
        if paused and self._paused_at_s is None:
            self._paused_at_s = (self._clock.monotonic_s() - self._started_s) * self.config.compression
        elif not paused and self._paused_at_s is not None:
            now = (self._clock.monotonic_s() - self._started_s) * self.config.compression
            self._paused_s += now - self._paused_at_s
            self._paused_at_s = None
        self._schedule()

    def set_version(self, version: int) -> None:
        """New weights: tokens from now on carry this version."""
        for rid, call in self._calls.items():
            self._mark_version(rid, call)
        self.version = version
        self._cache.forget_before(version - 1)

    def tick(self) -> None:
        """End the calls that are done; the timer calls it, a test may."""
        for rid in self._state.finished(self.now_s()):
            call = self._calls.get(rid)
            if call is not None and not call.done.done():
                call.done.set_result("stop")
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._state.next_s()
        if next_s is None or self._paused_at_s is not None:
            return
        delay_s = self.config.wall_s(max(0.0, next_s - self.now_s()))
        self._timer = asyncio.get_running_loop().call_later(delay_s + 1e-4, self.tick)

    def _mark_version(self, rid: str, call: _Running) -> None:
        made = min(self._state.tokens(rid, self.now_s()), call.num_tokens)
        start = call.spans[-1][2] if call.spans else 0
        if made > start:
            call.spans.append([self.version, start, made])

    def _sample(self, call: _Running, num_tokens: int, *, whole: bool) -> list[int]:
        first = len(call.input_ids)
        output = [self._letters[(first + at) % len(self._letters)] for at in range(num_tokens)]
        if whole and call.stop_id is not None:
            output[-1] = call.stop_id
        return output

    def _reply(self, rid: str, call: _Running, output: list[int], how: str, *, cached: int) -> Json:
        reason: Json = {"type": "stop", "matched": call.stop_id}
        if how == "abort":
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        spans = [[version, start, min(end, len(output))] for version, start, end in call.spans if start < len(output)]
        end = spans[-1][2] if spans else 0
        if end < len(output):
            spans.append([self.version, end, len(output)])
        meta: Json = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(call.input_ids),
            "weight_version": str(self.version),
            "completion_tokens": len(output),
            "cached_tokens": cached,
            "weight_versions": [{"version": str(version), "start": start, "end": end} for version, start, end in spans],
            "input_token_logprobs": [],
            "output_token_logprobs": [[_LOGPROB, token, None] for token in output],
        }
        return {"text": "", "output_ids": output, "meta_info": meta}


_LOGPROB = -0.5  # of every token: exact in float32


def reply_bytes(reply: Json) -> bytes:
    """A reply as the wire has it."""
    return orjson.dumps(reply)
