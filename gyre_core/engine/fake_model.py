"""A deterministic engine without weights: what `FakeEngineServer` serves, and an `EngineClient` inside one process.

Enters: prompts. Leaves: scripted or hash-seeded outputs with log-probs and version spans. Nothing waits for time: a
call is stopped between two tokens by `hold` and goes on with `release`. All controls may be called from any thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson
import xxhash

from gyre_core.errors import EngineError
from gyre_core.types import FinishReason, Generation, Json, SamplingParams, TokenIds, VersionSpan

Output = Sequence[int]
Script = Iterable[Output] | Callable[[list[int]], Output]


@dataclass(slots=True)
class FakeCall:
    """A call as the fake engine saw it, and what became of it."""

    rid: str
    input_ids: list[int]
    sampling_params: Json  # in SGLang's names
    cache_salt: str
    output_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)  # [version, start, end]
    cached_tokens: int = 0
    aborted: bool = False
    finished: bool = False


class FakeEngine:
    """The engine. Satisfies `EngineClient`.

    Outputs are, in this order: what was left of a call that was aborted (when its prompt comes back with the partial
    output), the next scripted output, or a sequence that depends only on the seed, the weights' version and the ids
    before each token. A scripted output without a stop token ends as if a stop string had matched.

    Example: engine = FakeEngine([[5, 6, 2]]); await engine.generate([1], params, rid="a")
    """

    def __init__(
        self,
        outputs: Script = (),
        *,
        vocab_size: int = 1024,
        stop_token_ids: Iterable[int] = (),
        version: int = 0,
        seed: int = 0,
        mean_length: int = 16,
    ) -> None:
        """`outputs` is a script (one a call) or a function of the prompt; `stop_token_ids` end unscripted ones."""
        self.vocab_size = vocab_size
        self.version = version
        self.calls: list[FakeCall] = []
        self.paused = False
        self._function = outputs if callable(outputs) else None
        self._script: deque[list[int]] = deque() if callable(outputs) else deque(list(ids) for ids in outputs)
        self._stop_token_ids = sorted(stop_token_ids)
        self._seed = seed
        self._mean_length = mean_length
        self._remainders: dict[bytes, list[int]] = {}
        self._running: dict[str, FakeCall] = {}
        self._hold_after: int | None = None
        self._failures: deque[int] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._state = threading.Condition()

    # EngineClient

    async def generate(
        self, input_ids: Sequence[int] | TokenIds, params: SamplingParams, *, rid: str, cache_salt: str = ""
    ) -> Generation:
        """As the protocol says; planned failures are retryable EngineErrors."""
        if (status := self.next_failure()) is not None:
            raise EngineError(f"fake engine: planned failure {status}", retryable=status == 0 or status >= 429)
        ids: list[int] = np.asarray(input_ids).tolist()
        if not ids or not all(0 <= i < self.vocab_size for i in ids):
            raise ValueError("fake engine: ids are missing or outside the vocabulary")
        fields = {"max_new_tokens": params.max_new_tokens, "stop_token_ids": list(params.stop_token_ids)}
        fields |= {"temperature": params.temperature, "sampling_seed": params.seed, "stop": list(params.stop)}
        call, reason = await self.run(rid, ids, fields, cache_salt)
        return Generation(
            output_ids=np.array(call.output_ids, np.int32),
            logprobs=np.array([fake_logprob(token) for token in call.output_ids], np.float32),
            finish_reason=FinishReason(reason["type"]),
            spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in call.spans),
            prompt_tokens=len(ids),
            cached_tokens=call.cached_tokens,
        )

    async def abort(self, rid: str) -> None:
        """End one call with its partial output."""
        self.abort_calls(rid)

    async def aclose(self) -> None:
        """Nothing to close."""

    # What a test can do to it

    def add_outputs(self, outputs: Iterable[Output]) -> None:
        """Append to the script."""
        self._script.extend(list(ids) for ids in outputs)

    def forget_outputs(self) -> None:
        """Drop what is left of the script."""
        self._script.clear()

    def hold(self, after: int = 0) -> None:
        """Stop every call once it has `after` output tokens, until `release`."""
        self._hold_after = after
        self._wake()

    def release(self) -> None:
        """Let held calls go on."""
        self._hold_after = None
        self._wake()

    def pause(self, paused: bool = True) -> None:
        """Sample nothing until unpaused."""
        self.paused = paused
        self._wake()

    def fail_next(self, *statuses: int) -> None:
        """Answer the next calls with these HTTP statuses (0: close the connection without an answer, 200: serve)."""
        self._failures.extend(statuses)

    def set_version(self, version: int) -> None:
        """New weights: tokens sampled from now on carry this version."""
        self.version = version
        self._wake()

    def abort_calls(self, rid: str | None = None) -> None:
        """End one running call, or all, with the partial output."""
        for running, call in list(self._running.items()):
            if rid is None or running == rid:
                call.aborted = True
        self._wake()

    def wait_running(self, num_calls: int = 1, *, tokens: int = 0, timeout_s: float = 10.0) -> None:
        """Block until `num_calls` calls run, each with at least `tokens` output tokens; TimeoutError otherwise.

        For tests outside the engine's event loop; inside it use `running`.
        """
        with self._state:
            if not self._state.wait_for(lambda: self._num_running(tokens) >= num_calls, timeout_s):
                raise TimeoutError(f"fewer than {num_calls} calls run on the fake engine after {timeout_s} s")

    async def running(self, num_calls: int = 1, *, tokens: int = 0, timeout_s: float = 10.0) -> None:
        """`wait_running` for coroutines."""
        await asyncio.to_thread(self.wait_running, num_calls, tokens=tokens, timeout_s=timeout_s)

    # Sampling

    def next_failure(self) -> int | None:
        """The planned failure of the next call, None when it is served."""
        status = self._failures.popleft() if self._failures else 200
        return None if status == 200 else status

    async def run(self, rid: str, input_ids: list[int], params: Json, cache_salt: str) -> tuple[FakeCall, Json]:
        """Sample one call; returns it with SGLang's finish reason."""
        self._loop = asyncio.get_running_loop()
        call = FakeCall(rid=rid, input_ids=input_ids, sampling_params=params, cache_salt=cache_salt)
        call.cached_tokens = self._cached_tokens(call)
        self.calls.append(call)
        self._running[rid] = call
        try:
            return call, await self._sample(call)
        finally:
            self._running.pop(rid, None)
            call.finished = True
            self._notify()

    async def _sample(self, call: FakeCall) -> Json:
        limit = int(call.sampling_params.get("max_new_tokens", 128))
        stops = set(call.sampling_params.get("stop_token_ids") or ())
        planned = self._planned(call)
        while True:
            self._changed.clear()
            if call.aborted:
                if planned is not None:
                    self._remainders[_key(call.input_ids + call.output_ids)] = planned[len(call.output_ids) :]
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            if self.paused or (self._hold_after is not None and len(call.output_ids) >= self._hold_after):
                self._notify()
                await self._changed.wait()
                continue
            if len(call.output_ids) >= limit:
                return {"type": "length", "length": len(call.output_ids)}
            if planned is None:
                token = self._next_token(call)
            elif len(call.output_ids) < len(planned):
                token = planned[len(call.output_ids)]
            else:
                return {"type": "stop", "matched": ""}
            self._append(call, token)
            if token in stops:
                return {"type": "stop", "matched": token}

    def _planned(self, call: FakeCall) -> list[int] | None:
        remainder = self._remainders.pop(_key(call.input_ids), None) if self._remainders else None
        if remainder is not None:
            return remainder
        if self._function is not None:
            return list(self._function(call.input_ids))
        return self._script.popleft() if self._script else None

    def _append(self, call: FakeCall, token: int) -> None:
        position = len(call.output_ids)
        call.output_ids.append(token)
        if call.spans and call.spans[-1][0] == self.version:
            call.spans[-1][2] = position + 1
        else:
            call.spans.append([self.version, position, position + 1])

    def _next_token(self, call: FakeCall) -> int:
        state = xxhash.xxh3_64_digest(orjson.dumps(call.input_ids + call.output_ids))
        draw = xxhash.xxh3_64_intdigest(state, seed=self._seed * 1_000_003 + self.version)
        if self._stop_token_ids and draw % self._mean_length == 0:
            return self._stop_token_ids[0]
        token = (draw >> 16) % self.vocab_size
        return token if token not in self._stop_token_ids else (token + 1) % self.vocab_size

    def _cached_tokens(self, call: FakeCall) -> int:
        """The longest whole call of the same salt that the prompt extends; the last token is always computed."""
        best = 0
        for other in self.calls[-16:]:
            if other.cache_salt == call.cache_salt:
                known = other.input_ids + other.output_ids
                size = min(len(known), len(call.input_ids) - 1)
                if known[:size] == call.input_ids[:size]:
                    best = max(best, size)
        return best

    # Threads

    def _num_running(self, tokens: int) -> int:
        return sum(len(call.output_ids) >= tokens for call in list(self._running.values()))

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def _notify(self) -> None:
        with self._state:
            self._state.notify_all()


def fake_logprob(token: int) -> float:
    """The log-prob the fake engine reports for a token: exact in float32, so that tests may compare with ==."""
    return -1.0 - (token % 64) / 64.0


def _key(ids: list[int]) -> bytes:
    return xxhash.xxh3_128_digest(orjson.dumps(ids))
