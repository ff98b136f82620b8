"""How SGLang holds a Hugging Face model's weights, and its checksums of them.

Enters: tensors under Hugging Face names, and the engine's own parameter names. Leaves: host tensors as each of the
engine's ranks holds them, and the checksums that it would report. Holds for dense models whose attention and MLP follow
the Llama pattern (Qwen2, Qwen3, Llama, Mistral): query, key and value rows are one matrix, gate and up rows another.

Tensor-parallel ranks hold rows of what leads into a layer (heads, gate and up, vocabulary) and columns of what leads
out of it; norms are whole in each. Key-value heads that are fewer than the ranks are held by several.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gyre_core.errors import TransferError

# engine's part of a name -> the Hugging Face parts whose rows it holds, in order
FUSED: Mapping[str, tuple[str, ...]] = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
_KEY_VALUE = (".k_proj.", ".v_proj.")
_BY_ROWS = (".q_proj.", ".gate_proj.", ".up_proj.")
_BY_COLUMNS = (".o_proj.", ".down_proj.")
_VOCABULARY_MULTIPLE = 64  # SGLang fills the embedding up to it, with zeros
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_HASH_CHUNK_BYTES = 64 * 2**20

# of device_checksum; the kernel's own constants
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_TILE_WORDS = 8192
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRanks:
    """How an engine splits its weights.

    Example: EngineRanks(count=2, kv_heads=8)
    """

    count: int = 1  # tensor-parallel
    kv_heads: int = 1  # of the model


WHOLE = EngineRanks()


def host_tensors(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Contiguous host tensors in the engine's type, copied only where they are not so already.

    Raises TransferError for a repeated name or a value that is not finite.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in result:
            raise TransferError(f"weights to publish hold {name} twice")
        host = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        if not torch.isfinite(host).all():
            raise TransferError(f"weights to publish are not finite in {name}; the engine keeps the old ones")
        result[name] = host
    return result


def engine_tensors(
    weights: Mapping[str, torch.Tensor], engine_names: Iterable[str], *, ranks: EngineRanks = WHOLE, rank: int = 0
) -> dict[str, torch.Tensor]:
    """A rank's parameters, made of Hugging Face `weights`; raises TransferError unless both sides match exactly, or for
    weights that cannot be split so.

    A tied output head is left out by one side or both: it is the embedding.
    """
    result: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for name in engine_names:
        parts = _parts(name)
        if parts == (HEAD,) and HEAD not in weights:
            parts = (EMBEDDING,)
        missing = [part for part in parts if part not in weights]
        if missing:
            raise TransferError(f"the engine's {name} needs {missing[0]}, which the published weights lack")
        used.update(parts)
        pieces = [_shard(part, weights[part], ranks, rank) for part in parts]
        result[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces).contiguous()
    left = sorted(set(weights) - used)
    tied = left == [HEAD] and EMBEDDING in weights and torch.equal(weights[HEAD], weights[EMBEDDING])
    if left and not tied:
        raise TransferError(f"the engine has no place for {', '.join(left[:3])} ({len(left)} tensors)")
    return result


def _shard(name: str, tensor: torch.Tensor, ranks: EngineRanks, rank: int) -> torch.Tensor:
    """A rank's part of a Hugging Face tensor."""
    if ranks.count == 1:
        return tensor
    if name in (HEAD, EMBEDDING):
        missing = -len(tensor) % _VOCABULARY_MULTIPLE
        return _chunk(name, torch.nn.functional.pad(tensor, (0, 0, 0, missing)), ranks.count, rank, dim=0)
    if any(part in name for part in _KEY_VALUE):
        if ranks.kv_heads % ranks.count and ranks.count % ranks.kv_heads:
            raise TransferError(f"{ranks.kv_heads} key-value heads and {ranks.count} ranks: neither divides the other")
        parts = min(ranks.count, ranks.kv_heads)
        return _chunk(name, tensor, parts, rank * parts // ranks.count, dim=0)
    if any(part in name for part in _BY_ROWS):
        return _chunk(name, tensor, ranks.count, rank, dim=0)
    if any(part in name for part in _BY_COLUMNS) and tensor.ndim == 2:
        return _chunk(name, tensor, ranks.count, rank, dim=1)
    if tensor.ndim > 1:
        raise TransferError(f"it is not known how an engine of {ranks.count} ranks splits {name}")
    return tensor


def _chunk(name: str, tensor: torch.Tensor, parts: int, index: int, *, dim: int) -> torch.Tensor:
    size = tensor.shape[dim]
    if size % parts:
        raise TransferError(f"{name} has {size} rows or columns, which {parts} ranks cannot share")
    return tensor.narrow(dim, index * (size // parts), size // parts).contiguous()


def _parts(engine_name: str) -> tuple[str, ...]:
    for fused, parts in FUSED.items():
        if fused in engine_name:
            return tuple(engine_name.replace(fused, part) for part in parts)
    return (engine_name,)


def host_checksum(tensor: torch.Tensor) -> str:
    """SGLang's checksum of a host tensor: the first 8 bytes of the SHA-256 of its bytes, in hex."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.sha256()
    for start in range(0, len(data), _HASH_CHUNK_BYTES):
        digest.update(data[start : start + _HASH_CHUNK_BYTES])
    return digest.hexdigest()[:16]


def overall_checksum(checksums: Mapping[str, str]) -> str:
    """One SHA-256 over all names and checksums, as SGLang's `per_gpu_checksum`."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(name.encode())
        digest.update(checksums[name].encode())
    return digest.hexdigest()


def device_checksum(tensor: torch.Tensor) -> str:
    """SGLang's checksum of a tensor that it holds on a GPU, computed on any device.

    sglang.kernels.ops.memory.gpu_tensor_hash: tiles of 8,192 32-bit words, two mixed and position-dependent sums a
    tile, the tiles' sums added and mixed once more.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words_N = data.view(torch.int32).to(torch.int64) & _MASK32
    total = 0
    size_bytes = 4 * words_N.numel() & _MASK32
    for first in range(0, words_N.numel(), _TILE_WORDS):
        part = words_N[first : first + _TILE_WORDS]
        index = torch.arange(first, first + part.numel(), device=part.device)
        for shift, factor, seed, turn in ((32, 0x27D4EB2D, _SEED_1, 15), (0, 0x165667B1, _SEED_2, 13)):
            position = ((index * factor + seed) & _MASK32) ^ (((index << turn) | (index >> (32 - turn))) & _MASK32)
            tile_sum = int(_fmix32_words(part ^ position).sum()) & _MASK32
            total += _fmix32(tile_sum ^ size_bytes) << shift
    return f"{_splitmix64(total & _MASK64) if words_N.numel() else 0:016x}"


def _fmix32_words(words: torch.Tensor) -> torch.Tensor:
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _MASK32
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _MASK32
    return words ^ (words >> 16)


def _fmix32(word: int) -> int:
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _MASK32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _MASK32
    return word ^ (word >> 16)


def _splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
