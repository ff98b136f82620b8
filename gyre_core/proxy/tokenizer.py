"""A tokenizer for the renderers without transformers: starts in a fraction of the time and encodes long texts faster.

Enters: a model folder's tokenizer.json. Leaves: what the `renderers` library asks of a tokenizer (its `Tokenizer`
protocol; deliberately not callable, so that no character offsets are computed that nobody reads).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class FastTokenizer:
    """`tokenizers.Tokenizer` with the names that renderers use. Equal to transformers' fast tokenizers, id for id."""

    def __init__(self, tokenizer: Tokenizer, *, name_or_path: str, eos_token: str | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = tokenizer.token_to_id(eos_token) if eos_token else None

    @classmethod
    def load(cls, folder: Path) -> "FastTokenizer":
        """Read tokenizer.json (and the end-of-sequence token of tokenizer_config.json); raises OSError, ValueError."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        config_path = folder / "tokenizer_config.json"
        eos = json.loads(config_path.read_text()).get("eos_token") if config_path.exists() else None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        return cls(tokenizer, name_or_path=str(folder), eos_token=eos)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; special tokens written in it are read as such."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Ids of whole tokens, None for unknown ones."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]
