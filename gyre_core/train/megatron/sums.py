"""The step's unnormalised sums of one process: added to, put aside, and written for other processes to read.

Copies (data-parallel ranks) sum different micro-steps; what comes from elsewhere is added to the first copy, and what
goes elsewhere is summed over all. The optimizer step sums the copies anyway, so the result is the same.

Enters: Megatron's gradient buffers and the weights. Leaves: bytes of a staging file, one tensor after the other.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gyre_core.train.megatron import ranks
from gyre_core.transfer.gradients import flat_bytes, flatten, unflatten

Layout = list[tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor


class StepSums:
    """See the module. The buffers stay the trainer's. Example: StepSums(trainer.gradient_buffers()).add(others)"""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = list(buffers)
        self.aside: list[Tensor] | None = None  # what was put aside, until it is taken back or the step is given up

    def add(self, others: Sequence[Tensor]) -> None:
        """Add another replica's sums; ValueError when they are shaped otherwise."""
        if [buffer.shape for buffer in self._buffers] != [other.shape for other in others]:
            raise ValueError("these gradients are of another model or layout")
        if not ranks.first_copy():
            return
        with torch.no_grad():
            for buffer, other in zip(self._buffers, others, strict=True):
                buffer.add_(other.to(buffer.device))

    def whole(self) -> list[Tensor]:
        """The sums over all copies; a collective of them."""
        return ranks.sum_over_copies(self._buffers)

    def copies(self) -> list[Tensor]:
        """Of this process' sums, to be put aside."""
        return [buffer.clone() for buffer in self._buffers]

    def take_back(self) -> None:
        """What was put aside, plus what was summed since as another replica's: the same bits as `add` of that.

        Raises ValueError when nothing was put aside.
        """
        if self.aside is None:
            raise ValueError("no sum was begun")
        since, aside = self.whole(), self.aside
        self.aside = None
        with torch.no_grad():
            for buffer, mine, new in zip(self._buffers, aside, since, strict=True):
                buffer.copy_(mine + new if ranks.first_copy() else mine)


def parameters(model: torch.nn.Module) -> list[Tensor]:
    """A model's parameters by name order, in the model's own memory; of split weights this process' parts."""
    return [parameter.detach() for _, parameter in sorted(model.named_parameters())]


def load_parameters(model: torch.nn.Module, values: Sequence[Tensor]) -> None:
    """Take these for `parameters`. For a trainer that only sums: an optimizer knows nothing of it."""
    with torch.no_grad():
        for parameter, value in zip(parameters(model), values, strict=True):
            parameter.copy_(value)


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """Shapes and types."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def shaped(layout: Layout) -> list[Tensor]:
    """Tensors without memory of this layout, for sizes and `unflatten`."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in layout]


def stage(tensors: Sequence[Tensor], path: Path, offset: int) -> None:
    """Write tensors into a staging file from a byte on."""
    tensors = list(tensors)
    memory = _mapped(path, offset, flat_bytes(tensors))
    flatten(tensors, memory)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as bytes, one after the other: [size_bytes] uint8 on the host."""
    tensors = list(tensors)
    memory = torch.empty(flat_bytes(tensors), dtype=torch.uint8)
    flatten(tensors, memory)
    return memory


def unflat(data: np.ndarray, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse, shaped as `like`."""
    return unflatten(torch.from_numpy(data.copy()), list(like))


def staged(like: Sequence[Tensor], path: Path, offset: int) -> list[Tensor]:
    """Copies of the tensors that stand there."""
    like = list(like)
    return unflatten(_mapped(path, offset, flat_bytes(like)).clone(), like)


def _mapped(path: Path, offset: int, size_bytes: int) -> Tensor:
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", offset, (size_bytes,)))
