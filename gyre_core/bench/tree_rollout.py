"""A synthetic rollout: the calls of a long coding task, without a model, a harness or text that means anything.

Enters: how many calls and tokens, a seed. Leaves: `SyntheticCall` records in order of arrival: a main conversation with
compactions, sub-agents (several at a time, nested), calls sampled again, branches one turn back. The same arguments
give the same calls. Keys and replies are consistent, so that a recorder joins each call to the one it continues.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from gyre_core.proxy.conversation import Reply, ToolCall
from gyre_core.trajectory.recorder import MessageKey
from gyre_core.types import FinishReason, LogProbs, Role, TokenIds

VOCAB_SIZE = 151_936  # of Qwen3
ROLLOUT_ID = "bench-rollout"
_SUMMARY = {Role.MAIN: Role.MAIN_SUMMARY, Role.SUB_AGENT: Role.SUB_AGENT_SUMMARY}
_MAX_DEPTH = 2  # sub-agents of sub-agents
_SHARE_SAMPLED = 0.25  # of a turn's tokens; measured on coding rollouts: a fifth to a third
_SYSTEM_SHARE = 0.012  # of all tokens: a harness's system prompt and tools are some thousands of tokens
_LOGPROB_SCALE = 0.3  # nats; any value does


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCall:
    """One call: what its harness sends and what the engine samples for it."""

    context: bytes  # hash of the tools
    keys: tuple[MessageKey, ...]  # of all messages of the request
    role: Role
    added: TokenIds  # after the path that the request continues; the whole prompt of a conversation's first call
    output_ids: TokenIds
    logprobs: LogProbs
    reply: Reply


@dataclass(slots=True)
class _Conversation:
    role: Role
    context: bytes
    system: TokenIds
    depth: int
    turns_left: int
    keys: tuple[MessageKey, ...] = ()
    turns: list[tuple[MessageKey, ...]] = field(default_factory=list)  # the keys before each of its calls
    fresh: bool = True  # nothing was sampled yet
    num_since_start: int = 0


def synthetic_calls(*, num_calls: int, num_tokens: int, seed: int, branching: float = 1.0) -> Iterator[SyntheticCall]:
    """`num_calls` calls that add about `num_tokens` tokens to a tree; raises ValueError for too few of either.

    `branching` scales how often a call is sampled again, goes one turn back or starts sub-agents; compactions stay.
    """
    if num_calls < 1 or num_tokens < 20 * num_calls:
        raise ValueError(f"{num_tokens} tokens are too few for {num_calls} calls: at least 20 a call")
    rng = np.random.default_rng(seed)
    system_size = max(4, int(num_tokens * _SYSTEM_SHARE))
    systems = {role: _ids(rng, system_size) for role in (Role.MAIN, Role.SUB_AGENT)}
    mean = (num_tokens - 2 * system_size) / num_calls
    compact_every = max(8, num_calls // 6)
    main = _Conversation(Role.MAIN, b"tools-main", systems[Role.MAIN], depth=0, turns_left=num_calls)
    active = [main]  # the main conversation, and the sub-agents it waits for
    last: tuple[_Conversation, SyntheticCall] | None = None
    for index in range(num_calls):
        waiting = [talk for talk in active if talk is not main]
        talk = waiting[int(rng.integers(len(waiting)))] if waiting else main
        size = mean * rng.gamma(4.0, 0.25)
        draw = rng.random()
        if last is not None and last[0] is talk and draw < 0.03 * branching:
            call = _sampled_again(last[1], rng, size, index)
        else:
            if draw < 0.06 * branching and len(talk.turns) >= 2:
                talk.keys = talk.turns.pop()  # one turn back: the harness goes on from the request before
                talk.keys = talk.keys[:-1]
            summarise = talk.num_since_start >= compact_every
            call = _next_call(talk, rng, size, index, _SUMMARY[talk.role] if summarise else talk.role)
            talk.turns.append(talk.keys)
            if summarise:
                _restart(talk)
        last = (talk, call)
        if not talk.fresh:
            talk.keys = (*call.keys, call.reply.message().key())
        talk.turns_left -= 1
        if talk is not main and talk.turns_left <= 0:
            active.remove(talk)
        elif talk.depth < _MAX_DEPTH and not talk.fresh and rng.random() < branching * (0.06 if talk is main else 0.02):
            for _ in range(int(rng.integers(1, 4))):
                turns = int(rng.integers(2, 12))
                active.append(
                    _Conversation(Role.SUB_AGENT, b"tools-sub", systems[Role.SUB_AGENT], talk.depth + 1, turns)
                )
        yield call


def _next_call(talk: _Conversation, rng: np.random.Generator, size: float, index: int, role: Role) -> SyntheticCall:
    num_output = max(1, round(size * _SHARE_SAMPLED))
    own = _ids(rng, max(1, round(size) - num_output))
    if talk.fresh:
        keys = (_prompt_key(f"system {talk.role.value}"), _prompt_key(f"task {index}"))
        added = np.concatenate([talk.system, own])
    else:
        keys = (*talk.keys, *(_prompt_key(f"result {index} {part}") for part in range(int(rng.integers(1, 4)))))
        added = own
    talk.keys, talk.fresh = keys, False
    talk.num_since_start += 1
    return _call(talk.context, keys, role, added, rng, num_output, index)


def _sampled_again(call: SyntheticCall, rng: np.random.Generator, size: float, index: int) -> SyntheticCall:
    """The same request once more: another sample of the same prompt."""
    return _call(call.context, call.keys, call.role, call.added, rng, max(1, round(size * _SHARE_SAMPLED)), index)


def _restart(talk: _Conversation) -> None:
    """A compaction: the next call begins a conversation of its own."""
    talk.fresh, talk.num_since_start = True, 0
    talk.keys = ()
    talk.turns.clear()


def _call(
    context: bytes,
    keys: tuple[MessageKey, ...],
    role: Role,
    added: TokenIds,
    rng: np.random.Generator,
    num_output: int,
    index: int,
) -> SyntheticCall:
    output_ids = _ids(rng, num_output)
    reply = Reply(
        call_id=f"{ROLLOUT_ID}-c{index}",
        text=f"{index} " + "some text of the policy " * (num_output // 8),  # about three characters a token
        reasoning="",
        signature="",
        tool_calls=(ToolCall(call_id=f"toolu_{index}", name="bash", arguments={"command": f"make {index}"}),),
        finish_reason=FinishReason.STOP,
        stop_sequence="",
        prompt_tokens=0,
        output_tokens=num_output,
        cached_tokens=0,
        reasoning_tokens=0,
        created_s=float(index),
    )
    logprobs = -rng.exponential(_LOGPROB_SCALE, num_output).astype(np.float32)
    return SyntheticCall(
        context=context, keys=keys, role=role, added=added, output_ids=output_ids, logprobs=logprobs, reply=reply
    )


def _prompt_key(text: str) -> MessageKey:
    form = xxhash.xxh3_128_digest(text.encode())
    return MessageKey(is_assistant=False, exact=form, form=form)


def _ids(rng: np.random.Generator, size: int) -> TokenIds:
    return rng.integers(0, VOCAB_SIZE, size, dtype=np.int32)
