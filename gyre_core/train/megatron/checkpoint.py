"""Megatron's distributed checkpoints ("torch_dist") with a manifest beside them, written without helper processes.

Enters: a sharded state dict, a manifest and a folder. Leaves: a folder that stands at its name only when it is complete
and durable, readable by stock megatron-core with another tensor-parallel size.

Megatron's own writer forks a process for every file and starts a manager by re-importing `__main__`: both are unsafe
in a process with threads (the flow's task runner) and need `if __name__ == "__main__"` in every script. The writer
here produces the same format with torch's own synchronous one; where one rank writes alone it runs in a thread, on a
copy of the state, while the trainer goes on (`begin_save`).
"""

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
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
from gyre_core.train.checkpoint_manifest import (
    CheckpointManifest,
    SavedCheckpoint,
    check_files,
    check_model,
    flush_folder,
    read_manifest,
    seal_folder,
)


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


class PendingSave:
    """A checkpoint that is being written. Example: begin_save(state, folder, manifest).result()"""

    def __init__(self, folder: Path, future: "Future[SavedCheckpoint]") -> None:
        self.folder = folder
        self._future = future

    def result(self) -> SavedCheckpoint:
        """Wait until it is durable; raises TrainError when it could not be written, and then nothing is there."""
        return self._future.result()


def begin_save(state: dict[str, Any], folder: Path, manifest: CheckpointManifest) -> PendingSave:
    """Start writing a new checkpoint folder and return when the state may change again.

    One rank alone copies the state in memory and writes the copy in a thread. Several ranks write together, and here:
    their collectives must not meet those of training.

    Raises TrainError when `folder` exists; what was there before is untouched.
    """
    if folder.exists():
        raise TrainError(f"checkpoint {folder} exists already; checkpoints are never overwritten")
    if dist.get_world_size() > 1:
        future: Future[SavedCheckpoint] = Future()
        future.set_result(_write(state, folder, manifest))
        return PendingSave(folder, future)
    copied = _copied(state)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = thread.submit(_write, copied, folder, manifest)
    thread.shutdown(wait=False)
    return PendingSave(folder, future)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read a checkpoint into the shape of `state`, after its manifest and its files were checked.

    Raises TrainError when it is missing, unfinished, torn, damaged, not Gyre's, a newer Gyre's or of another model.
    """
    manifest = read_manifest(folder)
    check_model(folder, manifest, model_layout(state["model"]))
    _on_first_rank(lambda: check_files(folder, manifest))
    try:
        loaded: Any = dist_checkpointing.load(state, str(folder))
        return loaded
    except (Exception, CheckpointException) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainError(f"checkpoint {folder} could not be read: {reason[-1]}") from error


def model_layout(model_state: Any) -> dict[str, tuple[int, ...]]:
    """Whole shapes of a model's weights by their names in checkpoints; the same on every rank of any split."""
    return {tensor.key: tuple(tensor.global_shape) for tensor in _sharded_tensors(model_state)}


def _write(state: dict[str, Any], folder: Path, manifest: CheckpointManifest) -> SavedCheckpoint:
    """Nothing stands at `folder` unless it is complete: it is renamed into place."""
    started = time.monotonic()
    partial = folder.with_name(folder.name + ".partial")
    size = 0

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that died while writing
        partial.mkdir(parents=True)

    def finish() -> None:
        nonlocal size
        size = seal_folder(partial, manifest).size_bytes
        os.replace(partial, folder)
        flush_folder(folder.parent)

    try:
        _on_first_rank(prepare)
        dist_checkpointing.save(state, str(partial), sharded_strategy=_SynchronousSave())
        _on_first_rank(finish)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainError(f"checkpoint {folder} could not be written: {error}") from error
    return SavedCheckpoint(path=folder, size_bytes=size, write_s=time.monotonic() - started)


def _on_first_rank(work: Callable[[], None]) -> None:
    """Do it on rank 0 while the others wait; what it raises is raised on all."""
    if dist.get_world_size() == 1:
        work()
        return
    failed: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as raised:
            error, failed = raised, [str(raised)]
    dist.broadcast_object_list(failed, src=0)
    if error is not None:
        raise error
    if failed[0] is not None:
        raise TrainError(f"rank 0: {failed[0]}")


def _copied(value: Any) -> Any:
    """A state dict whose tensors are the caller's no longer."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
        return _with_data(value, value.data.detach().clone())
    return value


def _with_data(shard: Any, data: torch.Tensor) -> Any:
    """The same shard of another tensor."""
    other = copy.copy(shard)
    other.data = data
    return other


def _sharded_tensors(value: Any) -> Iterator[ShardedTensor]:
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, ShardedTensorFactory):
        yield from _sharded_tensors(value.build())
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sharded_tensors(item)
