"""One-sided writes between two real Transfer Engines of this process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gyre_core.errors import TransferError
from gyre_core.transfer.mooncake import MooncakeWriter, RemoteMemory, load_mooncake, mooncake_environment

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def peer() -> Iterator[tuple[Any, str]]:
    """A peer's engine and session name."""
    engine = load_mooncake().TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield engine, f"127.0.0.1:{engine.get_rpc_port()}"


def remote(tensor: torch.Tensor) -> RemoteMemory:
    return RemoteMemory(address=tensor.data_ptr(), num_elements=tensor.numel(), itemsize=tensor.element_size())


def test_write_fills_the_peers_memory_and_nothing_else(peer: tuple[Any, str]) -> None:
    engine, session = peer
    pool = torch.zeros(10)
    engine.register_memory(pool.data_ptr(), pool.nbytes)
    with MooncakeWriter() as writer:
        sent = writer.write(
            session, [torch.arange(1.0, 4.0), torch.tensor([9.0])], [remote(pool[2:5]), remote(pool[7:8])]
        )
        assert pool.tolist() == [0, 0, 1, 2, 3, 0, 0, 9, 0, 0]
        assert sent == 16
        writer.write(session, [torch.tensor([5.0])], [remote(pool[0:1])])  # the writer can be used again
        assert pool[0] == 5
    engine.unregister_memory(pool.data_ptr())


def test_write_to_memory_that_is_not_registered_fails_and_ends_the_writer(peer: tuple[Any, str]) -> None:
    _, session = peer
    target = torch.zeros(3)
    with MooncakeWriter() as writer:
        with pytest.raises(TransferError, match="failed"):
            writer.write(session, [torch.ones(3)], [remote(target)])
        assert target.tolist() == [0, 0, 0]
        with pytest.raises(TransferError, match="make a new one"):
            writer.write(session, [torch.ones(3)], [remote(target)])


def test_write_bad_arguments_are_refused_before_mooncake_sees_them(peer: tuple[Any, str]) -> None:
    _, session = peer
    target = torch.zeros(3)
    with MooncakeWriter() as writer:
        with pytest.raises(ValueError, match="1 sources for 0 targets"):
            writer.write(session, [torch.ones(3)], [])
        with pytest.raises(ValueError, match="8 bytes for a target of 12"):
            writer.write(session, [torch.ones(2)], [remote(target)])
        with pytest.raises(ValueError, match="contiguous"):
            writer.write(session, [torch.ones(3, 2)[:, 0]], [remote(target)])


def test_environment_bounds_every_wait() -> None:
    settings = mooncake_environment()
    assert {"MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TRANSFER_TIMEOUT"} <= set(settings)
