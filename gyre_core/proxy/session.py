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
from functools import partial

from opentelemetry.trace import SpanKind

from gyre_core.clock import Clock
from gyre_core.errors import EngineError, ProxyError
from gyre_core.proxy.call import RunningCall
from gyre_core.proxy.conversation import ChatRequest, KeyCache, Reply
from gyre_core.proxy.dialects.base import Dialect
from gyre_core.proxy.journal import Journal, call_record, read_call
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request, prompt_too_long
from gyre_core.proxy.render import PromptRenderer
from gyre_core.proxy.sampling import Sampler
from gyre_core.proxy.settings import SessionSettings
from gyre_core.proxy.turn import build_prompt, build_reply
from gyre_core.tracing.spans import NO_TRACING, Tracing, note
from gyre_core.trajectory.arrow import trajectory_to_ipc
from gyre_core.trajectory.recorder import FinishedCall, Plan, Recorder
from gyre_core.trajectory.roles import RoleTable, find_table
from gyre_core.types import Json, Role, SamplingParams

logger = logging.getLogger(__name__)

JOURNAL_RETRY_S = 1.0  # a full disk is freed by people, not by waiting shorter


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
        created_s: float,
        journal: Journal | None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`created_s` is when the session was first created, in seconds since the epoch."""
        self.session_id = session_id
        self.settings = settings
        self.sealed: bytes | None = None
        self._renderer = renderer
        self._sampler = sampler
        self._table = find_table(tables, settings.harness.name, settings.harness.version)
        self._context_length = context_length
        self._clock = clock
        self._tracing = tracing
        self._journal = journal
        self._recorder = Recorder(settings.rollout_id, keep_changed=settings.on_change == "keep")
        self._cache = KeyCache()
        self._next_index = 0
        self.connections: set[asyncio.Task] = set()  # that send a reply; cancelling one cuts it
        self._created_s = created_s
        self._running: dict[bytes, RunningCall] = {}
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

    def call(self, request: ChatRequest, dialect: Dialect, digest: bytes) -> RunningCall:
        """The call that answers a request: running, done but undelivered, or new. `digest` is of its body.

        Raises Refusal.
        """
        counters = self._recorder.counters
        call = self._running.get(digest)
        if call is not None:
            counters["retries_joined"] += 1
            return call
        if (reply := self._undelivered.get(digest)) is not None:
            counters["retries_replayed"] += 1
            call = RunningCall(call_id=reply.call_id, created_s=reply.created_s)
            call.settle(reply)
            return call
        self._admit()
        index = self._next_index
        self._next_index += 1
        call = RunningCall(call_id=f"{self.settings.rollout_id}-c{index}", created_s=self._clock.now_s())
        call.task = asyncio.create_task(
            self._run(call, request, dialect, digest, index), name=f"{self.session_id} {index}"
        )
        self._running[digest] = call
        call.task.add_done_callback(partial(self._ended, digest, call))
        return call

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

    def count(self, name: str) -> None:
        """Count something that happened to a request of this session."""
        self._recorder.counters[name] += 1

    # For the admin

    async def seal(self) -> bytes:
        """End the session and abort its calls in flight. Returns the trajectory as Arrow IPC, the same bytes each time.

        Raises ProxyError when the journal cannot keep the seal; the session then takes no calls; seal it again.
        """
        self._closing = True
        async with self._sealing:
            if num_aborted := await self.end_calls():
                self._recorder.counters["calls_aborted_at_seal"] += num_aborted
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
        await self.end_calls()
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
            "open_responses": len(self.connections),
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

    async def _run(self, call: RunningCall, request: ChatRequest, dialect: Dialect, digest: bytes, index: int) -> None:
        """Make a call, within the session's time, and settle its reply."""
        timeout = asyncio.timeout(self.time_left_s())
        parent = self._tracing.rollout(self.settings.rollout_id)
        about = {"gyre.call": call.call_id, "gyre.dialect": dialect.name, "gen_ai.operation.name": "chat"}
        try:
            async with timeout:
                with self._tracing.span("chat", about, parent=parent, kind=SpanKind.SERVER) as span:
                    reply = await self._make(call, request, dialect, digest, index)
                    note(
                        span,
                        {
                            "gen_ai.request.model": request.model,
                            "gen_ai.usage.input_tokens": reply.prompt_tokens,
                            "gen_ai.usage.output_tokens": reply.output_tokens,
                            "gyre.cached_tokens": reply.cached_tokens,
                            "gyre.finish_reason": reply.finish_reason.value,
                        },
                    )
            call.settle(reply)
        except Refusal as refusal:
            call.settle(refusal)
        except TimeoutError:
            if not timeout.expired():
                raise
            call.settle(self._out_of_time())

    async def _make(
        self, running: RunningCall, request: ChatRequest, dialect: Dialect, digest: bytes, index: int
    ) -> Reply:
        settings, recorder = self.settings, self._recorder
        counts: Counter[str] = Counter()
        role = self._role(request, counts)
        plan, starts = self._plan(request)
        counts.update({f"splice_{change.value}": number for change, number in plan.changes.items()})
        prompt = await build_prompt(request, plan, starts, recorder=recorder, renderer=self._renderer)
        if prompt.substitution is not plan.substitution:
            counts["splice_template"] += 1  # what came back could follow, but the template rewrites its past
        room = self._context_length - len(prompt.ids)
        if room < 1:
            raise prompt_too_long(len(prompt.ids), self._context_length)
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
        running.prompt_tokens = len(prompt.ids)
        try:
            generation = await self._sampler.sample(
                prompt.ids,
                params,
                session_id=self.session_id,
                call_id=running.call_id,
                seed=sampling.seed,
                patient=running.is_open,
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
            call_id=running.call_id,
            session_id=self.session_id,
            now_s=self._clock.now_s(),
            counts=counts,
        )
        hints = self._table.hints if self._table is not None else ()
        call = FinishedCall(
            call_id=running.call_id,
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
            resumes=plan.resumes,
            reply=reply.message().key(),
            started_s=running.created_s,
            finished_s=self._clock.now_s(),
            hints={name: request.facts.headers[name] for name in hints if name in request.facts.headers},
        )
        await self._keep(call, reply, digest, counts, running)
        return reply

    async def _keep(
        self, call: FinishedCall, reply: Reply, digest: bytes, counts: Counter[str], running: RunningCall
    ) -> None:
        """Journal, then record; the reply may go out when this returns.

        A journal that fails refuses the call while it may be refused, and is tried again once its response has begun.
        """
        if self._journal is not None:
            header, arrays = call_record(call, reply, digest)
            header["counts"] = dict(counts)
            while True:
                try:
                    self._journal.append(header, arrays)
                    break
                except ProxyError as error:
                    await self._await_journal(error, running)
        self._recorder.record(call)
        self._recorder.counters.update(counts)
        self._undelivered[digest] = reply  # from here on a retry gets this very reply
        while self._journal is not None:
            try:
                await self._journal.settle_call()
                break
            except ProxyError as error:
                await self._await_journal(error, running)

    async def _await_journal(self, error: ProxyError, running: RunningCall) -> None:
        if not running.opened:
            raise Refusal(RefusalKind.UNAVAILABLE, f"the call cannot be recorded, try again: {error}") from error
        logger.warning("call %s waits for the journal: %s", running.call_id, error)
        self.count("journal_retries")
        await asyncio.sleep(JOURNAL_RETRY_S)

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
        self.check_time()
        if len(self._running) >= limits.max_in_flight:
            self.count("limited_in_flight")
            raise Refusal(
                RefusalKind.UNAVAILABLE, f"this session has {len(self._running)} calls in flight, try again later"
            )
        self._token_budget()

    def check_time(self) -> None:
        """Raise Refusal when the session's time is over."""
        if self.time_left_s() <= 0:
            raise self._out_of_time()

    def time_left_s(self) -> float:
        """Seconds in which the session may still sample; negative ones when its time is over."""
        return self._created_s + self.settings.limits.max_time_s - self._clock.now_s()

    def _out_of_time(self) -> Refusal:
        return Refusal(RefusalKind.FORBIDDEN, f"this session used up its {self.settings.limits.max_time_s:g} s")

    async def end_calls(self) -> int:
        """Cancel the calls in flight and cut the connections that are open; returns how many calls there were."""
        tasks = [call.task for call in self._running.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self.connections:
            self.connections.pop().cancel()  # those that wait for a reader
        return len(tasks)

    def _token_budget(self) -> int:
        """Tokens that may still be sampled; raises Refusal when none may."""
        budget = self.settings.limits.max_tokens - self._recorder.num_sampled
        if budget < 1:
            raise Refusal(RefusalKind.FORBIDDEN, f"this session used up its {self.settings.limits.max_tokens} tokens")
        return budget

    def _ended(self, digest: bytes, call: RunningCall, task: asyncio.Task[None]) -> None:
        if self._running.get(digest) is call:
            del self._running[digest]
        if task.cancelled():
            call.reply.cancel()
        elif (error := task.exception()) is not None:
            logger.error("rollout %s: a call failed by a fault of ours", self.settings.rollout_id, exc_info=error)
            call.settle(Refusal(RefusalKind.INTERNAL, "internal error of the proxy"))

    def _forget(self) -> None:
        """A sealed session needs its bytes only."""
        self._undelivered.clear()
        self._cache = KeyCache()
