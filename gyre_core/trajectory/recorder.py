"""What a session remembers: which messages were seen, what was sampled for them, and where its tokens hang.

Enters: message keys of each request (normalised and hashed by the caller) and, when a call has ended, its exact tokens.
Leaves: a plan for each request (which recorded call it continues, how it relates to the record) and, at the end, a
`Trajectory`. Pure and synchronous: no clock, no network; the same operations in the same order give the same tree,
which is how a journal restores it.

Matching: a request is walked from its first message along a chain of hashes. An assistant message continues the call
that sampled it when the chain before it equals that call's prompt, joined by an id the proxy minted (tool call,
thinking signature), else by its canonical form. The last match wins, over all calls of the session, so that any branch
can go on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from gyre_core.trajectory.builder import LiveNode, TokenTree
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import (
    CallRecord,
    FinishReason,
    LogProbs,
    Role,
    Substitution,
    TokenIds,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class MessageKey:
    """One normalised message, hashed.

    Example: MessageKey(is_assistant=True, exact=b"...", form=b"...", joins=("toolu_1",))
    """

    is_assistant: bool
    exact: bytes  # of the message as it reads
    form: bytes  # of its canonical form: parsed JSON, key order free, whitespace trimmed, no ids, no reasoning
    joins: tuple[str, ...] = ()  # ids that only the proxy mints
    empty: bool = False  # an assistant message without text and tool calls


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A finished call inside the recorder."""

    call_id: str
    index: int
    prompt_state: bytes  # chain hash before the reply
    after_state: bytes  # and after it
    exact: bytes  # of the reply as delivered
    prompt_node: LiveNode
    output_node: LiveNode
    finish_reason: FinishReason
    output_ids: TokenIds
    fields: dict[str, object] = field(default_factory=dict)  # the rest of its CallRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a request relates to the record.

    Example: plan = recorder.plan(context, keys); new = messages[plan.num_known:]
    """

    anchor: RecordedCall | None  # the deepest recorded call that the request continues
    num_known: int  # messages up to and including the anchor's reply; 0 without an anchor
    prompt_state: bytes
    substitution: Substitution  # of the messages not met before
    bridgeable: bool  # no assistant message after the anchor
    seen: tuple[bytes, ...]  # assistant messages met, marked as seen when the call is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """A call to be recorded: everything the journal keeps of it."""

    call_id: str
    index: int
    role: Role
    dialect: str
    model_name: str
    substitution: Substitution
    finish_reason: FinishReason
    anchor_call: str  # call_id whose path the prompt continues, "" when `prompt_ids` is the whole prompt
    prompt_ids: TokenIds  # tokens after the anchor's path
    output_ids: TokenIds
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    prompt_state: bytes
    seen: tuple[bytes, ...]
    reply: MessageKey  # of the reply as delivered
    started_s: float
    finished_s: float
    hints: Mapping[str, str]


class Recorder:
    """The record of one rollout."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.tree = TokenTree()
        self.counters: Counter[str] = Counter()
        self.num_sampled = 0  # tokens
        self._calls: dict[str, RecordedCall] = {}
        self._by_join: dict[str, RecordedCall] = {}
        self._by_form: dict[bytes, RecordedCall] = {}  # chain(prompt state, form) -> the latest call
        self._forms: set[bytes] = set()  # forms of all replies, wherever they were sampled
        self._seen: set[bytes] = set()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def plan(self, context: bytes, keys: Sequence[MessageKey]) -> Plan:
        """Find what a request continues. `context` is the hash of all that precedes the messages (the tools)."""
        state = context
        anchor: RecordedCall | None = None
        num_known = 0
        last_assistant = -1
        forked = respliced = synthetic = False
        seen: list[bytes] = []
        for position, key in enumerate(keys):
            if not key.is_assistant:
                state = _chain(state, key.form)
                continue
            last_assistant = position
            mark = _chain(state, key.exact)
            is_new = mark not in self._seen
            if is_new:
                seen.append(mark)
            call, foreign = self._find(state, key)
            if call is None:
                if is_new:
                    forked |= foreign
                    synthetic |= not foreign
                state = _chain(state, key.form)
                continue
            if is_new:
                respliced |= call.exact != key.exact
            anchor, num_known, state = call, position + 1, call.after_state
        substitution = (
            Substitution.FORKED
            if forked
            else Substitution.SYNTHETIC
            if synthetic
            else Substitution.RESPLICED
            if respliced
            else Substitution.CLEAN
        )
        return Plan(
            anchor=anchor,
            num_known=num_known,
            prompt_state=state,
            substitution=substitution,
            bridgeable=anchor is not None and last_assistant < num_known,
            seen=tuple(seen),
        )

    def record(self, call: FinishedCall) -> CallRecord:
        """Hang a finished call in the tree; raises ValueError for a call that is already there or has no tokens."""
        if call.call_id in self._calls:
            raise ValueError(f"call {call.call_id} is recorded already")
        anchor = self._calls[call.anchor_call] if call.anchor_call else None
        base = anchor.output_node if anchor is not None else self.tree.root
        prompt_node = self.tree.attach(base, call.prompt_ids, call.role)
        if prompt_node.end != call.prompt_tokens:
            raise ValueError(f"call {call.call_id}: path of {prompt_node.end} tokens for {call.prompt_tokens} sent")
        output_node = self.tree.add_output(
            prompt_node, call.output_ids, call.logprobs, call.spans, call_id=call.call_id, role=call.role
        )
        substitution = call.substitution
        recorded = RecordedCall(
            call_id=call.call_id,
            index=call.index,
            prompt_state=call.prompt_state,
            after_state=_chain(call.prompt_state, call.call_id.encode() if call.reply.joins else call.reply.form),
            exact=call.reply.exact,
            prompt_node=prompt_node,
            output_node=output_node,
            finish_reason=call.finish_reason,
            output_ids=output_node.token_ids,
            fields={
                "role": call.role,
                "dialect": call.dialect,
                "model_name": call.model_name,
                "substitution": substitution,
                "prompt_tokens": call.prompt_tokens,
                "output_tokens": len(call.output_ids),
                "cached_tokens": call.cached_tokens,
                "started_s": call.started_s,
                "finished_s": call.finished_s,
                "hints": dict(call.hints),
            },
        )
        self._calls[call.call_id] = recorded
        self._by_form[_chain(call.prompt_state, call.reply.form)] = recorded
        self._by_join.update((join, recorded) for join in call.reply.joins)
        if not call.reply.empty:
            self._forms.add(call.reply.form)
        self._seen.update(call.seen)
        self.counters[f"substitution_{substitution.value}"] += 1
        self.num_sampled += len(call.output_ids)
        return self._call_record(recorded, node_id=-1)

    def call(self, call_id: str) -> RecordedCall:
        """A recorded call; raises KeyError for an unknown id."""
        return self._calls[call_id]

    def prompt_ids(self, anchor: RecordedCall, added: Sequence[int] | TokenIds) -> TokenIds:
        """The whole prompt of a call that continues `anchor`: its path and the tokens added to it."""
        return np.concatenate([self.tree.path_ids(anchor.output_node), np.asarray(added, np.int32)])

    def continues(self, anchor: RecordedCall, prompt_ids: TokenIds) -> bool:
        """Whether a prompt that was rendered anew repeats the anchor's whole path."""
        path = self.tree.path_ids(anchor.output_node)
        return len(prompt_ids) >= len(path) and bool(np.array_equal(prompt_ids[: len(path)], path))

    def snapshot(self) -> Trajectory:
        """Everything recorded so far; call order is order of arrival."""
        tree, ids = self.tree.freeze(self.rollout_id)
        calls = sorted(self._calls.values(), key=lambda call: call.index)
        return Trajectory(
            rollout_id=self.rollout_id,
            tree=tree,
            calls=tuple(self._call_record(call, node_id=ids[call.output_node.serial]) for call in calls),
            counters=dict(sorted(self.counters.items())),
        )

    def _find(self, state: bytes, key: MessageKey) -> tuple[RecordedCall | None, bool]:
        """The call that sampled this message here, and whether the proxy sampled it somewhere else."""
        foreign = False
        for join in key.joins:
            call = self._by_join.get(join)
            if call is not None:
                if call.prompt_state == state:
                    return call, False
                foreign = True
        if foreign:
            return None, True
        call = self._by_form.get(_chain(state, key.form))
        if call is not None:
            return call, False
        return None, key.form in self._forms

    def _call_record(self, call: RecordedCall, *, node_id: int) -> CallRecord:
        return CallRecord(
            call_id=call.call_id,
            rollout_id=self.rollout_id,
            index=call.index,
            node_id=node_id,
            finish_reason=call.finish_reason,
            **call.fields,  # pyright: ignore[reportArgumentType]
        )


def _chain(state: bytes, value: bytes) -> bytes:
    """The next hash of a message chain: 128 bits, so that no session meets a collision by chance."""
    return xxhash.xxh3_128_digest(state + value)
