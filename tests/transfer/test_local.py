"""Staging weights as files: where, whole, and gone afterwards."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gyre_core.errors import TransferError
from gyre_core.transfer.local import PREFIX, choose_folder, remove_stale, staged_weights

Usage = namedtuple("Usage", "total used free")


def free_space(monkeypatch: pytest.MonkeyPatch, sizes: dict[Path, int]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, sizes[Path(path)]))


def test_choose_folder_takes_memory_when_twice_the_size_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, work = tmp_path / "memory", tmp_path / "work"
    memory.mkdir()
    free_space(monkeypatch, {memory: 200, work: 1000})
    assert choose_folder(100, work, memory=memory) == memory
    assert choose_folder(101, work, memory=memory) == work


def test_choose_folder_without_room_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, work = tmp_path / "memory", tmp_path / "work"
    memory.mkdir()
    free_space(monkeypatch, {memory: 10, work: 99})
    with pytest.raises(TransferError, match="free disk space"):
        choose_folder(100, work, memory=memory)


def test_choose_folder_without_shared_memory_takes_the_work_folder(tmp_path: Path) -> None:
    assert choose_folder(1, tmp_path / "work", memory=tmp_path / "none") == tmp_path / "work"


def test_staged_weights_are_readable_and_gone_afterwards(tmp_path: Path) -> None:
    with staged_weights({"a": torch.arange(3.0)}, tmp_path) as folder:
        assert load_file(folder / "model.safetensors")["a"].tolist() == [0, 1, 2]
    assert not folder.exists()


def test_staged_weights_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gyre_core.transfer.local.save_file", full)
    monkeypatch.setattr("gyre_core.transfer.local.MEMORY_FOLDER", tmp_path / "none")
    before = set(Path("/dev/shm").glob(f"{PREFIX}-*"))
    with pytest.raises(TransferError, match="No space left"), staged_weights({"a": torch.ones(1)}, tmp_path):
        raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").glob(f"{PREFIX}-*")) == before


def test_remove_stale_takes_only_folders_of_dead_processes(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = tmp_path / f"{PREFIX}-{dead.stdout.strip()}-x"
    mine = tmp_path / f"{PREFIX}-{os.getpid()}-y"
    other = tmp_path / f"{PREFIX}-notes"
    for folder in (left, mine, other):
        folder.mkdir()
    assert remove_stale(tmp_path, memory=tmp_path / "none") == 1
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])
