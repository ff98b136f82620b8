"""Lets megatron-core 0.16.1 run on a machine without CUDA. Does nothing at all where CUDA is present.

Megatron names CUDA in three ways that a CPU run meets, and each is answered here:

1. `torch.cuda.current_device()` is used as a `device=` argument in 36 places: it returns the CPU device;
2. its rng tracker reads and writes CUDA generator states: it is given the CPU generator;
3. literal `device="cuda"` and `Tensor.cuda()` around the optimizer: `cuda_literals()` maps them while it is active.

Honest limits: `install` replaces functions of `torch.cuda` for the whole process, so other code of the process that
asks for the current CUDA device on a machine without CUDA gets "cpu" instead of an error. Nothing else is replaced,
and nothing is undone. Checked for dense models, tensor and data parallelism over gloo; not for pipelines or experts.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ON_CPU = not torch.cuda.is_available()

_installed = False


class _CudaLiteralsToCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        device = named.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            named["device"] = torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named.get("dtype"):
            # Megatron sorts gradients by type names and accepts only the torch.cuda ones.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **named)


def cuda_literals() -> contextlib.AbstractContextManager[Any]:
    """Wrap optimizer construction, steps and state loading in this; a no-op where CUDA is present."""
    return _CudaLiteralsToCpu() if ON_CPU else contextlib.nullcontext()


def install() -> None:
    """Replace what megatron-core asks of `torch.cuda`, once. Call before anything of megatron is built."""
    global _installed
    if _installed or not ON_CPU:
        return
    _installed = True
    device = torch.device("cpu")
    torch.cuda.current_device = lambda: device  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
