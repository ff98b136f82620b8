"""Buffers that another process of the same machine reads: files in memory (/dev/shm).

A file outlives its process, also one that was killed: what was offered can still be taken whole. Files of dead
processes are removed by the next one that makes a buffer.
"""

import contextlib
import mmap
import os
import re
import secrets
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gyre_core.errors import TransferError
from gyre_core.transfer.gradients import BufferOffer, buffer_checksum

MEMORY_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"gyre-buffer-(\d+)-[0-9a-f]{16}")


class SharedMemoryBuffer:
    """A buffer in a file of memory, as a context. Its room is reserved at once.

    Example: with SharedMemoryBuffer(1024) as buffer: buffer.memory.zero_(); offer = buffer.offer("cell-1#1")
    """

    def __init__(self, size_bytes: int, *, folder: Path = MEMORY_FOLDER) -> None:
        """Raises TransferError when the folder has no room."""
        remove_stale_buffers(folder)
        self.path = folder / f"gyre-buffer-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with self.path.open("xb+") as file:
                os.chmod(self.path, 0o600)
                # A file that only claims its size would end the process with SIGBUS when memory runs out.
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), max(1, size_bytes))
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise TransferError(f"{folder} has no room for a buffer of {size_bytes} bytes: {error}") from error
        self._memory: Tensor | None = torch.from_numpy(np.frombuffer(self._map, np.uint8, size_bytes))

    @property
    def memory(self) -> Tensor:
        """[size_bytes] uint8."""
        assert self._memory is not None, "this buffer was closed"
        return self._memory

    def offer(self, label: str) -> BufferOffer:
        """Describe the memory as it is now."""
        return BufferOffer(
            kind="shared_memory",
            where=self.path.name,
            address=0,
            size_bytes=self.memory.numel(),
            checksum=buffer_checksum(self.memory),
            label=label,
        )

    def close(self) -> None:
        """Remove the file. The mapping goes with the last tensor that looks at it."""
        self._memory = None
        self._map = None
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> "SharedMemoryBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedMemoryReader:
    """Reads buffers that other processes of this machine offer."""

    def __init__(self, *, folder: Path = MEMORY_FOLDER) -> None:
        self._folder = folder

    def read(self, offer: BufferOffer, into: Tensor) -> None:
        """One copy; TransferError when the file is gone or has another size."""
        if offer.kind != "shared_memory" or not _NAME.fullmatch(offer.where):
            raise TransferError(f"{offer.where!r} ({offer.kind}) is not a shared buffer of this machine")
        try:
            with (self._folder / offer.where).open("rb") as file:
                filled = file.readinto(into.numpy().data)
                whole = filled == offer.size_bytes == into.numel() and not (into.numel() and file.read(1))
        except OSError as error:
            raise TransferError(f"the shared buffer of {offer.label!r} cannot be read: {error}") from error
        if not whole:
            raise TransferError(f"the shared buffer of {offer.label!r} does not have {offer.size_bytes} bytes")

    def close(self) -> None:
        """Nothing is held."""


def remove_stale_buffers(folder: Path = MEMORY_FOLDER) -> int:
    """Remove buffers whose process is gone; returns how many."""
    removed = 0
    for path in folder.glob("gyre-buffer-*"):
        match = _NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed
