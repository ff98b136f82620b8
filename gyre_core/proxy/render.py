"""Messages to token ids and sampled ids to messages, by the `renderers` library.

Enters: normalised messages and tools, and what was sampled before. Leaves: prompt ids, the ids that a next turn adds to
a recorded one, parsed replies. A recorded output is never tokenised again: `extend` gives only the ids to append after
it. Costs follow the new messages, except for a full render (a first turn, or one that cannot be appended).
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from renderers.base import Renderer, ToolCallParseStatus, create_renderer, load_tokenizer
from renderers.configs import config_from_name

from gyre_core.errors import ConfigError, SetupError
from gyre_core.proxy.conversation import Message
from gyre_core.proxy.refusal import prompt_too_long
from gyre_core.proxy.tokenizer import FastTokenizer
from gyre_core.types import Json

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# By the model's config.json: a fine-tuned policy keeps its family's template, which names cannot show.
RENDERER_BY_MODEL_TYPE = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
LONG_TEXT = 100_000  # characters: about 10 ms of encoding
# A text with more characters a token than this is not worth encoding to see that it is too long: an encoder takes some
# 100 bytes of memory for each token. Prose and code have 3 to 5; only runs of spaces or dashes reach 64.
MAX_CHARS_PER_TOKEN = 64
_DELIVERABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A sampled output as the policy meant it.

    Example: ParsedReply(text="", reasoning="think", tool_calls=(("bash", {"command": "ls"}),), num_malformed=0, ...)
    """

    text: str
    reasoning: str
    tool_calls: tuple[tuple[str, Json], ...]  # name, arguments
    num_malformed: int  # tool calls that could not be read and are part of the text
    reasoning_tokens: int


class PromptRenderer:
    """One tokenizer and one renderer of a policy."""

    context_length: int | None = None  # tokens; texts that are far longer are refused before they are encoded

    def __init__(self, tokenizer: Any, renderer: Renderer, vocab_size: int) -> None:
        """`vocab_size`: rows of the policy's embedding."""
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.vocab_size = vocab_size
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        think_end = tokenizer.convert_tokens_to_ids("</think>")
        self._think_end = think_end if isinstance(think_end, int) and think_end != tokenizer.unk_token_id else None

    @classmethod
    def load(
        cls, model_path: Path, renderer: str = "auto", thinking_retention: Literal["all", "tool_cycle"] = "all"
    ) -> "PromptRenderer":
        """Load tokenizer and renderer of a model folder.

        `renderer` is a name of the `renderers` library or "auto". Raises SetupError for a folder without a tokenizer
        and ConfigError for a renderer that does not fit it.
        """
        config = _model_config(model_path)
        name = RENDERER_BY_MODEL_TYPE.get(config.get("model_type", ""), "auto") if renderer == "auto" else renderer
        opaque = name in ("auto", "default")  # may need the chat template, which only transformers applies
        try:
            tokenizer: Any = load_tokenizer(str(model_path)) if opaque else FastTokenizer.load(model_path)
        except Exception as error:
            raise SetupError(f"no tokenizer can be loaded from {model_path}: {error}") from error
        try:
            renderer_config = config_from_name(name)
            if renderer_config is not None and name != "default":
                renderer_config = type(renderer_config)(thinking_retention=thinking_retention)
            built = create_renderer(tokenizer, renderer_config)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # a renderer's constructor fails in ways of its own
            raise ConfigError(f"renderer {renderer!r} does not fit the tokenizer of {model_path}: {error}") from error
        logger.info("model %s: renderer %s", model_path, type(built).__name__)
        return cls(tokenizer, built, int(config.get("vocab_size") or len(tokenizer)))

    async def run(self, messages: Sequence[Message], work: Callable[[], Result]) -> Result:
        """Do rendering `work` on `messages`: long texts in a thread, so that other sessions are served meanwhile.

        Only `FastTokenizer` is thread-safe; with transformers' tokenizers everything stays in the caller's thread.
        Raises Refusal for texts far beyond the context.
        """
        num_chars = sum(_num_chars(message) for message in messages)
        self.check_length(num_chars)
        if isinstance(self._tokenizer, FastTokenizer) and num_chars > LONG_TEXT:
            return await asyncio.to_thread(work)
        return work()

    def check_length(self, num_chars: int) -> None:
        """Raise Refusal when no encoding of so many characters can fit the context."""
        if self.context_length is not None and num_chars > self.context_length * MAX_CHARS_PER_TOKEN:
            raise prompt_too_long(num_chars // MAX_CHARS_PER_TOKEN, self.context_length)

    def render(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """Ids of a whole prompt, ending where the assistant's turn begins.

        A last assistant message without tool calls is a prefill: the policy continues its text. Raises ValueError for
        messages that the template refuses.
        """
        prefill = ""
        if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
            prefill = messages[-1].text.rstrip()
            messages = messages[:-1]
        if not messages:
            raise ValueError("no messages before the assistant's turn")
        ids = self._render([message.to_renderer() for message in messages], tools, generate=True)
        return ids + self._tokenizer.encode(prefill, add_special_tokens=False) if prefill else ids

    def extend(
        self,
        prompt_tail: Sequence[int],
        output_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Json],
        history: Callable[[], Sequence[Message]],
    ) -> list[int] | None:
        """The ids that follow a recorded output up to the next assistant turn, None when they cannot simply follow.

        `prompt_tail` is the end of the prompt that led to `output_ids`, from its last message on. An output that was
        cut gets its close here, as untrained ids. `history` gives all messages up to and including the output; only
        templates without a bridge of their own ask for it.
        """
        new = [message.to_renderer() for message in new_messages]
        if any(message.role == "assistant" for message in new_messages):
            # Only a template can say what stands around an assistant turn; at the end it would be a prefill.
            opaque = type(self._renderer).__name__ == "DefaultRenderer" and new_messages[-1].role != "assistant"
            return (
                self._extend_by_template(output_ids, [m.to_renderer() for m in history()], new, tools)
                if opaque
                else None
            )
        known = [*prompt_tail, *output_ids]
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt_tail),
            list(output_ids),
            new,  # pyright: ignore[reportArgumentType]
            tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
        )
        if bridged is not None:
            ids = list(bridged.token_ids)
            return ids[len(known) :] if ids[: len(known)] == known else None
        if type(self._renderer).__name__ != "DefaultRenderer":
            return None
        return self._extend_by_template(output_ids, [m.to_renderer() for m in history()], new, tools)

    def render_turn(self, message: Message) -> list[int] | None:
        """Ids of an assistant turn that nobody sampled, from where the policy would begin to its stop token.

        Rendered between two messages, as in the middle of a conversation. None when the template does not show where
        the turn begins and ends.
        """
        before: list[Json] = [{"role": "user", "content": "."}]
        turn = message.to_renderer()
        answer: Json = {"role": "user", "content": "."}
        if message.tool_calls:
            answer = {"role": "tool", "content": ".", "tool_call_id": message.tool_calls[-1].call_id}
        opening = self._render(before, (), generate=True)
        whole = self._render([*before, turn, answer], (), generate=False)
        if whole[: len(opening)] != opening:
            return None
        for position in range(len(opening), len(whole)):
            if whole[position] in self.stop_token_ids:
                return whole[len(opening) : position + 1]
        return None

    def turn_break(self) -> list[int] | None:
        """Ids between an assistant turn's stop token and another assistant turn right after it, None when unknown."""
        turn = Message(role="assistant", text=".")
        ids = self.render_turn(turn)
        before: list[Json] = [{"role": "user", "content": "."}]
        whole = self._render([*before, turn.to_renderer(), turn.to_renderer(), *before], (), generate=False)
        start = len(self._render(before, (), generate=True)) + len(ids or ())
        for position in range(start, len(whole)):
            if ids and whole[position : position + len(ids)] == ids:
                return whole[start:position]
        return None

    def parse(self, output_ids: Sequence[int], tools: Sequence[Json], prompt_tail: Sequence[int]) -> ParsedReply:
        """Read a sampled output. Never fails: what cannot be read as a tool call becomes text."""
        ids = list(output_ids)
        try:
            parsed = self._renderer.parse_response(
                ids,
                tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
                prompt_ids=list(prompt_tail),
            )
        except Exception:  # third-party parser on arbitrary model output (deep JSON, odd structures)
            logger.warning("the parser failed on an output of %d tokens; it is delivered as text", len(ids))
            return ParsedReply(
                text=self.decode([i for i in ids if i not in self.stop_token_ids]).strip(),
                reasoning="",
                tool_calls=(),
                num_malformed=1,
                reasoning_tokens=0,
            )
        texts = [_clean(parsed.content)]
        calls: list[tuple[str, Json]] = []
        num_malformed = 0
        for call in parsed.tool_calls:
            if call.status in _DELIVERABLE and call.name and _is_object(call.arguments):
                assert isinstance(call.arguments, dict)
                calls.append((_clean(call.name), call.arguments))
            else:
                num_malformed += 1
                span = call.token_span
                texts.append(_clean(self.decode(ids[span[0] : span[1]]) if span else call.raw))
        return ParsedReply(
            text="\n".join(text for text in texts if text),
            reasoning=_clean(parsed.reasoning_content or ""),
            tool_calls=tuple(calls),
            num_malformed=num_malformed,
            reasoning_tokens=self._count_reasoning(ids, bool(parsed.reasoning_content), parsed.reasoning_complete),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _render(self, messages: list[Json], tools: Sequence[Json], *, generate: bool) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(
                    messages,  # pyright: ignore[reportArgumentType]
                    tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # chat templates raise their own errors for role orders they do not know
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def _extend_by_template(
        self, output_ids: Sequence[int], history: list[Json], new: list[Json], tools: Sequence[Json]
    ) -> list[int] | None:
        """For opaque templates: render with and without the new messages and take the difference.

        Right when the template only appends here: the shorter render must begin the longer one, and the recorded
        assistant turn must end as the template ends one.
        """
        prompt = self._render(history[:-1], tools, generate=True)
        before = self._render(history, tools, generate=False)
        after = self._render(history + new, tools, generate=True)
        if before[: len(prompt)] != prompt or after[: len(before)] != before:
            return None
        turn = before[len(prompt) :]
        close = next((i for i in range(len(turn) - 1, -1, -1) if turn[i] in self.stop_token_ids), None)
        if close is None:
            return None
        ended = bool(output_ids) and output_ids[-1] in self.stop_token_ids
        if ended and output_ids[-1] != turn[close]:
            return None
        return (turn[close + 1 :] if ended else turn[close:]) + after[len(before) :]

    def _count_reasoning(self, ids: list[int], has_reasoning: bool, complete: bool | None) -> int:
        if not has_reasoning:
            return 0
        if complete is False:
            return len(ids)
        return ids.index(self._think_end) + 1 if self._think_end in ids else 0


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless every id is below `vocab_size`: an engine dies of others."""
    array = np.asarray(ids)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= vocab_size):
        raise ValueError(f"the prompt holds token id {int(array.max())}, outside the policy's {vocab_size} ids")


def _model_config(model_path: Path) -> dict[str, Any]:
    path = model_path / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


def _num_chars(message: Message) -> int:
    arguments = sum(len(orjson.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning) + arguments


def _is_object(arguments: Any) -> bool:
    """Whether arguments are a JSON object that every client can read (finite numbers, 64 bits, real characters)."""
    if not isinstance(arguments, dict):
        return False
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return _within_64_bits(arguments, 0)


def _within_64_bits(value: Any, depth: int) -> bool:
    if depth > 100:  # no client reads deeper arguments
        return False
    if isinstance(value, dict):
        return all(_within_64_bits(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_within_64_bits(item, depth + 1) for item in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _clean(text: str) -> str:
    """Text without lone surrogates, which no JSON can carry."""
    return text.encode("utf-8", "replace").decode()
