"""Commits: what a manifest says, and its bytes.

A manifest is one JSON object `{"body": {...}, "sha256": hash of the body}` under `manifest/<20 digits>.json`. Creating
the next number is the commit; readers follow manifests only, so data objects without one do not exist for them. Each
body names its predecessor's hash: a manifest that was swapped or belongs to another store breaks the chain.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gyre_core.errors import StoreError
from gyre_core.types import Json

MANIFEST_VERSION = 1
BLOB_REF_PREFIX = "sha256:"
FIRST_PREVIOUS = ""  # what the first manifest names as its predecessor's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """One immutable Parquet object of a table.

    Example: ObjectRef(key="data/nodes/3f..e1.parquet", size_bytes=5120, sha256="3f..", num_rows=14)
    """

    key: str
    size_bytes: int
    sha256: str  # of the object's bytes
    num_rows: int
    schema_version: int = 1
    rollout_ids: tuple[
        str, ...
    ] = ()  # of a `rollouts` object: whose they are, so that one is found without reading data


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """One content-addressed blob: bytes that are no table, such as the archive of a workspace.

    Example: BlobRef(key="blobs/3f..e1", size_bytes=5120, sha256="3f..", kind="workspace").ref == "sha256:3f.."
    """

    key: str
    size_bytes: int
    sha256: str  # of the bytes
    kind: str  # the writer's word, for people and for counting

    @property
    def ref(self) -> str:
        """What `Store.put_blob` returned."""
        return f"{BLOB_REF_PREFIX}{self.sha256}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One committed manifest.

    Example: Commit(seq=3, kind="step", token="run-step-3", record={"step": 3}, tables={"nodes": (ref,)}, ...)
    """

    seq: int  # its number, from 0 without gaps
    kind: str  # step | evaluation | ... : the writer's word
    token: str  # names the work; a second commit with it returns the first
    record: Json  # the writer's own facts; plain JSON
    tables: Mapping[str, tuple[ObjectRef, ...]]
    created_s: float
    sha256: str  # of the body
    previous_sha256: str
    blobs: tuple[BlobRef, ...] = ()  # that the commit keeps
    repeated: bool = False  # True when commit() found this token's commit instead of making one

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The rollouts whose trajectories this commit holds, in stored order."""
        return tuple(rollout_id for ref in self.tables.get("rollouts", ()) for rollout_id in ref.rollout_ids)


def manifest_key(seq: int) -> str:
    """The key of manifest number `seq`."""
    return f"manifest/{seq:020d}.json"


def manifest_seq(key: str) -> int | None:
    """The number in a manifest's key, None for a key that is none."""
    name = key.removeprefix("manifest/").removesuffix(".json")
    return int(name) if len(name) == 20 and name.isdigit() and key == manifest_key(int(name)) else None


def encode_manifest(
    *,
    seq: int,
    kind: str,
    token: str,
    record: Json,
    tables: Mapping[str, tuple[ObjectRef, ...]],
    created_s: float,
    previous_sha256: str,
    blobs: tuple[BlobRef, ...] = (),
) -> tuple[bytes, Commit]:
    """A manifest's bytes and the commit they stand for. `record` must be plain JSON (see `plain_json`)."""
    body = {
        "version": MANIFEST_VERSION,
        "seq": seq,
        "kind": kind,
        "token": token,
        "created_s": created_s,
        "previous_sha256": previous_sha256,
        "record": record,
        "tables": {name: [ref_json(ref) for ref in refs] for name, refs in tables.items()},
    }
    if blobs:
        body["blobs"] = [asdict(blob) for blob in blobs]
    data = json.dumps({"sha256": _body_hash(body), "body": body}, sort_keys=True).encode()
    return data, decode_manifest(data, key=manifest_key(seq))


def decode_manifest(data: bytes, *, key: str) -> Commit:
    """The commit in a manifest's bytes; StoreError naming `key` when it is truncated, changed or no manifest."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{key} is truncated or no manifest ({len(data)} bytes): {error}") from error
    body = document.get("body") if isinstance(document, dict) else None
    if not isinstance(body, dict) or "version" not in body:
        raise StoreError(f"{key} is no manifest of a Gyre store")
    if body["version"] != MANIFEST_VERSION:
        raise StoreError(f"{key} has manifest version {body['version']!r}; this Gyre reads version {MANIFEST_VERSION}")
    sha256 = _body_hash(body)
    if document.get("sha256") != sha256:
        raise StoreError(f"{key} was changed after it was written: its checksum differs")
    try:
        tables = {name: tuple(ref_from_json(ref) for ref in refs) for name, refs in body["tables"].items()}
        commit = Commit(
            seq=body["seq"],
            kind=body["kind"],
            token=body["token"],
            record=body["record"],
            tables=tables,
            created_s=body["created_s"],
            sha256=sha256,
            previous_sha256=body["previous_sha256"],
            blobs=tuple(BlobRef(**blob) for blob in body.get("blobs", ())),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{key} lacks or misnames a field: {error!r}") from error
    if manifest_key(commit.seq) != key:
        raise StoreError(f"{key} holds manifest number {commit.seq}: it was copied from elsewhere")
    return commit


def plain_json(value: Any, where: str = "record") -> Any:
    """`value` as plain JSON: numpy scalars and arrays unpacked, tuples as lists, non-finite numbers as null.

    Raises ValueError naming the place of a value that JSON cannot hold.
    """
    if value is None or isinstance(value, bool | str | int):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings")
        return {str(key): plain_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain_json(value.tolist(), where)
    raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold; make it a number, string or list")


def ref_json(ref: ObjectRef) -> Json:
    """A reference as a manifest holds it."""
    entry: Json = {
        "key": ref.key,
        "size_bytes": ref.size_bytes,
        "sha256": ref.sha256,
        "num_rows": ref.num_rows,
        "schema_version": ref.schema_version,
    }
    return {**entry, "rollout_ids": list(ref.rollout_ids)} if ref.rollout_ids else entry


def ref_from_json(entry: Json) -> ObjectRef:
    """The inverse of `ref_json`; KeyError for a field that is missing."""
    return ObjectRef(
        key=entry["key"],
        size_bytes=entry["size_bytes"],
        sha256=entry["sha256"],
        num_rows=entry["num_rows"],
        schema_version=entry["schema_version"],
        rollout_ids=tuple(entry.get("rollout_ids", ())),
    )


def _body_hash(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
