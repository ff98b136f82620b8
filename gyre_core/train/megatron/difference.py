"""How far apart two sets of named tensors are: in bits and in numbers."""

import torch
from torch import Tensor


def different_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> tuple[str, ...]:
    """Names whose tensors differ in a bit."""
    names = sorted(first.keys() | second.keys())
    return tuple(
        name
        for name in names
        if name not in first
        or name not in second
        or not torch.equal(first[name].contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8))
    )


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference of a value; 0 without a shared name."""
    shared = first.keys() & second.keys()
    return max((float((first[name].double() - second[name].double()).abs().max()) for name in shared), default=0.0)
