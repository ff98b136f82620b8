"""What a session remembers: which messages were seen, what was sampled for them, and where its tokens hang.

Enters: message keys of each request (normalised and hashed by the caller) and, when a call has ended, its exact tokens.
Leaves: a plan for each request (which recorded call it continues, how it relates to the record) and, at the end, a
`Trajectory`. Pure and synchronous: no clock, no network; the same operations in the same order give the same tree,
which is how a journal restores it.

Matching: a request is walked from its first message along a chain of hashes. An assistant message continues the call
that sampled it when the chain before it equals that call's prompt, joined by an id the proxy minted (tool call,
thinking signature), else by its canonical form, else by its loose form, else because it extends or cuts the text that
was sampled there. The last match wins, over all calls of the session, so that any branch can go on. What a harness did
to a message that the proxy sampled is named (`Change`); whether a changed meaning keeps the sampled tokens or forks is
the session's policy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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


class Change(StrEnum):
    """What a harness did to a message that was sampled, where it is more than another spelling. Counted by session."""

    CHANGED_KEPT = "changed_kept"  # other text or arguments; the sampled tokens stay
    CHANGED_FORKED = "changed_forked"  # the same under the other policy: the harness's words, never a target
    CUT = "cut"  # only the beginning of a reply came back; so many of its tokens stay
    JOINED = "joined"  # came back one turn earlier, what stood between left out (outputs joined, a prefill completed)
    EMPTY_KEPT = "empty_kept"  # a reply without text was left out and commented on; its tokens stay
    MOVED = "moved"  # a sampled message in another context (after a summary): context there, never a target twice


@dataclass(frozen=True, slots=True)
class MessageKey:
    """One normalised message, hashed.

    Example: MessageKey(is_assistant=True, exact=b"...", form=b"...", joins=("toolu_1",))
    """

    is_assistant: bool
    exact: bytes  # of the message as it reads
    form: bytes  # of its canonical form: parsed JSON, key order free, whitespace trimmed, no ids, no reasoning
    joins: tuple[str, ...] = ()  # ids that only the proxy mints
    mentions: tuple[str, ...] = ()  # such ids in a text without calls: some harnesses write calls as text
    empty: bool = False  # an assistant message without text and tool calls
    loose: bytes = b""  # of a form that forgives more: coerced values, defaults, a leading `cd`; b"" is `form`
    text: str = ""  # of an assistant message, trimmed
    has_calls: bool = False  # an assistant message with tool calls
    is_tool: bool = False  # a tool's result


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A finished call inside the recorder."""

    call_id: str
    index: int
    prompt_state: bytes  # chain hash before the reply
    after_state: bytes  # and after it
    resumes: tuple[bytes, ...]  # of its plan
    reply: MessageKey  # as delivered
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
    resumes: tuple[bytes, ...] = ()  # states before unfinished assistant messages that the reply goes on with
    moved: Mapping[int, RecordedCall] = field(default_factory=dict)  # messages after the anchor, sampled elsewhere
    cut: Mapping[int, RecordedCall] = field(default_factory=dict)  # beginnings of replies that were sampled here
    dropped: frozenset[int] = frozenset()  # assistant messages after the anchor that say nothing
    changes: Mapping[Change, int] = field(default_factory=dict)  # of messages not met before


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
    resumes: tuple[bytes, ...] = ()  # of its plan


class Recorder:
    """The record of one rollout."""

    def __init__(self, rollout_id: str, *, keep_changed: bool = True) -> None:
        """`keep_changed`: whether sampled tokens stay where a harness changed the meaning of their message."""
        self.rollout_id = rollout_id
        self.keep_changed = keep_changed
        self.tree = TokenTree()
        self.counters: Counter[str] = Counter()
        self.num_sampled = 0  # tokens
        self._calls: dict[str, RecordedCall] = {}
        self._by_join: dict[str, RecordedCall] = {}
        self._by_form: dict[bytes, RecordedCall] = {}  # chain(prompt state, form or loose form) -> the latest call
        self._by_state: dict[bytes, list[RecordedCall]] = {}  # calls with a text, by prompt state
        self._resumed: dict[bytes, list[RecordedCall]] = {}  # calls that go on with an unfinished message, by state
        self._empty: dict[bytes, RecordedCall] = {}  # the first call with an empty reply, by prompt state
        self._forms: dict[bytes, RecordedCall] = {}  # the latest call of each form, wherever it was sampled
        self._seen: set[bytes] = set()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def plan(self, context: bytes, keys: Sequence[MessageKey]) -> Plan:
        """Find what a request continues. `context` is the hash of all that precedes the messages (the tools)."""
        walk = _Walk(state=context)
        for position, key in enumerate(keys):
            if not key.is_assistant:
                if self.keep_changed and walk.state in self._empty:
                    walk.changes[Change.EMPTY_KEPT] += _chain(walk.state, key.form) not in self._seen
                    walk.seen.append(_chain(walk.state, key.form))
                    walk.anchor_at(self._empty[walk.state], position)
                walk.step(key)
            else:
                self._walk_assistant(walk, position, key)
        if walk.anchor is not None and walk.num_known == len(keys):  # the request asks to go on with the reply itself
            walk.resumes = [walk.anchor.prompt_state, *walk.anchor.resumes]
        return Plan(
            anchor=walk.anchor,
            num_known=walk.num_known,
            prompt_state=walk.state,
            substitution=walk.substitution(),
            bridgeable=walk.anchor is not None and walk.last_assistant < walk.num_known,
            seen=tuple(walk.seen),
            resumes=tuple(walk.resumes),
            moved=walk.moved,
            cut=walk.cut,
            dropped=frozenset(walk.dropped),
            changes=+walk.changes,
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
            resumes=call.resumes,
            reply=call.reply,
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
        for form in {call.reply.form, call.reply.loose or call.reply.form}:
            self._by_form[_chain(call.prompt_state, form)] = recorded
        self._by_join.update((join, recorded) for join in call.reply.joins)
        for state in call.resumes:
            self._resumed.setdefault(state, []).append(recorded)
        if call.reply.empty:
            self._empty.setdefault(call.prompt_state, recorded)
        else:
            self._forms[call.reply.form] = recorded
            self._by_state.setdefault(call.prompt_state, []).append(recorded)
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

    def _walk_assistant(self, walk: "_Walk", position: int, key: MessageKey) -> None:
        mark = _chain(walk.state, key.exact)
        is_new = mark not in self._seen
        call, change = self._find(walk.state, key)
        if call is None and key.empty:
            walk.dropped.append(position)  # nobody sampled it and it says nothing: not part of the conversation
            return
        walk.last_assistant = position
        if is_new:
            walk.seen.append(mark)
            if change is not None:
                walk.changes[change] += 1
        if call is not None and change in (None, Change.CHANGED_KEPT, Change.JOINED):
            walk.respliced |= is_new and call.reply.exact != key.exact
            walk.anchor_at(call, position + 1)
            return
        if is_new:
            walk.synthetic |= call is None
            walk.forked |= call is not None
        if (
            call is not None
            and change is Change.MOVED
            and (call.reply.loose or call.reply.form) == (key.loose or key.form)
        ):
            walk.moved[position] = call
        elif call is not None and change is Change.CUT:
            walk.cut[position] = call
        walk.step(key)

    def _find(self, state: bytes, key: MessageKey) -> tuple[RecordedCall | None, Change | None]:
        """The call that sampled this message and what was done to it; None and None when nobody sampled it."""
        placed: tuple[RecordedCall, Change] | None = None
        moved: RecordedCall | None = None
        for join in key.joins:
            call = self._by_join.get(join)
            if call is None:
                continue
            if call.prompt_state == state:
                change = self._change(call.reply, key)
                if change is None:
                    return call, None
                placed = placed or (call, change)
            elif self._is_joined(call, state, key):
                return call, Change.JOINED
            else:
                moved = call
        if placed is not None:
            return placed
        if moved is not None:
            return moved, Change.MOVED
        for form in (key.form, key.loose or key.form):
            call = self._by_form.get(_chain(state, form))
            if call is not None:
                return call, None
        if key.empty:
            return None, None
        for mention in key.mentions:
            call = self._by_join.get(mention)
            if call is not None and call.prompt_state == state:
                return call, self._change(call.reply, key)
        for call in reversed(self._resumed.get(state, ())):
            if call.reply.text and not key.has_calls and self._is_joined(call, state, key):
                return call, Change.JOINED
        for call in reversed(self._by_state.get(state, ())):
            if _is_cut(call.reply, key) or _is_extended(call.reply, key):
                return call, self._change(call.reply, key)
        call = self._forms.get(key.form)
        return call, None if call is None else Change.MOVED

    def _is_joined(self, call: RecordedCall, state: bytes, key: MessageKey) -> bool:
        """Whether a message at `state` is an unfinished one there and the reply that went on with it."""
        return self.keep_changed and state in call.resumes and key.text.endswith(call.reply.text)

    def _change(self, reply: MessageKey, key: MessageKey) -> Change | None:
        """What was done to a reply that came back in its place."""
        if (reply.loose or reply.form) == (key.loose or key.form):
            return None
        if not self.keep_changed:
            return Change.CHANGED_FORKED
        return Change.CUT if key.empty or _is_cut(reply, key) else Change.CHANGED_KEPT

    def _call_record(self, call: RecordedCall, *, node_id: int) -> CallRecord:
        return CallRecord(
            call_id=call.call_id,
            rollout_id=self.rollout_id,
            index=call.index,
            node_id=node_id,
            finish_reason=call.finish_reason,
            **call.fields,  # pyright: ignore[reportArgumentType]
        )


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Where a walk along a request's messages stands."""

    state: bytes
    anchor: RecordedCall | None = None
    num_known: int = 0
    last_assistant: int = -1
    forked: bool = False
    respliced: bool = False
    synthetic: bool = False
    seen: list[bytes] = field(default_factory=list)
    resumes: list[bytes] = field(default_factory=list)
    moved: dict[int, RecordedCall] = field(default_factory=dict)
    cut: dict[int, RecordedCall] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    changes: Counter[Change] = field(default_factory=Counter)

    def step(self, key: MessageKey) -> None:
        """Past a message that no recorded call stands for."""
        if key.is_tool or key.has_calls:
            self.resumes.clear()
        elif key.is_assistant:
            self.resumes.append(self.state)
        self.state = _chain(self.state, key.form)

    def anchor_at(self, call: RecordedCall, num_known: int) -> None:
        """Past a message whose recorded call stands for it and for all before it."""
        self.anchor, self.num_known, self.state = call, num_known, call.after_state
        self.resumes.clear()
        self.moved.clear()
        self.cut.clear()
        self.dropped.clear()

    def substitution(self) -> Substitution:
        if self.forked:
            return Substitution.FORKED
        if self.synthetic:
            return Substitution.SYNTHETIC
        return Substitution.RESPLICED if self.respliced else Substitution.CLEAN


def _is_cut(reply: MessageKey, key: MessageKey) -> bool:
    """Whether a message is only the beginning of a reply."""
    if not key.text or key.has_calls or not reply.text.startswith(key.text):
        return False
    return len(key.text) < len(reply.text) or reply.has_calls


def _is_extended(reply: MessageKey, key: MessageKey) -> bool:
    """Whether a message is a whole reply in text with something behind it."""
    if not reply.text or reply.has_calls or not key.text.startswith(reply.text):
        return False
    return not key.text[len(reply.text) :][:1].isalnum()


def _chain(state: bytes, value: bytes) -> bytes:
    """The next hash of a message chain: 128 bits, so that no session meets a collision by chance."""
    return xxhash.xxh3_128_digest(state + value)
