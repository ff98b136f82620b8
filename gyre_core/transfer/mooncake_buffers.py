"""Buffers that peers read one-sidedly through Mooncake's Transfer Engine (RDMA where there is a device, else tcp).

The owner registers memory and gives its address away; the reader copies it without the owner's help. A failed read
leaves the staging partly written and the engine in an unknown state: the engine is dropped, the next read makes a new
one.
"""

import time
from typing import Any

import torch
from torch import Tensor

from gyre_core.errors import TransferError
from gyre_core.transfer.gradients import BufferOffer, buffer_checksum
from gyre_core.transfer.mooncake import load_mooncake, transport_protocol

# Mooncake's waiting call spins on a core that its own threads need (measured: half the speed): look and sleep instead.
# The sleeps grow with what has passed: a long copy is not looked at thousands of times (measured at 0.5 ms: 0.06 of the
# 0.70 processor seconds a GB), and its end is seen late by at most this part of it.
_LOOK_PART = 1 / 32
_LOOK_MIN_S, _LOOK_MAX_S = 0.0002, 0.02
_TIMEOUT_S = 60.0  # above Mooncake's own time-outs, and for each 4 GiB again


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
    """Reads peers' registered memory. Blocks: call it on a thread. Memory that is read into again stays registered.

    Example: reader = MooncakeReader(); reader.read(offer, staging)
    """

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._engine: Any = None
        self._registered: Tensor | None = None

    def read(self, offer: BufferOffer, into: Tensor) -> None:
        """Raises TransferError when the peer is gone or does not answer in time, SetupError without Mooncake."""
        if offer.kind != "mooncake":
            raise TransferError(f"{offer.label!r} is offered by {offer.kind}, not by Mooncake")
        if into.numel() != offer.size_bytes or not into.is_contiguous() or into.dtype != torch.uint8:
            raise ValueError(f"staging of {into.numel()} x {into.dtype} for {offer.size_bytes} bytes")
        if offer.size_bytes == 0:
            return
        try:
            self._register(into)
            self._copy(offer, into.data_ptr())
        except BaseException:
            self.close()  # before the memory can go: until then the engine may write to it
            raise

    def close(self) -> None:
        """Drop the engine; its destructor takes about a second and ends what it still does."""
        self._engine = None
        self._registered = None

    def _register(self, memory: Tensor) -> None:
        if self._engine is None:
            self._engine = _new_engine(self._host)
        held = self._registered
        if held is not None and (held.data_ptr(), held.numel()) == (memory.data_ptr(), memory.numel()):
            return
        if held is not None:
            self._engine.unregister_memory(held.data_ptr())
            self._registered = None
        code = self._engine.register_memory(memory.data_ptr(), memory.numel())
        if code != 0:
            raise TransferError(f"Mooncake did not register {memory.numel()} bytes to read into (code {code})")
        self._registered = memory

    def _copy(self, offer: BufferOffer, start: int) -> None:
        started = time.monotonic()
        deadline = started + _TIMEOUT_S * (1 + offer.size_bytes // 2**32)
        # One request a batch: `transfer_check_status` of several reports the first one's end (a checksum told us).
        batch = self._engine.batch_transfer_async_read(offer.where, [start], [offer.address], [offer.size_bytes])
        code = -1 if batch == 0 else self._engine.transfer_check_status(batch)
        while code == 0:
            now = time.monotonic()
            if now > deadline:
                raise TransferError(f"Mooncake's read of {offer.label!r} from {offer.where} did not end in time")
            time.sleep(min(max((now - started) * _LOOK_PART, _LOOK_MIN_S), _LOOK_MAX_S))
            code = self._engine.transfer_check_status(batch)
        if code != 1:
            raise TransferError(f"Mooncake's read of {offer.label!r} from {offer.where} failed (code {code})")
