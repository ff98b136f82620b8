"""One rollout's session: takes requests of its harness, keeps the record, answers.

Enters: parsed requests. Leaves: replies, journal records and, at the seal, the trajectory.

Invariants:
- the prompt that an engine gets is the token path under which the call is recorded, and what was sampled hangs there;
- a call is in the journal, then in the record, then answered; a call that fails leaves no trace but counters;
- the same body joins its running call, gets the recorded reply while no delivery was complete, and is sampled anew
  after that;
- a harness that goes away does not end its call.

One event loop owns all sessions; between two awaits a session's state is consistent.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from gyre_core.clock import Clock
from gyre_core.errors import EngineError, ProxyError
from gyre_core.proxy.conversation import ChatRequest, KeyCache, Reply
from gyre_core.proxy.dialects.base import Dialect
from gyre_core.proxy.journal import Journal, call_record, read_call
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request
from gyre_core.proxy.render import PromptRenderer
from gyre_core.proxy.sampling import Sampler
from gyre_core.proxy.settings import SessionSettings
from gyre_core.proxy.turn import build_prompt, build_reply
from gyre_core.trajectory.arrow import trajectory_to_ipc
from gyre_core.trajectory.recorder import FinishedCall, Plan, Recorder
from gyre_core.trajectory.roles import RoleTable, find_table
from gyre_core.types import Json, Role, SamplingParams

logger = logging.getLogger(__name__)


class Session:
    """The session of one rollout."""

    def __init__(
        self,
        session_id: str,
        settings: SessionSettings,
        *,
        renderer: PromptRenderer,
        sampler: Sampler,
        tables: Sequence[RoleTable],
        context_length: int,
        clock: Clock,
        journal: Journal | None,
    ) -> None:
        self.session_id = session_id
        self.settings = settings
        self.sealed: bytes | None = None
        self._renderer = renderer
        self._sampler = sampler
        self._table = find_table(tables, settings.harness.name, settings.harness.version)
        self._context_length = context_length
        self._clock = clock
        self._journal = journal
        self._recorder = Recorder(settings.rollout_id)
        self._cache = KeyCache()
        self._next_index = 0
        self._running: dict[bytes, asyncio.Task[Reply]] = {}
        self._undelivered: dict[bytes, Reply] = {}
        self._closing = False
        self._sealing = asyncio.Lock()
        if self._table is None:
            logger.warning(
                "rollout %s: no role table for harness %r %r: all its calls count as main",
                settings.rollout_id,
                settings.harness.name,
                settings.harness.version,
            )

    # For the harness

    async def answer(self, request: ChatRequest, dialect: Dialect, digest: bytes) -> Reply:
        """The reply to a request; `digest` is of its body. Raises Refusal."""
        counters = self._recorder.counters
        running = self._running.get(digest)
        if running is not None:
            counters["retries_joined"] += 1
        elif (reply := self._undelivered.get(digest)) is not None:
            counters["retries_replayed"] += 1
            return reply
        else:
            self._admit()
            index = self._next_index
            self._next_index += 1
            running = asyncio.create_task(
                self._call(request, dialect, digest, index), name=f"{self.session_id} {index}"
            )
            self._running[digest] = running
            running.add_done_callback(lambda task: self._ended(digest, task))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.cancelled():
                raise  # our own request was cancelled; the call goes on
            raise Refusal(RefusalKind.FORBIDDEN, "this session is sealed") from None

    def delivered(self, digest: bytes, reply: Reply) -> None:
        """A reply reached its harness whole: the same body is a new call from now on."""
        if self._undelivered.get(digest) is reply:
            del self._undelivered[digest]
            if self._journal is not None and self.sealed is None:
                try:
                    self._journal.append({"kind": "delivered", "call_id": reply.call_id, "digest": digest.hex()})
                except ProxyError as error:
                    logger.warning("rollout %s: %s", self.settings.rollout_id, error)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would be; records nothing. Raises Refusal."""
        self._check_open()
        plan, starts = self._plan(request)
        prompt = await build_prompt(request, plan, starts, recorder=self._recorder, renderer=self._renderer)
        return len(prompt.ids)

    def refused(self, kind: RefusalKind) -> None:
        """Count a request that got an error."""
        self._recorder.counters[f"refused_{kind.value}"] += 1

    # For the admin

    async def seal(self) -> bytes:
        """End the session and abort its calls in flight. Returns the trajectory as Arrow IPC, the same bytes each time.

        Raises ProxyError when the journal cannot keep the seal; the session then takes no calls; seal it again.
        """
        self._closing = True
        async with self._sealing:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            if running:
                self._recorder.counters["calls_aborted_at_seal"] += len(running)
                await asyncio.gather(*running, return_exceptions=True)
            if self.sealed is None:
                if self._journal is not None:
                    self._journal.append({"kind": "sealed", "counters": dict(self._recorder.counters)})
                    await asyncio.get_running_loop().run_in_executor(None, self._journal.sync)
                self.sealed = trajectory_to_ipc(self._recorder.snapshot())
                self._sampler.router.forget(self.session_id)
                self._forget()
            return self.sealed

    async def drop(self) -> None:
        """Forget the session, its journal included."""
        self._closing = True
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._sampler.router.forget(self.session_id)
        if self._journal is not None:
            self._journal.remove()

    def close(self) -> None:
        """Close the journal; the session can be restored from it."""
        if self._journal is not None:
            self._journal.close()

    def status(self) -> Json:
        """Counters for the admin."""
        return {
            "rollout_id": self.settings.rollout_id,
            "sealed": self.sealed is not None,
            "calls": self._recorder.num_calls,
            "in_flight": len(self._running),
            "sampled_tokens": self._recorder.num_sampled,
            "counters": dict(self._recorder.counters),
        }

    def restore(self, records: Sequence[tuple[Json, bytes]]) -> None:
        """Redo what the journal holds, on a new session."""
        for header, arrays in records:
            kind = header["kind"]
            if kind == "call":
                call, reply, digest = read_call(header, arrays)
                self._recorder.record(call)
                self._recorder.counters.update(header.get("counts", {}))
                self._undelivered[digest] = reply
                self._next_index = max(self._next_index, call.index + 1)
            elif kind == "delivered":
                self._undelivered.pop(bytes.fromhex(header["digest"]), None)
            elif kind == "sealed":
                self._closing = True
                self._recorder.counters.clear()
                self._recorder.counters.update(header["counters"])
                self.sealed = trajectory_to_ipc(self._recorder.snapshot())
                self._forget()

    # One call

    async def _call(self, request: ChatRequest, dialect: Dialect, digest: bytes, index: int) -> Reply:
        started_s = self._clock.now_s()
        settings, recorder = self.settings, self._recorder
        counts: Counter[str] = Counter()
        role = self._role(request, counts)
        plan, starts = self._plan(request)
        prompt = await build_prompt(request, plan, starts, recorder=recorder, renderer=self._renderer)
        room = self._context_length - len(prompt.ids)
        if room < 1:
            raise Refusal(
                RefusalKind.CONTEXT_LENGTH,
                f"prompt is too long: {len(prompt.ids)} tokens > {self._context_length - 1} maximum. This model's "
                f"maximum context length is {self._context_length} tokens. Please reduce the length of the messages.",
            )
        sampling = settings.sampling
        budget = self._token_budget()
        max_new = min(request.max_tokens or sampling.max_new_tokens, sampling.max_new_tokens, room, budget)
        if request.temperature is not None and request.temperature != sampling.temperature:
            counts["temperature_overridden"] += 1
        params = SamplingParams(
            max_new_tokens=max_new,
            temperature=sampling.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            stop=request.stop,
        )
        call_id = f"{settings.rollout_id}-c{index}"
        try:
            generation = await self._sampler.sample(
                prompt.ids, params, session_id=self.session_id, call_id=call_id, seed=sampling.seed
            )
        except EngineError as error:
            raise Refusal(RefusalKind.UNAVAILABLE, f"the model is overloaded, try again: {error}") from error
        except ValueError as error:
            raise bad_request(str(error)) from error
        reply = build_reply(
            request,
            prompt,
            generation,
            dialect=dialect,
            renderer=self._renderer,
            call_id=call_id,
            session_id=self.session_id,
            now_s=self._clock.now_s(),
            counts=counts,
        )
        hints = self._table.hints if self._table is not None else ()
        call = FinishedCall(
            call_id=call_id,
            index=index,
            role=role,
            dialect=dialect.name,
            model_name=request.model,
            substitution=prompt.substitution,
            finish_reason=generation.finish_reason,
            anchor_call=prompt.anchor_call,
            prompt_ids=prompt.added,
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            prompt_tokens=len(prompt.ids),
            cached_tokens=generation.cached_tokens,
            prompt_state=plan.prompt_state,
            seen=plan.seen,
            reply=reply.message().key(),
            started_s=started_s,
            finished_s=self._clock.now_s(),
            hints={name: request.facts.headers[name] for name in hints if name in request.facts.headers},
        )
        await self._keep(call, reply, digest, counts)
        return reply

    async def _keep(self, call: FinishedCall, reply: Reply, digest: bytes, counts: Counter[str]) -> None:
        """Journal, then record; the reply may go out when this returns."""
        if self._journal is not None:
            header, arrays = call_record(call, reply, digest)
            header["counts"] = dict(counts)
            try:
                self._journal.append(header, arrays)
            except ProxyError as error:
                raise Refusal(RefusalKind.UNAVAILABLE, f"the call cannot be recorded, try again: {error}") from error
        self._recorder.record(call)
        self._recorder.counters.update(counts)
        self._undelivered[digest] = reply
        if self._journal is not None:
            try:
                await self._journal.settle_call()
            except ProxyError as error:
                # It is recorded; the retry gets this very reply.
                raise Refusal(RefusalKind.UNAVAILABLE, f"the call cannot be recorded, try again: {error}") from error

    def _plan(self, request: ChatRequest) -> tuple[Plan, list[int]]:
        keys, starts = self._cache.keys(request)
        return self._recorder.plan(request.context_key(), keys), starts

    def _role(self, request: ChatRequest, counts: Counter[str]) -> Role:
        if self._table is None:
            counts["roles_unknown_harness"] += 1
            return Role.MAIN
        return self._table.role(request.facts)

    def _check_open(self) -> None:
        if self._closing:
            raise Refusal(RefusalKind.FORBIDDEN, "this session is sealed")

    def _admit(self) -> None:
        self._check_open()
        limits = self.settings.limits
        if self._recorder.num_calls + len(self._running) >= limits.max_calls:
            raise Refusal(RefusalKind.FORBIDDEN, f"this session used up its {limits.max_calls} calls")
        self._token_budget()

    def _token_budget(self) -> int:
        """Tokens that may still be sampled; raises Refusal when none may."""
        budget = self.settings.limits.max_tokens - self._recorder.num_sampled
        if budget < 1:
            raise Refusal(RefusalKind.FORBIDDEN, f"this session used up its {self.settings.limits.max_tokens} tokens")
        return budget

    def _ended(self, digest: bytes, task: asyncio.Task[Reply]) -> None:
        del self._running[digest]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
            logger.error("rollout %s: a call failed by a fault of ours", self.settings.rollout_id, exc_info=error)

    def _forget(self) -> None:
        """A sealed session needs its bytes only."""
        self._undelivered.clear()
        self._cache = KeyCache()
