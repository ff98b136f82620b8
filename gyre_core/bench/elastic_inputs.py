"""What an emulated run reads: a model folder without weights, and problems whose verifier nobody runs.

Leaves: folders. The tokenizer has one token a letter, and one for each word of the chat template, so that texts have
as many tokens as the workload says. Nothing is downloaded.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_WORDS = ("user", "assistant", "system")


def save_emulated_model(folder: Path) -> Path:
    """A model folder as proxy and engine need it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*_PLAIN, *_WORDS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_emulated_problems(folder: Path, count: int) -> Path:
    """So many problems."""
    for number in range(count):
        problem = folder / f"p{number:03d}"
        (problem / "tests").mkdir(parents=True, exist_ok=True)
        (problem / "task.toml").write_text('version = "1.0"\n')
        (problem / "instruction.md").write_text(f"Emulated problem {number}.\n")
        (problem / "tests" / "test.sh").write_text("exit 1\n")  # the emulated verifier writes the reward
    return folder
