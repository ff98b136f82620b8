"""One turn between messages and tokens: a request to its exact prompt, an output to what the harness is told.

Enters: a request with its plan, a generation. Leaves: a `Prompt` (recorded tokens and what follows them, or a full
render) and a `Reply`. Everything about a reply is decided here, before its first byte goes out.
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import orjson

from gyre_core.proxy.conversation import ChatRequest, Message, Reply, ToolCall
from gyre_core.proxy.dialects.base import Dialect
from gyre_core.proxy.refusal import bad_request
from gyre_core.proxy.render import ParsedReply, PromptRenderer, check_vocabulary
from gyre_core.proxy.splice import TAIL_TOKENS, NewMessages, assemble
from gyre_core.trajectory.recorder import Plan, Recorder
from gyre_core.types import FinishReason, Generation, Json, Substitution, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request's exact prompt and where it hangs."""

    ids: TokenIds  # the whole prompt
    added: TokenIds  # those after the anchor's path; all of them without an anchor
    anchor_call: str
    substitution: Substitution


async def build_prompt(
    request: ChatRequest, plan: Plan, starts: list[int], *, recorder: Recorder, renderer: PromptRenderer
) -> Prompt:
    """The exact prompt of a request; `starts` says where each raw message's keys begin. Raises Refusal."""
    tools, anchor = request.tools, plan.anchor
    try:
        if anchor is not None:
            new = _new_messages(request, plan, starts)
            history = partial(_known_messages, request, plan)
            tail = recorder.tree.tail_ids(anchor.prompt_node, TAIL_TOKENS)[-TAIL_TOKENS:].tolist()
            added: list[int] | None = None
            if plan.bridgeable and new:
                messages = [message for _, message in new]
                added = await renderer.run(
                    messages, partial(renderer.extend, tail, anchor.output_ids.tolist(), messages, tools, history)
                )
            elif plan.bridgeable and anchor.finish_reason is FinishReason.LENGTH:
                added = []  # the reply was cut and the harness asks to go on with it
            elif not plan.bridgeable:
                added = await _assembled(tail, anchor.output_ids.tolist(), new, plan, tools, renderer, history)
            if added is not None:
                check_vocabulary(added, renderer.vocab_size)
                return Prompt(
                    ids=recorder.prompt_ids(anchor, added),
                    added=np.array(added, np.int32),
                    anchor_call=anchor.call_id,
                    substitution=plan.substitution,
                )
        renderer.check_length(len(orjson.dumps(tools)))
        rendered = await _rendered(request, plan, tools, renderer)
        check_vocabulary(rendered, renderer.vocab_size)
    except ValueError as error:
        raise bad_request(str(error)) from error
    ids = np.array(rendered, np.int32)
    drifted = anchor is not None and not recorder.continues(anchor, ids)
    substitution = plan.substitution
    if drifted and substitution is not Substitution.SYNTHETIC:
        substitution = Substitution.FORKED  # the template does not append here
    return Prompt(ids=ids, added=ids, anchor_call="", substitution=substitution)


def _new_messages(request: ChatRequest, plan: Plan, starts: list[int]) -> list[tuple[int, Message]]:
    """The messages after the anchor that say something, with their positions; only these are normalised."""
    first_raw = max(bisect_right(starts, plan.num_known) - 1, 0)
    positioned = enumerate(request.messages(first_raw), starts[first_raw])
    return [(at, message) for at, message in positioned if at >= plan.num_known and at not in plan.dropped]


def _known_messages(request: ChatRequest, plan: Plan) -> list[Message]:
    """All messages up to the anchor's reply, that reply included even where the harness left it out."""
    known = request.messages()[: plan.num_known]
    return known if known and known[-1].role == "assistant" else [*known, Message(role="assistant", text="")]


async def _rendered(request: ChatRequest, plan: Plan, tools: Sequence[Json], renderer: PromptRenderer) -> list[int]:
    """The whole prompt anew, with recorded ids for messages that were sampled in another context."""
    positioned = [(at, message) for at, message in enumerate(request.messages()) if at not in plan.dropped]
    first = next((i for i, (_, message) in enumerate(positioned) if message.role == "assistant"), 0)
    if plan.anchor is None and first and (plan.moved or plan.cut):
        opening = [message for _, message in positioned[:first]]
        begin = await renderer.run(opening, partial(renderer.render, opening, tools))
        # The first assistant message is the turn that the opening ends in.
        rest = await _assembled(begin, None, positioned[first:], plan, tools, renderer, lambda: opening)
        if rest is not None:
            return begin + rest
    messages = [message for _, message in positioned]
    return await renderer.run(messages, partial(renderer.render, messages, tools))


async def _assembled(
    tail: list[int],
    output: list[int] | None,
    new: list[tuple[int, Message]],
    plan: Plan,
    tools: Sequence[Json],
    renderer: PromptRenderer,
    history: Callable[[], Sequence[Message]],
) -> list[int] | None:
    messages = NewMessages(
        messages=[message for _, message in new],
        positions=[at for at, _ in new],
        tail=tail,
        output=output,
        plan=plan,
        tools=tools,
    )
    return await renderer.run(messages.messages, partial(assemble, messages, renderer, history))


def build_reply(
    request: ChatRequest,
    prompt: Prompt,
    generation: Generation,
    *,
    dialect: Dialect,
    renderer: PromptRenderer,
    call_id: str,
    session_id: str,
    now_s: float,
    counts: Counter[str],
) -> Reply:
    """What the harness is told of an output; oddities are added to `counts`."""
    parsed = renderer.parse(generation.output_ids.tolist(), request.tools, prompt.ids[-TAIL_TOKENS:].tolist())
    text, tool_calls = _chosen(parsed, request, counts)
    stop_sequence = ""
    if parsed.num_malformed:
        counts["malformed_tool_calls"] += parsed.num_malformed
    if generation.finish_reason is FinishReason.STOP and (generation.output_ids[-1] not in renderer.stop_token_ids):
        text, stop_sequence = _cut_at_stop(text, request.stop)
    if not text and not tool_calls:
        counts["empty_replies"] += 1
    unique = hashlib.blake2b(f"{session_id}/{call_id}".encode(), digest_size=12).hexdigest()
    shown = bool(parsed.reasoning) and request.shows_reasoning
    return Reply(
        call_id=call_id,
        text=text,
        reasoning=parsed.reasoning if shown and not request.omits_reasoning_text else "",
        signature=f"gyre-{unique}" if shown else "",
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
        created_s=now_s,
    )


def _chosen(parsed: ParsedReply, request: ChatRequest, counts: Counter[str]) -> tuple[str, Sequence[tuple[str, Json]]]:
    """Text and tool calls as the request's tool options allow them to be delivered (decision 9)."""
    text, calls = parsed.text, parsed.tool_calls
    allowed = 0 if request.tool_choice == "none" else 1 if request.single_tool_call else len(calls)
    if len(calls) > allowed:
        counts["tool_calls_withheld"] += len(calls) - allowed
    if calls and not allowed:  # what the policy wanted stays readable
        written = [orjson.dumps({"name": name, "arguments": arguments}).decode() for name, arguments in calls]
        text = "\n".join([text, *written] if text else written)
    calls = calls[:allowed]
    wanted = request.tool_name
    if request.tool_choice == "required" and not any(not wanted or name == wanted for name, _ in calls):
        counts["option_ignored_tool_choice"] += 1
    for name in request.ignored_options:
        counts[f"option_ignored_{name}"] += 1
    return text, calls


def _cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and that string."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, stops[0] if len(stops) == 1 else ""
    position, stop = min(found)
    return text[:position].rstrip(), stop
