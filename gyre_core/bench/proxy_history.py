"""What `gyre bench proxy` talks about: a policy's tokenizer and conversations of given lengths.

Enters: a number of tokens. Leaves: a model folder (a byte-level BPE trained on the spot on the source code of Python's
standard library, with Qwen3's special tokens) and Chat requests whose histories are made of that code, as a coding
agent's are: about as many characters a token as real tokenizers give. Nothing is downloaded.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre_core.bench.proxy_engine import FixedReply

_VOCAB_SIZE = 8192
_TRAIN_FILES, _TRAIN_CHARS = 40, 20_000  # of each file; enough for 3 to 4 characters a token, in two seconds
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_TURN_TOKENS = 1_000  # of a tool's result in the history
_GROWTH_CHARS = 300  # of a tool's result in a measured turn: about 100 tokens
_SYSTEM_TOKENS = 500
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} tool of a coding agent.",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "description": "as the name says"}},
                "required": [argument],
            },
        },
    }
    for name, argument in (("bash", "command"), ("read", "path"), ("write", "text"), ("search", "pattern"))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A request up to where its measured turns go, and what follows them."""

    num_tokens: int  # of the whole prompt, nearly
    head: bytes
    tail: dict[bool, bytes]  # by whether the reply is streamed

    def body(self, turns: bytes, *, stream: bool) -> bytes:
        """A whole request; `turns` as `turn` writes them."""
        return b"".join((self.head, turns, self.tail[stream]))


class Corpus:
    """The tokenizer, and text to measure with."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_TRAIN_FILES]
        texts = [path.read_text(encoding="utf-8", errors="ignore")[:_TRAIN_CHARS] for path in files]
        self._text = "\n".join(texts)
        self._tokenizer = _train(texts)

    def save_model(self, folder: Path) -> Path:
        """A model folder as the proxy needs it: no weights."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        config = {"model_type": "qwen3", "vocab_size": self._tokenizer.get_vocab_size()}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def reply(self) -> FixedReply:
        """What the engine samples for every call: a thought and a tool call."""
        text = "I will look at the file that the traceback names, then run its tests again to see what is left to mend."
        arguments = '{"command": "sed -n 1,80p src/module.py && python -m pytest -x -q tests"}'
        call = f'\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
        stop = self._tokenizer.token_to_id("<|im_end|>")
        assert stop is not None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        call_ids = self._tokenizer.encode(call, add_special_tokens=False).ids
        return FixedReply(
            output_ids=[*ids, *call_ids, stop],
            stop_token=stop,
            pieces=[self._tokenizer.decode([token], skip_special_tokens=False) for token in ids],
            tool_name="bash",
            tool_arguments=arguments,
        )

    def history(self, num_tokens: int) -> History:
        """A conversation of about `num_tokens` tokens: a task, then tool calls and their results."""
        words = self._words()
        left = num_tokens
        messages: list[dict[str, Any]] = []
        for role, size in (("system", _SYSTEM_TOKENS), ("user", 100)):
            content, used = next_text(words, min(size, max(10, left)))
            messages.append({"role": role, "content": content})
            left -= used
        number = 0
        while left > 0:
            call = {"name": "read", "arguments": orjson.dumps({"path": f"src/file_{number}.py"}).decode()}
            calls = [{"id": f"call_h{number}", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": f"Now file {number}.", "tool_calls": calls})
            content, used = next_text(words, min(_TURN_TOKENS, max(10, left)))
            messages.append({"role": "tool", "tool_call_id": f"call_h{number}", "content": content})
            left -= used + 40  # the call and the template's own tokens
            number += 1
        options = {"tools": _TOOLS, "max_tokens": 1024, "temperature": 1.0}
        tails = {stream: b"]," + orjson.dumps({**options, "stream": stream})[1:] for stream in (False, True)}
        head = b'{"model":"policy","messages":' + orjson.dumps(messages)[:-1]
        return History(num_tokens=num_tokens, head=head, tail=tails)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(self, reply: FixedReply, call_id: str, number: int) -> bytes:
        """What a harness adds to its messages after a reply: the reply itself and the tool's result."""
        function = {"name": reply.tool_name, "arguments": reply.tool_arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        start = number * _GROWTH_CHARS % (len(self._text) - _GROWTH_CHARS)
        messages = [
            {"role": "assistant", "content": reply.text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call_id, "content": self._text[start : start + _GROWTH_CHARS]},
        ]
        return b"," + orjson.dumps(messages)[1:-1]

    def _words(self) -> Iterator[tuple[str, int]]:
        """Lines of the corpus with their token counts, again and again."""
        lines = self._text.splitlines(keepends=True)
        counts = [len(encoding.ids) for encoding in self._tokenizer.encode_batch(lines, add_special_tokens=False)]
        while True:
            yield from zip(lines, counts, strict=True)


def next_text(words: Iterator[tuple[str, int]], num_tokens: int) -> tuple[str, int]:
    """Text of about `num_tokens` tokens, and how many they are."""
    parts: list[str] = []
    used = 0
    while used < num_tokens:
        line, count = next(words)
        parts.append(line)
        used += count
    return "".join(parts), used


def _train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - len(_SPECIAL) - len(_PLAIN),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _PLAIN])
    return tokenizer
