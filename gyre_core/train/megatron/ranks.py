"""What the processes of one trainer tell each other beside Megatron's own collectives.

Tensor-parallel ranks hold parts of the weights and compute the same micro-step; data-parallel ranks hold the same
weights and compute different ones. Every function here is a collective of all ranks it names: each of them must call
it, in the same order. With one process nothing is sent.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gyre_core.train.megatron import hf

_PARTIAL_GRADIENTS = ("q_layernorm.weight", "k_layernorm.weight")  # each rank normalises its own heads only


def tensor_rank() -> int:
    """This process among those that share the weights."""
    return parallel_state.get_tensor_model_parallel_rank()


def tensor_ranks() -> int:
    """How many processes share the weights."""
    return parallel_state.get_tensor_model_parallel_world_size()


def tensor_group() -> dist.ProcessGroup | None:
    """Their group; None when one process has all weights."""
    if tensor_ranks() == 1:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def full_tensor(name: str, tensor: Tensor) -> Tensor:
    """A parameter of this name in full, from its tensor-parallel parts; the tensor itself where it is not split."""
    if tensor_ranks() == 1 or not hf.is_split(name):
        return tensor
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(tensor_ranks())]
    dist.all_gather(parts, mine, group=tensor_group())
    return hf.unshard(name, parts)


def full_gradient(name: str, gradient: Tensor) -> Tensor:
    """A parameter's gradient, summed over data-parallel ranks, in full; always a copy."""
    gradient = gradient.clone()
    if parallel_state.get_data_parallel_world_size() > 1:
        dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
    if tensor_ranks() > 1 and name.endswith(_PARTIAL_GRADIENTS):
        dist.all_reduce(gradient, group=tensor_group())
    return full_tensor(name, gradient)


def first_copy() -> bool:
    """Whether this process belongs to the first of the data-parallel copies."""
    return parallel_state.get_data_parallel_rank() == 0


def sum_over_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors summed over the data-parallel ranks, as copies; with one copy the tensors themselves."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return list(tensors)
    sums = [tensor.clone() for tensor in tensors]
    for tensor in sums:
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return sums


def all_agree(fine: bool, device: torch.device) -> bool:
    """Whether it is true in every rank that computes this micro-step."""
    if tensor_ranks() == 1:
        return fine
    flag = torch.tensor(float(fine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=tensor_group())
    return bool(flag.item())


def sum_over_all(value: float, device: torch.device) -> float:
    """A number summed over all ranks of the trainer."""
    if dist.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total.item())
