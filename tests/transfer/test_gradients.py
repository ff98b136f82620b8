"""Offered buffers: read whole and checked, or refused. Mooncake's part runs two real engines."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre_core.errors import TransferError
from gyre_core.transfer.gradients import BufferOffer, BufferReader, OfferedBuffer, flatten, pull, unflatten
from gyre_core.transfer.mooncake_buffers import MooncakeBuffer, MooncakeReader
from gyre_core.transfer.shared_memory import SharedMemoryBuffer, SharedMemoryReader, remove_stale_buffers

SIZE = 4096 + 3


@pytest.fixture(params=["shared_memory", pytest.param("mooncake", marks=pytest.mark.integration)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[OfferedBuffer, BufferReader]]:
    """A buffer with random bytes and a reader."""
    buffer: OfferedBuffer
    reader: BufferReader
    if request.param == "shared_memory":
        buffer, reader = SharedMemoryBuffer(SIZE, folder=tmp_path), SharedMemoryReader(folder=tmp_path)
    else:
        buffer, reader = MooncakeBuffer(SIZE), MooncakeReader()
    buffer.memory.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    yield buffer, reader
    reader.close()
    buffer.close()


def test_pull_gives_the_offered_bytes_again_and_again(pair: tuple[OfferedBuffer, BufferReader]) -> None:
    buffer, reader = pair
    for value in (1, 2):
        buffer.memory[7] = value
        offer = BufferOffer.from_json(buffer.offer(f"v{value}").to_json())
        taken = pull(reader, offer, size_bytes=SIZE, label=f"v{value}")
        assert torch.equal(taken, buffer.memory)


def test_pull_of_memory_that_changed_under_the_offer_is_refused(pair: tuple[OfferedBuffer, BufferReader]) -> None:
    buffer, reader = pair
    offer = buffer.offer("g")
    buffer.memory[-1] ^= 1
    with pytest.raises(TransferError, match="arrived with checksum"):
        pull(reader, offer, size_bytes=SIZE, label="g")


def test_pull_of_something_else_than_wanted_is_refused(pair: tuple[OfferedBuffer, BufferReader]) -> None:
    buffer, reader = pair
    offer = buffer.offer("step-1/cell-1#1")
    with pytest.raises(TransferError, match="wanted are"):
        pull(reader, offer, size_bytes=SIZE, label="step-2/cell-1#1")
    with pytest.raises(TransferError, match="wanted are"):
        pull(reader, offer, size_bytes=SIZE + 1, label=offer.label)


def test_pull_from_a_closed_buffer_fails_and_the_reader_lives_on(tmp_path: Path) -> None:
    reader = SharedMemoryReader(folder=tmp_path)
    with SharedMemoryBuffer(SIZE, folder=tmp_path) as gone:
        offer = gone.offer("g")
    with pytest.raises(TransferError, match="cannot be read"):
        pull(reader, offer, size_bytes=SIZE, label="g")
    with SharedMemoryBuffer(SIZE, folder=tmp_path) as other:
        assert len(pull(reader, other.offer("g"), size_bytes=SIZE, label="g")) == SIZE


def test_shared_reader_opens_only_buffers(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    with SharedMemoryBuffer(1, folder=tmp_path) as buffer:
        for where in ("secret", "../secret", "/etc/passwd", f"../{buffer.path.name}"):
            with pytest.raises(TransferError, match="not a shared buffer"):
                SharedMemoryReader(folder=tmp_path).read(
                    replace(buffer.offer("g"), where=where), torch.empty(1, dtype=torch.uint8)
                )


def test_shared_reader_refuses_a_file_of_another_size(tmp_path: Path) -> None:
    with SharedMemoryBuffer(SIZE, folder=tmp_path) as buffer:
        offer = buffer.offer("g")
        os.truncate(buffer.path, SIZE - 1)
        with pytest.raises(TransferError, match="does not have"):
            pull(SharedMemoryReader(folder=tmp_path), offer, size_bytes=SIZE, label="g")
        os.truncate(buffer.path, SIZE + 1)
        with pytest.raises(TransferError, match="does not have"):
            pull(SharedMemoryReader(folder=tmp_path), offer, size_bytes=SIZE, label="g")


def test_shared_buffer_without_room_is_refused_at_once() -> None:
    with pytest.raises(TransferError, match="no room"):
        SharedMemoryBuffer(1 << 50)


def test_shared_buffers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    stale, foreign = tmp_path / f"gyre-buffer-{child.pid}-{'0' * 16}", tmp_path / "gyre-buffer-note"
    stale.touch()
    foreign.touch()
    with SharedMemoryBuffer(8, folder=tmp_path) as mine:
        assert not stale.exists()
        assert foreign.exists()
        assert remove_stale_buffers(tmp_path) == 0
        assert mine.path.exists()


@pytest.mark.integration
def test_mooncake_read_of_what_is_not_registered_fails_and_a_new_engine_reads_on() -> None:
    reader = MooncakeReader()
    with MooncakeBuffer(SIZE) as buffer:
        offer = buffer.offer("g")
        with pytest.raises(TransferError, match="failed"):
            reader.read(replace(offer, address=offer.address + 2**30), torch.empty(SIZE, dtype=torch.uint8))
        assert torch.equal(pull(reader, offer, size_bytes=SIZE, label="g"), buffer.memory)
    reader.close()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"kind": "ftp"},
        {"size_bytes": -1},
        {"size_bytes": "9"},
        {"address": True},
        {"label": None},
        {"unknown": 1},
    ],
)
def test_offer_from_a_bad_message_is_a_value_error(broken: dict[str, object]) -> None:
    good = {"kind": "mooncake", "where": "h:1", "address": 1, "size_bytes": 1, "checksum": "0", "label": "g"}
    with pytest.raises(ValueError, match="not a buffer offer"):
        BufferOffer.from_json({**good, **broken} if broken else {})


def test_flatten_and_unflatten_keep_types_shapes_and_bits() -> None:
    tensors = [torch.randn(3, 2), torch.randn(5).to(torch.bfloat16), torch.randn(4), torch.tensor(float("nan"))]
    memory = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    flatten(tensors, memory)
    for before, after in zip(tensors, unflatten(memory, tensors), strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert torch.equal(before.reshape(-1).view(torch.uint8), after.reshape(-1).view(torch.uint8))
