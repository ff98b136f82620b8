"""One-sided writes through Mooncake's Transfer Engine. The only module that imports mooncake.

Enters: host tensors and the addresses of a peer's registered memory. Leaves: bytes in the peer. A failed write leaves
the peer's memory partly written; whoever calls must treat it as broken until it was written whole and its checksums
agree.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from gyre_core.errors import SetupError, TransferError

# Mooncake reads these when it is imported. With its default time-outs a write that was given up on went on later and
# put the reused buffer's contents into the peer (measured); with these a transfer is over when the call returns.
_TIMEOUTS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_TCP_SLICE_SIZE": "1048576",
    "MC_LOG_LEVEL": "ERROR",
}
MAX_BATCH = 512  # writes of one call; more entries gained nothing and make one failure cover more


def transport_protocol() -> str:
    """rdma where the machine has an InfiniBand or RoCE device, else tcp."""
    return "rdma" if any(Path("/sys/class/infiniband").glob("*")) else "tcp"


def mooncake_environment() -> dict[str, str]:
    """Environment of a process that uses Mooncake, this one and SGLang servers alike."""
    protocol = transport_protocol()
    settings = {**_TIMEOUTS, "MOONCAKE_PROTOCOL": protocol}
    return {**settings, "MC_FORCE_TCP": "1"} if protocol == "tcp" else settings


def load_mooncake() -> ModuleType:
    """mooncake.engine, imported under our settings (variables that are set already stay).

    Raises SetupError with what to install when it does not load.
    """
    for name, value in mooncake_environment().items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise SetupError(
            f"Mooncake does not load ({error}): `apt-get install -y --no-install-recommends libibverbs1` and `pip "
            "install mooncake-transfer-engine-non-cuda==0.3.13.post1` (mooncake-transfer-engine on NVIDIA machines)"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemory:
    """Registered memory of a peer. Example: RemoteMemory(address=0x7f00, num_elements=64, itemsize=4)"""

    address: int
    num_elements: int
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.itemsize


class MooncakeWriter:
    """A Transfer Engine of this process, as a context. Not shared across forks; after a failure it is not used again.

    Example: with MooncakeWriter() as writer: writer.write("127.0.0.1:15005", [tensor], [memory])
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        module = load_mooncake()
        self._engine: Any = module.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", transport_protocol(), "")
        if code != 0:
            self._engine = None
            raise TransferError(f"Mooncake's transfer engine did not initialize on {host} (code {code})")

    def __enter__(self) -> "MooncakeWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the engine; its destructor takes about a second."""
        self._engine = None

    def write(self, session: str, sources: Sequence[torch.Tensor], targets: Sequence[RemoteMemory]) -> int:
        """Copy each source into its target; returns the bytes written.

        Sources are contiguous host tensors of the targets' exact sizes; they stay alive and as they are until this
        returns.
        Blocks, with one core busy: call it on a thread. Raises ValueError for shapes, TransferError for the transfer.
        """
        if self._engine is None:
            raise TransferError("this transfer engine was closed or has failed; make a new one")
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")  # Mooncake itself does not check
        for source, target in zip(sources, targets, strict=True):
            if source.device.type != "cpu" or not source.is_contiguous():
                raise ValueError("sources must be contiguous tensors in host memory")
            if source.nbytes != target.size_bytes:
                raise ValueError(f"a source of {source.nbytes} bytes for a target of {target.size_bytes}")
        registered: list[int] = []
        try:
            for source in sources:
                code = self._engine.register_memory(source.data_ptr(), source.nbytes)
                if code != 0:
                    raise TransferError(f"Mooncake did not register {source.nbytes} bytes to send (code {code})")
                registered.append(source.data_ptr())
            for start in range(0, len(sources), MAX_BATCH):
                part = slice(start, start + MAX_BATCH)
                code = self._engine.batch_transfer_sync_write(
                    session,
                    [source.data_ptr() for source in sources[part]],
                    [target.address for target in targets[part]],
                    [source.nbytes for source in sources[part]],
                )
                if code != 0:
                    raise TransferError(f"Mooncake's write to {session} failed (code {code})")
        except BaseException:
            self._engine = None  # its state after a failure is not known; its buffers may be read until it is gone
            raise
        for address in registered:
            self._engine.unregister_memory(address)
        return sum(source.nbytes for source in sources)
