"""Buffers that peers read one-sidedly through Mooncake's Transfer Engine (RDMA where there is a device, else tcp).

The owner registers memory and gives its address away; the reader copies it without the owner's help. A failed read
leaves the staging partly written and the engine in an unknown state: the engine is dropped, the next read makes a new
one.
"""

from typing import Any

import torch
from torch import Tensor

from gyre_core.errors import TransferError
from gyre_core.transfer.gradients import BufferOffer, buffer_checksum
from gyre_core.transfer.mooncake import load_mooncake, transport_protocol

CHUNK_BYTES = 64 * 2**20  # of one request; a failure is noticed after one


def _new_engine(host: str) -> Any:
    engine = load_mooncake().TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", transport_protocol(), "")
    if code != 0:
        raise TransferError(f"Mooncake's transfer engine did not initialize on {host} (code {code})")
    return engine


class MooncakeBuffer:
    """Registered memory of this process, as a context. Not shared across forks.

    Example: with MooncakeBuffer(1024) as buffer: buffer.memory.zero_(); offer = buffer.offer("cell-1#1")
    """

    def __init__(self, size_bytes: int, *, host: str = "127.0.0.1") -> None:
        """`host`: the address under which peers reach this machine. Raises SetupError, TransferError."""
        self._memory: Tensor | None = torch.zeros(size_bytes, dtype=torch.uint8)
        self._engine: Any = _new_engine(host)
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        code = self._engine.register_memory(self._memory.data_ptr(), size_bytes)
        if code != 0:
            self._engine = None
            raise TransferError(f"Mooncake did not register {size_bytes} bytes (code {code})")

    @property
    def memory(self) -> Tensor:
        """[size_bytes] uint8."""
        assert self._memory is not None, "this buffer was closed"
        return self._memory

    def offer(self, label: str) -> BufferOffer:
        """Describe the memory as it is now."""
        return BufferOffer(
            kind="mooncake",
            where=self.session,
            address=self.memory.data_ptr(),
            size_bytes=self.memory.numel(),
            checksum=buffer_checksum(self.memory),
            label=label,
        )

    def close(self) -> None:
        """Unregister, then drop the engine (its destructor takes about a second)."""
        if self._engine is not None and self._memory is not None:
            self._engine.unregister_memory(self._memory.data_ptr())
        self._engine = None
        self._memory = None

    def __enter__(self) -> "MooncakeBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MooncakeReader:
    """Reads peers' registered memory. Blocks with one core busy: call it on a thread.

    Example: reader = MooncakeReader(); reader.read(offer, staging)
    """

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._engine: Any = None

    def read(self, offer: BufferOffer, into: Tensor) -> None:
        """Raises TransferError when the peer is gone or does not answer in time, SetupError without Mooncake."""
        if offer.kind != "mooncake":
            raise TransferError(f"{offer.label!r} is offered by {offer.kind}, not by Mooncake")
        if into.numel() != offer.size_bytes or not into.is_contiguous() or into.dtype != torch.uint8:
            raise ValueError(f"staging of {into.numel()} x {into.dtype} for {offer.size_bytes} bytes")
        if self._engine is None:
            self._engine = _new_engine(self._host)
        engine, start = self._engine, into.data_ptr()
        registered = False
        try:
            code = engine.register_memory(start, into.numel())
            if code != 0:
                raise TransferError(f"Mooncake did not register {into.numel()} bytes to read into (code {code})")
            registered = True
            for at in range(0, into.numel(), CHUNK_BYTES):
                size = min(CHUNK_BYTES, into.numel() - at)
                code = engine.transfer_sync_read(offer.where, start + at, offer.address + at, size)
                if code != 0:
                    raise TransferError(f"Mooncake's read of {offer.label!r} from {offer.where} failed (code {code})")
        except BaseException:
            self._engine = None
            raise
        finally:
            if registered:
                engine.unregister_memory(start)

    def close(self) -> None:
        """Drop the engine; its destructor takes about a second."""
        self._engine = None
