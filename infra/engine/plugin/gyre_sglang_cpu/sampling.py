"""Seeded sampling on a CPU: a call's noise depends on its seed and the token's position, not on its batch.

SGLang has this behind `--enable-deterministic-inference`, whose kernels need a GPU; its seeded sampler itself is plain
torch but for the hash, which is given here with the same values.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

# SGLang's own seed for a call that brings none is 42: all of them would draw the same noise. Draw one each instead.
_call_seeds = random.SystemRandom()


def murmur_hash32(seed_N: torch.Tensor, position_N: torch.Tensor, column_M: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes (64-bit seed, 32-bit position, 32-bit column), as int64 [N, M].

    Same values as sglang.kernels.ops.sampling.murmur_hash (Triton). int64 products wrap; their low 32 bits are exact.
    """
    seed_N1 = seed_N.to(torch.int64).unsqueeze(1)
    hash_N1 = _mix(torch.zeros_like(seed_N1), seed_N1 & 0xFFFFFFFF)
    hash_N1 = _mix(hash_N1, (seed_N1 >> 32) & 0xFFFFFFFF)
    hash_N1 = _mix(hash_N1, position_N.to(torch.int64).unsqueeze(1) & 0xFFFFFFFF)
    hash_NM = _mix(hash_N1, column_M.to(torch.int64).unsqueeze(0)) ^ 16
    hash_NM = ((hash_NM ^ (hash_NM >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    hash_NM = ((hash_NM ^ (hash_NM >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return hash_NM ^ (hash_NM >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & 0xFFFFFFFF
    block = ((block << 15) | (block >> 17)) & 0xFFFFFFFF
    block = (block * 0x1B873593) & 0xFFFFFFFF
    state = state ^ block
    state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
    return (state * 5 + 0xE6546B64) & 0xFFFFFFFF


def with_seeds(original: Callable[..., Any], cls: type, batch: Any, vocab_size: int) -> Any:
    """AROUND hook of SamplingBatchInfo.from_schedule_batch: the batch's seeds, whatever the server's mode."""
    info = original(cls, batch, vocab_size)
    for request in batch.reqs:
        if request.sampling_params.sampling_seed is None:
            request.sampling_params.sampling_seed = _call_seeds.getrandbits(31)
    info.sampling_seed = torch.tensor([r.sampling_params.sampling_seed for r in batch.reqs], dtype=torch.int64)
    return info
