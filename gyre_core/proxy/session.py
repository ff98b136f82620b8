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
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_core.clock import Clock
from gyre_core.errors import EngineError, ProxyError
from gyre_core.proxy.conversation import ChatRequest, KeyCache, Reply, ToolCall
from gyre_core.proxy.dialects.base import Dialect
from gyre_core.proxy.journal import Journal, call_record, read_call
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request
from gyre_core.proxy.render import PromptRenderer, check_vocabulary
from gyre_core.proxy.sampling import Sampler
from gyre_core.proxy.settings import SessionSettings
from gyre_core.trajectory.arrow import trajectory_to_ipc
from gyre_core.trajectory.recorder import FinishedCall, Plan, Recorder
from gyre_core.trajectory.roles import RoleTable, find_table
from gyre_core.types import FinishReason, Generation, Json, Role, SamplingParams, Substitution, TokenIds

logger = logging.getLogger(__name__)

TAIL_TOKENS = 256  # of the prompt's end, for the bridge: holds the last turn's opening whatever the message lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request's exact prompt and where it hangs."""

    ids: TokenIds  # the whole prompt
    added: TokenIds  # those after the anchor's path; all of them without an anchor
    anchor_call: str
    substitution: Substitution


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

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would be; records nothing. Raises Refusal."""
        self._check_open()
        plan, starts = self._plan(request)
        return len(self._prompt(request, plan, starts).ids)

    def refused(self, kind: RefusalKind) -> None:
        """Count a request that got an error."""
        self._recorder.counters[f"refused_{kind.value}"] += 1

    # For the admin

    async def seal(self) -> bytes:
        """End the session and abort its calls in flight. Returns the trajectory as Arrow IPC, the same bytes each time.

        Raises ProxyError when the journal cannot keep the seal; the session then takes no calls; seal it again.
        """
        self._closing = True
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
        counts: list[str] = []
        role = self._role(request, counts)
        plan, starts = self._plan(request)
        prompt = self._prompt(request, plan, starts)
        room = self._context_length - len(prompt.ids)
        if room < 1:
            raise Refusal(
                RefusalKind.CONTEXT_LENGTH,
                f"prompt is too long: {len(prompt.ids)} tokens > {self._context_length - 1} maximum. This model's "
                f"maximum context length is {self._context_length} tokens. Please reduce the length of the messages.",
            )
        sampling = settings.sampling
        budget = settings.limits.max_tokens - recorder.num_sampled
        max_new = min(request.max_tokens or sampling.max_new_tokens, sampling.max_new_tokens, room, budget)
        if request.temperature is not None and request.temperature != sampling.temperature:
            counts.append("temperature_overridden")
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
        reply = self._reply(request, dialect, prompt, generation, call_id, counts)
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

    async def _keep(self, call: FinishedCall, reply: Reply, digest: bytes, counts: list[str]) -> None:
        """Journal, then record; the reply may go out when this returns."""
        if self._journal is not None:
            header, arrays = call_record(call, reply, digest)
            header["counts"] = {name: counts.count(name) for name in counts}
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

    def _prompt(self, request: ChatRequest, plan: Plan, starts: list[int]) -> Prompt:
        """The exact prompt: recorded tokens and what follows them, or a full render."""
        recorder, tools = self._recorder, request.tools
        anchor = plan.anchor
        added: list[int] | None = None
        if anchor is not None and plan.bridgeable:
            first_new = starts.index(plan.num_known) if plan.num_known in starts else len(starts)
            new = request.messages(first_new)
            if new:
                added = self._renderer.extend(
                    recorder.tree.tail_ids(anchor.prompt_node, TAIL_TOKENS).tolist(),
                    anchor.output_ids.tolist(),
                    new,
                    tools,
                    lambda: [message for raw in request.raw_messages[:first_new] for message in request.normalise(raw)],
                )
            elif anchor.finish_reason is FinishReason.LENGTH:
                added = []  # the reply was cut and the harness asks to go on with it
        try:
            if added is not None and anchor is not None:
                check_vocabulary(added, self._renderer.vocab_size)
                return Prompt(
                    ids=recorder.prompt_ids(anchor, added),
                    added=np.array(added, np.int32),
                    anchor_call=anchor.call_id,
                    substitution=plan.substitution,
                )
            rendered = self._renderer.render(request.messages(), tools)
            check_vocabulary(rendered, self._renderer.vocab_size)
        except ValueError as error:
            raise bad_request(str(error)) from error
        substitution = plan.substitution
        ids = np.array(rendered, np.int32)
        drifted = anchor is not None and not recorder.continues(anchor, ids)
        if drifted and substitution is not Substitution.SYNTHETIC:
            substitution = Substitution.FORKED  # the template does not append here
        return Prompt(ids=ids, added=ids, anchor_call="", substitution=substitution)

    def _reply(
        self,
        request: ChatRequest,
        dialect: Dialect,
        prompt: Prompt,
        generation: Generation,
        call_id: str,
        counts: list[str],
    ) -> Reply:
        """What the harness is told: decided here, whole, before the first byte goes out."""
        parsed = self._renderer.parse(generation.output_ids.tolist(), request.tools, prompt.ids[-TAIL_TOKENS:].tolist())
        text, tool_calls, stop_sequence = parsed.text, parsed.tool_calls, ""
        if parsed.num_malformed:
            counts.extend(["malformed_tool_calls"] * parsed.num_malformed)
        if generation.finish_reason is FinishReason.STOP and (
            generation.output_ids[-1] not in self._renderer.stop_token_ids
        ):
            text, stop_sequence = _cut_at_stop(text, request.stop)
        if not text and not tool_calls:
            counts.append("empty_replies")
        unique = hashlib.blake2b(f"{self.session_id}/{call_id}".encode(), digest_size=12).hexdigest()
        show_reasoning = bool(parsed.reasoning) and request.wants_reasoning
        return Reply(
            call_id=call_id,
            text=text,
            reasoning=parsed.reasoning if show_reasoning else "",
            signature=f"gyre-{unique}" if show_reasoning else "",
            tool_calls=tuple(
                ToolCall(call_id=dialect.mint_tool_call_id(f"{unique}{position:02d}"), name=name, arguments=arguments)
                for position, (name, arguments) in enumerate(tool_calls)
            ),
            finish_reason=generation.finish_reason,
            stop_sequence=stop_sequence,
            prompt_tokens=generation.prompt_tokens,
            output_tokens=len(generation.output_ids),
            cached_tokens=min(generation.cached_tokens, generation.prompt_tokens),
            reasoning_tokens=parsed.reasoning_tokens,
            created_s=self._clock.now_s(),
        )

    def _role(self, request: ChatRequest, counts: list[str]) -> Role:
        if self._table is None:
            counts.append("roles_unknown_harness")
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
        if self._recorder.num_sampled >= limits.max_tokens:
            raise Refusal(RefusalKind.FORBIDDEN, f"this session used up its {limits.max_tokens} tokens")

    def _ended(self, digest: bytes, task: asyncio.Task[Reply]) -> None:
        del self._running[digest]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Refusal):
            logger.error("rollout %s: a call failed by a fault of ours", self.settings.rollout_id, exc_info=error)

    def _forget(self) -> None:
        """A sealed session needs its bytes only."""
        self._undelivered.clear()
        self._cache = KeyCache()


def _cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and that string."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, stops[0] if len(stops) == 1 else ""
    position, stop = min(found)
    return text[:position].rstrip(), stop
