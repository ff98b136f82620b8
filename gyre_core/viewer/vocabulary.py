"""Token ids as the bytes they stand for, so that a page can put texts together itself.

Enters: a model folder's tokenizer.json. Leaves: `Vocabulary`. Pieces of a byte-level tokenizer joined are exactly the
text's bytes, characters that two tokens share included; another kind of tokenizer is decoded a token at a time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders

from gyre_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a page needs of a tokenizer.

    Example: Vocabulary(piece=lambda token_id: bytes([token_id]), special=frozenset({2}))
    """

    piece: Callable[[int], bytes]
    special: frozenset[int]  # ids of control tokens like <|im_start|>

    def pieces(self, token_ids: Iterable[int]) -> list[bytes]:
        """The bytes of each id."""
        return [self.piece(token_id) for token_id in token_ids]


@lru_cache(maxsize=2)
def load_vocabulary(model_folder: Path) -> Vocabulary:
    """Of a model folder; raises ConfigError when it has no tokenizer.json that can be read."""
    path = model_folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a missing or broken file
        raise ConfigError(f"cannot read {path} to show texts: {error}") from error
    return vocabulary_of(tokenizer)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Of a tokenizer in memory."""
    added: Mapping[int, object] = tokenizer.get_added_tokens_decoder()
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def piece(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            return f"⟨{token_id}⟩".encode()  # models have more ids than their tokenizers
        if token_id in added:
            return token.encode()
        if byte_level and all(char in _byte_of_char() for char in token):
            return bytes(_byte_of_char()[char] for char in token)
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()

    return Vocabulary(piece=piece, special=frozenset(added))


@cache
def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (GPT-2's): printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
