"""Flat buffers of a peer, taken whole or not at all: gradients to the core, weight snapshots to satellites.

    owner: memory filled -> offer (where, size, checksum, label)  --message-->  taker: read into staging -> checksum
        compared -> used

Enters: an offer that came over an authenticated channel. Leaves: a staging tensor that holds exactly what was offered,
or a TransferError and nothing used. The reads are one-sided: the owner's process need not do anything, and must not
write to the memory while the offer stands; if it does, or dies in the middle, the checksum tells. Two ways exist:
shared memory (one machine) and Mooncake.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
import xxhash
from torch import Tensor

from gyre_core.errors import TransferError

BufferKind = Literal["shared_memory", "mooncake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOffer:
    """Where a peer's bytes lie and what they are.

    Example: BufferOffer(kind="shared_memory", where="gyre-buffer-12-ab", address=0, size_bytes=64, checksum="1f...",
        label="step-3-9c/cell-1#2")
    """

    kind: BufferKind
    where: str  # name of the shared file, or Mooncake's session
    address: int  # in the peer's memory; 0 for a shared file
    size_bytes: int
    checksum: str  # hex xxh3-128 of the bytes
    label: str  # what they are: the session of a gradient, the version of weights

    def to_json(self) -> dict[str, Any]:
        """Plain data for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "BufferOffer":
        """The inverse of `to_json`; raises ValueError for anything else."""
        try:
            offer = cls(**data)
        except TypeError as error:
            raise ValueError(f"not a buffer offer: {error}") from error
        texts = (offer.kind, offer.where, offer.checksum, offer.label)
        numbers = (offer.address, offer.size_bytes)
        if not (all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)):
            raise ValueError(f"not a buffer offer: {data}")
        if offer.kind not in ("shared_memory", "mooncake") or offer.size_bytes < 0 or offer.address < 0:
            raise ValueError(f"not a buffer offer: {data}")
        return offer


class OfferedBuffer(Protocol):
    """Memory of this process that peers may read."""

    @property
    def memory(self) -> Tensor:
        """[size_bytes] uint8, to be filled by this process before it makes an offer."""
        ...

    def offer(self, label: str) -> BufferOffer:
        """Describe the memory as it is now."""
        ...

    def close(self) -> None:
        """Take the memory back; offers of it no longer hold."""
        ...


class BufferReader(Protocol):
    """Reads peers' memory."""

    def read(self, offer: BufferOffer, into: Tensor) -> None:
        """Fill `into` ([size_bytes] uint8) or raise TransferError; what it then holds is not defined."""
        ...

    def close(self) -> None:
        """Let go of what reading needs."""
        ...


def buffer_checksum(memory: Tensor) -> str:
    """Hex xxh3-128 of a contiguous host tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(memory.detach().reshape(-1).view(torch.uint8).numpy().data)


def pull(
    reader: BufferReader, offer: BufferOffer, *, size_bytes: int, label: str, staging: Tensor | None = None
) -> Tensor:
    """What was offered, [size_bytes] uint8 in `staging` or in fresh memory; raises TransferError unless it is whole.

    Staging may be used again after a success (it stays registered). After a failure it holds anything: throw it away.
    """
    if offer.size_bytes != size_bytes or offer.label != label:
        raise TransferError(
            f"the peer offers {offer.size_bytes} bytes of {offer.label!r}, wanted are {size_bytes} of {label!r}"
        )
    if staging is None or staging.numel() != size_bytes:
        staging = torch.empty(size_bytes, dtype=torch.uint8)
    reader.read(offer, staging)
    found = buffer_checksum(staging)
    if found != offer.checksum:
        raise TransferError(f"{label}: {size_bytes} bytes arrived with checksum {found}, offered was {offer.checksum}")
    return staging


def flatten(tensors: list[Tensor], into: Tensor) -> None:
    """Copy tensors of any type one after the other into flat bytes; AssertionError unless they fill it exactly."""
    assert into.numel() == flat_bytes(tensors), f"{into.numel()} bytes for tensors of {flat_bytes(tensors)}"
    at = 0
    for tensor in tensors:
        into[at : at + tensor.nbytes].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        at += tensor.nbytes


def unflatten(memory: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors shaped and typed as `like`, made of flat bytes on the host (copies where alignment asks for it)."""
    assert memory.numel() == flat_bytes(like), f"{memory.numel()} bytes for tensors of {flat_bytes(like)}"
    out, at = [], 0
    for tensor in like:
        part = memory[at : at + tensor.nbytes]
        if at % tensor.element_size():
            part = part.clone()
        out.append(part.view(tensor.dtype).reshape(tensor.shape))
        at += tensor.nbytes
    return out


def flat_bytes(tensors: list[Tensor]) -> int:
    """Size of the tensors one after the other."""
    return sum(tensor.nbytes for tensor in tensors)
