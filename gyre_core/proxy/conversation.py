"""Messages without a dialect, and their hashes.

Enters: one request's messages as a dialect reads them. Leaves: `Message` records for the renderer and `MessageKey`
hashes for the recorder. Two messages with equal `form` mean the same: JSON arguments are compared parsed (key order and
the spelling of numbers are free), whitespace at line ends and around texts does not count, nor do reasoning and ids.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import orjson
import xxhash

from gyre_core.proxy.refusal import bad_request
from gyre_core.trajectory.recorder import MessageKey
from gyre_core.trajectory.roles import RequestFacts
from gyre_core.types import FinishReason, Json

MAX_MESSAGES = 20_000  # of one request; the longest rollouts have some thousands
MAX_CACHED = 100_000  # raw messages whose keys are kept; more means that somebody plays tricks
_MEDIA = ("image", "image_url", "input_image", "document", "file", "input_audio")
_MINTED = re.compile(r"\b(?:toolu|call)_[0-9a-f]{26}\b")  # tool-call ids of ours; smolagents writes them into the text
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?([eE][+-]?\d{1,2})?")
_CHANGE_FOLDER = re.compile(r"^cd \S+ && ")
_MINTED_ID = re.compile(r"([a-z]+_[0-9a-f]{24})(\d\d)")  # turn.build_reply: one reply's unique part, the call's number
MAX_DEPTH = 128  # nesting of JSON that is compared by meaning; deeper arguments are compared as text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of an assistant message.

    Example: ToolCall(call_id="toolu_1", name="bash", arguments={"command": "ls"})
    """

    call_id: str
    name: str
    arguments: Any  # parsed JSON; the raw text when it is not JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    Example: Message(role="tool", text="a.txt", tool_call_id="toolu_1")
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of the call that a tool message answers
    signatures: tuple[str, ...] = ()  # of reasoning blocks, minted by the proxy

    def key(self) -> MessageKey:
        """The hashes by which the recorder matches it."""
        if self.role != "assistant":
            form = _digest([self.role, self.text.strip(), self.tool_call_id])
            return MessageKey(is_assistant=False, exact=form, form=form, is_tool=self.role == "tool")
        calls = [[call.call_id, call.name, call.arguments] for call in self.tool_calls]
        text = trimmed(self.text)
        return MessageKey(
            is_assistant=True,
            exact=_digest([self.text, self.reasoning, calls]),
            form=_digest([text, [[call.name, canonical_json(call.arguments)] for call in self.tool_calls]]),
            joins=tuple(call.call_id for call in self.tool_calls if call.call_id) + self.signatures,
            mentions=() if self.tool_calls else tuple(_MINTED.findall(text)),
            empty=not text and not self.tool_calls,
            loose=_digest([text.split(), [[call.name, loose_json(call.arguments)] for call in self.tool_calls]]),
            text=text,
            has_calls=bool(self.tool_calls),
        )

    def to_renderer(self) -> Json:
        """The message in the form of the `renderers` library."""
        message: Json = {"role": self.role, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A harness's request, whatever its dialect. Messages stay as they came until somebody needs them normalised."""

    dialect: str
    model: str
    raw_messages: Sequence[Json]  # the system prompt first, where the dialect has it apart
    normalise: Callable[[Json], tuple[Message, ...]]  # none, one or several; an assistant message gives exactly one
    tools: tuple[Json, ...] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False  # chat: a last chunk with the usage
    shows_reasoning: bool = True  # whether the harness gets reasoning at all
    omits_reasoning_text: bool = False  # it gets the signature of the reasoning, not its text
    temperature: float | None = None  # what the harness would have liked
    tool_choice: Literal["auto", "none", "required"] = "auto"  # none: no tool call is delivered
    tool_name: str = ""  # the tool that a required choice names, "" for any
    single_tool_call: bool = False  # only the first tool call is delivered
    ignored_options: tuple[str, ...] = ()  # what was asked for and is not done; each is counted
    facts: RequestFacts = field(default_factory=lambda: RequestFacts(headers={}))

    def messages(self, start: int = 0, end: int | None = None) -> list[Message]:
        """The raw messages [start, end), normalised, tool results in the order of their calls."""
        return in_call_order([message for raw in self.raw_messages[start:end] for message in self.normalise(raw)])

    def context_key(self) -> bytes:
        """Hash of what precedes the messages: the tools."""
        return _digest(list(self.tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the harness is given for one call, before a dialect writes it."""

    call_id: str
    text: str
    reasoning: str
    signature: str  # of the reasoning shown, "" when none is
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_sequence: str  # the stop string that ended the text, "" when none did
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    created_s: float

    def message(self) -> Message:
        """The reply as the assistant message that a faithful harness sends back."""
        return Message(
            role="assistant",
            text=self.text,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            signatures=(self.signature,) if self.signature else (),
        )


class KeyCache:
    """Message keys by the fingerprint of the raw message: a message is normalised once a session."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[MessageKey, ...]] = {}

    def keys(self, request: ChatRequest) -> tuple[list[MessageKey], list[int]]:
        """Keys of all messages, and for each raw message where its keys begin.

        Raises Refusal for a message that is nested too deeply or has a form that the dialect does not know.
        """
        keys: list[MessageKey] = []
        starts: list[int] = []
        if len(request.raw_messages) > MAX_MESSAGES:
            raise bad_request(f"messages: more than {MAX_MESSAGES} messages")
        if len(self._keys) > MAX_CACHED:
            self._keys.clear()
        prefix = request.dialect.encode()
        for raw in request.raw_messages:
            starts.append(len(keys))
            try:
                fingerprint = xxhash.xxh3_128_digest(prefix + orjson.dumps(raw))
            except TypeError as error:
                raise bad_request(f"messages: a message cannot be read ({error})") from error
            known = self._keys.get(fingerprint)
            if known is None:
                known = tuple(message.key() for message in request.normalise(raw))
                self._keys[fingerprint] = known
            keys.extend(known)
        return keys, starts


def in_call_order(messages: list[Message]) -> list[Message]:
    """Neighbouring tool results sorted as the calls of the reply that they answer.

    Claude Code sends them as its tools end, and most chat templates show no ids: the policy tells them by their order.
    Ids that the proxy minted end in the call's number; a run of results with other ids, or of two replies, stays.
    """
    ordered: list[Message] = []
    for is_tool, run in groupby(messages, key=lambda message: message.role == "tool"):
        group = list(run)
        if is_tool and len(group) > 1:
            minted = [_MINTED_ID.fullmatch(message.tool_call_id) for message in group]
            if all(minted) and len({match[1] for match in minted if match}) == 1:
                group.sort(key=lambda message: message.tool_call_id)
        ordered += group
    return ordered


def trimmed(text: str) -> str:
    """Text without whitespace at line ends and around it."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def canonical_json(value: Any) -> Any:
    """A JSON value in a form that equals for equal meanings: sorted keys, 5.0 as 5, trimmed strings."""
    try:
        return _canonical(value, 0)
    except _TooDeepError:
        return trimmed(orjson.dumps(value).decode())


def loose_json(value: Any) -> Any:
    """A canonical JSON value that also forgives what harnesses do to arguments before they run them.

    Numbers and booleans as strings, numbers beyond double precision, keys added with an empty value or `false` (a
    schema's defaults), and `cd <folder> &&` before a command (measured: Claude Code, Qwen Code).
    """
    try:
        return _loose(_canonical(value, 0))
    except _TooDeepError:
        return trimmed(orjson.dumps(value).decode())


def parse_arguments(text: str) -> Any:
    """JSON arguments of a tool call; the text itself when it is no JSON (or nested absurdly deep)."""
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError):
        return text
    return value


def joined_text(parts: Sequence[str]) -> str:
    """The text of several content blocks."""
    return "\n".join(part for part in parts if part)


def require(condition: bool, message: str) -> None:
    """Raise a 400 in the dialect's form unless `condition` holds."""
    if not condition:
        raise bad_request(message)


def as_text(value: Any) -> str:
    """The text of a content block of unknown kind: its `text`, else its JSON without cache marks."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), str):
            return value["text"]
        if value.get("type") in _MEDIA:
            return f"[{value['type']} not shown: the policy reads text only]"
        value = {key: item for key, item in value.items() if key != "cache_control"}
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:
        raise bad_request(f"messages: a content block cannot be read ({error})") from error


class _TooDeepError(Exception):
    pass


def _canonical(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _TooDeepError
    if isinstance(value, dict):
        return {str(key): _canonical(value[key], depth + 1) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [_canonical(item, depth + 1) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return trimmed(value) if isinstance(value, str) else value


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: loose for key, item in value.items() if (loose := _loose(item)) not in ("", "false", [], {}, None)}
    if isinstance(value, list):
        return [_loose(item) for item in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(float(value))
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            return repr(float(value))
        return " ".join(_CHANGE_FOLDER.sub("", value).split())
    return value


def _digest(value: Any) -> bytes:
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(value, default=str))
    except TypeError as error:
        raise bad_request(f"messages: a message cannot be read ({error})") from error
