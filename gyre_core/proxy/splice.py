"""Prompts that hold more than one recorded turn and its answers: recorded ids stand in wherever they can.

Enters: a plan whose request has assistant messages after the recorded call that it continues (or continues none).
Leaves: the ids that follow the recorded ones, or None when the template does not allow it and all is rendered anew.

Between two assistant messages the renderer's own bridge writes what the template writes there; an assistant message is
its recorded ids when it was sampled (in another context: after a summary), the recorded ids of its beginning when only
that came back, else its text as the template renders it. All of it is context; only a beginning is what was sampled in
this very place, so the tree shares it with its call, as a target once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gyre_core.proxy.conversation import Message, trimmed
from gyre_core.proxy.render import PromptRenderer
from gyre_core.trajectory.recorder import Plan, RecordedCall
from gyre_core.types import Json

TAIL_TOKENS = 256  # of the prompt's end, for the bridge: holds the last turn's opening whatever the message lengths
MAX_STAND_INS = 2000  # of one prompt; each takes 0.1 ms of the event loop, and no harness re-sends so many at once


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessages:
    """The messages of a request that no recorded path holds.

    Example: NewMessages(messages=(user,), positions=(4,), tail=tail, output=output, plan=plan, tools=())
    """

    messages: Sequence[Message]
    positions: Sequence[int]  # of each in the whole conversation
    tail: Sequence[int]  # the end of the prompt before `output`
    output: Sequence[int] | None  # ids of the turn before the first message; None when it is the first message
    plan: Plan
    tools: Sequence[Json]


def assemble(new: NewMessages, renderer: PromptRenderer, history: Callable[[], Sequence[Message]]) -> list[int] | None:
    """The ids that follow `output`, up to where the policy goes on; None when they cannot simply follow.

    `history` gives all messages before the new ones; only templates without a bridge of their own ask for it.
    """
    if sum(message.role == "assistant" for message in new.messages) > MAX_STAND_INS:
        return None
    try:
        return _assemble(new, renderer, history)
    except ValueError:  # the template refuses a part; it may take the whole
        return None


def _assemble(new: NewMessages, renderer: PromptRenderer, history: Callable[[], Sequence[Message]]) -> list[int] | None:
    tail, turn = list(new.tail), None if new.output is None else list(new.output)
    added: list[int] = []
    first = 0  # of the messages since the last assistant's
    for index, (position, message) in enumerate(zip(new.positions, new.messages, strict=True)):
        if message.role != "assistant":
            continue
        between: list[int] | None = [] if turn is None else None
        if turn and first == index and turn[-1] in renderer.stop_token_ids:
            between = renderer.turn_break()
        elif turn is not None and first < index:
            known = partial(_joined, history, new.messages[:first])
            between = renderer.extend(tail, turn, new.messages[first:index], new.tools, known)
        stand_in = _stand_in(position, message, new.plan, renderer)
        if between is None or stand_in is None:
            return None
        tail = (tail + (turn or []) + between)[-TAIL_TOKENS:]
        turn = stand_in
        added += between + turn
        first = index + 1
    if first == len(new.messages):  # the last message is the assistant's: the policy goes on with it
        if added and added[-1] in renderer.stop_token_ids:
            added.pop()
        return added
    known = partial(_joined, history, new.messages[:first])
    last = renderer.extend(tail, turn or [], new.messages[first:], new.tools, known)
    return None if last is None else added + last


def _joined(history: Callable[[], Sequence[Message]], more: Sequence[Message]) -> list[Message]:
    return [*history(), *more]


def _stand_in(position: int, message: Message, plan: Plan, renderer: PromptRenderer) -> list[int] | None:
    if (moved := plan.moved.get(position)) is not None:
        return moved.output_ids.tolist()
    if (call := plan.cut.get(position)) is not None and (ids := cut_output(call, message, renderer)):
        return ids
    return renderer.render_turn(message)


def cut_output(call: RecordedCall, message: Message, renderer: PromptRenderer) -> list[int]:
    """The ids of a recorded output that say no more than the beginning of it that came back."""
    ids = call.output_ids.tolist()
    low, high = 0, len(ids)  # ids[:low] say no more
    while low < high:
        middle = (low + high + 1) // 2
        parsed = renderer.parse(ids[:middle], (), ())
        says_more = parsed.tool_calls or parsed.num_malformed or not trimmed(message.text).startswith(parsed.text)
        low, high = (low, middle - 1) if says_more else (middle, high)
    return ids[:low]
