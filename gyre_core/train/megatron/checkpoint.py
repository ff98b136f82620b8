"""Megatron's distributed checkpoints ("torch_dist"), written without helper processes.

Enters: a sharded state dict and a folder. Leaves: a folder that is complete once its metadata.json exists, readable by
stock megatron-core with another tensor-parallel size.

Megatron's own writer forks a process for every file and starts a manager by re-importing `__main__`: both are unsafe
in a process with threads (the flow's task runner) and need `if __name__ == "__main__"` in every script. The writer
here produces the same format with torch's own synchronous one, fsync included.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from gyre_core.errors import TrainError

_METADATA = "metadata.json"  # Megatron writes it last


class _SynchronousSave(SaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(state: dict[str, Any], folder: Path) -> None:
    """Write a new checkpoint folder. Nothing stands at `folder` unless it is complete: it is renamed into place.

    Raises TrainError when `folder` exists or the disk refuses; what was there before is untouched.
    """
    if folder.exists():
        raise TrainError(f"checkpoint {folder} exists already; checkpoints are never overwritten")
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that died while writing
        partial.mkdir(parents=True)
        dist_checkpointing.save(state, str(partial), sharded_strategy=_SynchronousSave())
        os.replace(partial, folder)
        _fsync_folder(folder.parent)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(f"checkpoint {folder} could not be written: {error}") from error


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read a checkpoint into the shape of `state`; TrainError when it is missing, incomplete or of another model."""
    if not (folder / _METADATA).is_file():
        raise TrainError(f"{folder} is not a complete checkpoint (no {_METADATA}); resume from an older one")
    try:
        loaded: Any = dist_checkpointing.load(state, str(folder))
        return loaded
    except (Exception, CheckpointException) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainError(f"checkpoint {folder} could not be read: {reason[-1]}") from error


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
