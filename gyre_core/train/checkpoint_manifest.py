"""The manifest of a checkpoint folder: what it holds, for whom, and how to tell that all of it is there.

Enters: a folder of files, and what its writer knows of them. Leaves: gyre.json, written last, and the same read back
and checked. Invariants: a folder whose manifest checks out holds every byte that was written; a folder without one is
not used. No torch here: a process that trains nothing can say what a checkpoint is.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from gyre_core.errors import TrainError

MANIFEST = "gyre.json"
FORMAT = 1  # of the manifest and of what lies beside it; raised when an older Gyre could not read it
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """One checkpoint. Example: read_manifest(Path("runs/r/checkpoints/version-00003")).policy_version"""

    step: int  # optimizer steps of the trainer; skipped steps do not count
    policy_version: int  # what the engine serves after this state is published; -1 when the writer has none
    weights_digest: str  # of the whole weights, see MegatronTrainer.weights_digest
    model: Mapping[str, tuple[int, ...]]  # weights by name, whole shapes: the same however many ranks wrote them
    world_size: int  # ranks that wrote; any number may read
    tensor_parallel: int
    back_end: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # the caller's: run, step, groups that were consumed
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # path -> bytes, xxh3-128
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is on the disk. Example: pending.result().size_bytes"""

    path: Path
    size_bytes: int
    write_s: float  # from the copy to the durable name


def seal_folder(folder: Path, manifest: CheckpointManifest) -> CheckpointManifest:
    """Flush every file of the folder to the disk, then write the manifest with their sizes and checksums."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        files[path.relative_to(folder).as_posix()] = _measured(path, flush=True)
    sealed = CheckpointManifest(**{**_fields(manifest), "files": files})
    with (folder / MANIFEST).open("x") as opened:
        opened.write(json.dumps(asdict(sealed), indent=1, sort_keys=True))
        opened.flush()
        os.fsync(opened.fileno())
    flush_folder(folder)
    return sealed


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest, without looking at its files.

    Raises TrainError that says what the folder is: absent or unfinished, not Gyre's, or a newer Gyre's.
    """
    file = folder / MANIFEST
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        version = tree["format"]
    except FileNotFoundError:
        if (folder / "metadata.json").is_file():
            raise TrainError(
                f"checkpoint {folder} is not Gyre's: it has Megatron's metadata.json but no {MANIFEST} (nor had those "
                "of Gyre before manifests). Import its weights as a Hugging Face folder (model.path) instead"
            ) from None
        raise TrainError(f"{folder} is not a complete checkpoint (no {MANIFEST}); resume from an older one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"checkpoint {folder} is torn: {MANIFEST} cannot be read ({error})") from error
    if version != FORMAT:
        raise TrainError(
            f"checkpoint {folder} has format {version}, this Gyre reads {FORMAT}: resume with the Gyre that wrote it"
            + (" or a newer one" if isinstance(version, int) and version > FORMAT else "")
        )
    try:
        tree["files"] = {name: (int(size), str(digest)) for name, (size, digest) in tree["files"].items()}
        tree["model"] = {name: tuple(shape) for name, shape in tree["model"].items()}
        return CheckpointManifest(**tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainError(f"checkpoint {folder} is torn: {MANIFEST} lacks or garbles a field ({error})") from error


def check_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Read every file; TrainError names the first that is missing, short or changed."""
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise TrainError(f"checkpoint {folder} is torn: {name} is missing; resume from an older one")
        found = path.stat().st_size
        if found != size:
            raise TrainError(
                f"checkpoint {folder} is torn: {name} has {found:,} bytes of {size:,}; resume from an older one"
            )
        if _measured(path, flush=False)[1] != digest:
            raise TrainError(
                f"checkpoint {folder} is damaged: the checksum of {name} is not the manifest's; "
                "resume from an older one"
            )


def check_model(folder: Path, manifest: CheckpointManifest, model: Mapping[str, tuple[int, ...]]) -> None:
    """TrainError when the checkpoint's weights are not this model's, with the first difference."""
    theirs = manifest.model
    for name in sorted(theirs.keys() | model.keys()):
        if theirs.get(name) != model.get(name):
            raise TrainError(
                f"checkpoint {folder} is of another model: {name} is {_shape(theirs.get(name))} there and "
                f"{_shape(model.get(name))} here; resume with the model.path that the run was started with"
            )


def flush_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measured(path: Path, *, flush: bool) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
            size += len(block)
        if flush:
            os.fsync(opened.fileno())
    return size, digest.hexdigest()


def _fields(manifest: CheckpointManifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in CheckpointManifest.__slots__}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape))
