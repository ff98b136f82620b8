"""The process groups Megatron wants, opened and closed in one place.

A trainer of one process needs no launcher: its world has size 1 and meets in an in-memory store, so no port is taken.
Under a launcher (torchrun sets RANK and WORLD_SIZE) the world is the launcher's. Several trainers of one process, one
after the other or side by side, share the groups; the last one to close tears down what the first one opened.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gyre_core.train.megatron import cpu

_TIMEOUT = timedelta(minutes=10)  # longest wait in a collective; a replica that hangs longer is dead

_users = 0
_opened_world = False


def open_groups(seed: int, num_tensor_ranks: int = 1) -> None:
    """Initialise torch.distributed (gloo, or nccl with CUDA) and Megatron's groups, unless they are.

    The world's processes are split into groups of `num_tensor_ranks`; those groups are data-parallel replicas. Raises
    ValueError when the world does not divide, or groups of another layout are open.
    """
    global _users, _opened_world
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    _users += 1
    try:
        if not dist.is_initialized():
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if "GYRE_TRAINER_STORE" in os.environ:  # a rank of ParallelTrainer: they meet in a file
                dist.init_process_group(
                    backend,
                    init_method=Path(os.environ["GYRE_TRAINER_STORE"]).as_uri(),
                    rank=int(os.environ["RANK"]),
                    world_size=int(os.environ["WORLD_SIZE"]),
                    timeout=_TIMEOUT,
                )
            elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                if torch.cuda.is_available():
                    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                dist.init_process_group(backend, timeout=_TIMEOUT)
            else:
                store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
            _opened_world = True
        if dist.get_world_size() % num_tensor_ranks:
            raise ValueError(
                f"train.tensor_parallel = {num_tensor_ranks} does not divide the trainer's {dist.get_world_size()} "
                "process(es): gyre_core.train.parallel.open_trainer starts them"
            )
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_tensor_ranks)
        elif parallel_state.get_tensor_model_parallel_world_size() != num_tensor_ranks:
            raise ValueError("another trainer of this process has another train.tensor_parallel")
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    except BaseException:
        close_groups()
        raise


def close_groups() -> None:
    """Give up one use; the last use destroys Megatron's groups, and the world if this module opened it."""
    global _users, _opened_world
    from megatron.core import parallel_state

    _users -= 1
    if _users > 0:
        return
    parallel_state.destroy_model_parallel()
    if _opened_world:
        dist.destroy_process_group()
        _opened_world = False
