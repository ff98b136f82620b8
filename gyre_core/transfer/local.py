"""Weights through files that the engine reads on the same machine.

Enters: host tensors under Hugging Face names. Leaves: a folder with one safetensors file, in memory (/dev/shm) when it
fits, and nothing when the context ends. Folders that a killed process left behind are removed by the next one.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from gyre_core.errors import TransferError

MEMORY_FOLDER = Path("/dev/shm")
PREFIX = "gyre-weights"
MEMORY_RESERVE = 2  # staged in memory only when this many times the size is free: the engine needs room too


def choose_folder(size_bytes: int, work_dir: Path, *, memory: Path = MEMORY_FOLDER) -> Path:
    """Where to stage: memory when it fits, else `work_dir`. Raises TransferError when neither has room."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free >= MEMORY_RESERVE * size_bytes and os.access(memory, os.W_OK):
            return memory
    work_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work_dir).free
    if free < size_bytes:
        raise TransferError(
            f"{size_bytes} bytes of weights fit neither {memory} nor {work_dir} ({free} bytes free): free disk space"
        )
    return work_dir


@contextlib.contextmanager
def staged_weights(weights: Mapping[str, torch.Tensor], work_dir: Path) -> Iterator[Path]:
    """A folder with `weights` as safetensors, for as long as the context lasts."""
    parent = choose_folder(sum(tensor.nbytes for tensor in weights.values()), work_dir)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-", dir=parent))
    try:
        try:
            save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise TransferError(f"weights could not be written to {folder}: {error}") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(work_dir: Path, *, memory: Path = MEMORY_FOLDER) -> int:
    """Remove staged folders whose process is gone; returns how many."""
    removed = 0
    for folder in [*memory.glob(f"{PREFIX}-*"), *work_dir.glob(f"{PREFIX}-*")]:
        pid = folder.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed
