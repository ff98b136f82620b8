"""The store of a run: commits of immutable tables, one writer's or many writers', and what readers see of them.

Enters: tables (schema.py) and a record in plain JSON, under a token that names the work. Leaves: commits in number
order, tables, trajectories, step records.

Invariants:
- a commit is whole or not there: data objects are written first, the manifest last, and readers follow manifests only;
- one token, one commit: a repeated commit (a lost reply, a step done again after a crash) returns the first one;
- one number, one winner: writers that meet on a number are ordered, and `expected_head` turns a meeting into an error;
- data objects are named by their content, so writing the same bytes again changes nothing;
- no commit refers to an object that garbage collection may delete: a collection is a commit itself (maintenance.py), so
  it comes before or after every other one. Before: it saw no use of the object. After: the writer sees the collection.
"""

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store import tables as rows
from gyre_core.store.ledger import COMPACTION, GC, Ledger
from gyre_core.store.local import LocalStorage
from gyre_core.store.manifest import (
    BLOB_REF_PREFIX,
    BlobRef,
    Commit,
    ObjectRef,
    decode_manifest,
    encode_manifest,
    manifest_key,
    manifest_seq,
    plain_json,
)
from gyre_core.store.objects import ObjectReader
from gyre_core.store.parquet import split_table, to_parquet
from gyre_core.store.records import StepRecord, step_records, steps_table
from gyre_core.store.schema import VERSIONS, schema_of
from gyre_core.store.storage import Data, ObjectMissingError, Storage, check_exclusive, list_keys, open_storage
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import TrainingBranch

STEP = "step"  # the kind of commit_step's commits
_MARKER_KEY = "gyre-store.json"
_MARKER = b'{"format": "gyre-store", "version": 1}\n'
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_TOKEN = re.compile(r"[!-~]{1,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_THREADS = 4  # objects of a commit that are written or read at a time
_UNNAMED_KIND = "blob"  # of a blob that another process put and this one commits


class Store:
    """Commits and reads. Safe to share between threads; each process opens its own.

    Example:
        store = Store.open("runs/r1/store", min_free_bytes=256 * 2**20)
        record = StepRecord(step=0, version_before=0, version_after=1)
        commit = store.commit_step(record, rollouts=done, branches=trained, token="r1-step-0")
        store.read_trajectory("s0000-p07-02").tree.leaves()
    """

    def __init__(self, storage: Storage, *, clock: Clock | None = None) -> None:
        """Wrap a backend without touching it; `open` is the way in for users."""
        self.storage = storage
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._reader = ObjectReader(storage, self._ledger, self.refresh)
        self._loose_blobs: dict[str, BlobRef] = {}  # put by this process, in no commit that it knows of

    @classmethod
    def open(cls, url: str, *, min_free_bytes: int = 0, read_only: bool = False, clock: Clock | None = None) -> "Store":
        """Open a folder or `s3://bucket/prefix`, made when it is not there yet (unless `read_only`).

        Raises StoreError when the place cannot be written exclusively, has less than `min_free_bytes` free, holds no
        store or a newer one, or lacks a manifest in between.
        """
        storage = open_storage(url, min_free_bytes=min_free_bytes)
        store = cls(storage, clock=clock)
        if not read_only:
            if isinstance(storage, LocalStorage):
                storage.check_space()
                storage.remove_leftovers()
            check_exclusive(storage)
            with contextlib.suppress(StoreConflictError):  # an older store: its marker is checked below
                storage.put_new(_MARKER_KEY, _MARKER)
        store._check_marker()
        store._check_numbers()
        return store

    @property
    def ledger(self) -> Ledger:
        """What the commits taken in so far say; for maintenance and verification."""
        return self._ledger

    def now_s(self) -> float:
        """The store's clock, which also stamps commits."""
        return self._clock.now_s()

    @property
    def head(self) -> int:
        """The newest commit's number, -1 when there is none."""
        with self._lock:
            self._refresh()
            return len(self._ledger.commits) - 1

    def commit(
        self,
        kind: str,
        tables: Mapping[str, pa.Table] | Mapping[str, pa.Table | Sequence[ObjectRef]],
        record: Mapping[str, Any],
        token: str,
        *,
        blobs: Iterable[str] = (),
        expected_head: int | None = None,
    ) -> Commit:
        """Publish tables and a record together, or return the commit that `token` made before (`repeated` is True).

        A table is a pyarrow Table or what `put_table` returned; `blobs` are what `put_blob` returned. With
        `expected_head`, StoreConflictError when another writer has committed since. StoreError when the store cannot
        be written: nothing is published then. ValueError for a table outside its schema, or a record that JSON cannot
        hold; non-finite numbers in it become null.
        """
        if not _KIND.fullmatch(kind) or kind in (COMPACTION, GC):
            raise ValueError(f"commit kind {kind!r}: use lower-case letters, digits, '_' and '-', 32 at most; not gc")
        return self._publish(kind, tables, record, token, blobs=blobs, expected_head=expected_head)

    def commit_maintenance(self, kind: str, record: Mapping[str, Any], token: str, *, expected_head: int) -> Commit:
        """Publish what maintenance.py decided from the commits up to `expected_head`; StoreConflictError on others."""
        return self._publish(kind, {}, record, token, blobs=(), expected_head=expected_head)

    def _publish(
        self,
        kind: str,
        tables: Mapping[str, pa.Table] | Mapping[str, pa.Table | Sequence[ObjectRef]],
        record: Mapping[str, Any],
        token: str,
        *,
        blobs: Iterable[str],
        expected_head: int | None,
    ) -> Commit:
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"commit token {token!r}: use 1 to 200 visible ASCII characters")
        plain = plain_json(record)
        blobs = tuple(dict.fromkeys(blobs))
        with self._lock:
            self._refresh()
            refs = None
            while True:
                if token in self._ledger.by_token:
                    return self._repeated(kind, token)
                if refs is None or not self._ledger.given_up.isdisjoint(_keys(refs)):
                    refs = self._put_tables(tables)
                seq = len(self._ledger.commits)
                if expected_head is not None and seq - 1 != expected_head:
                    raise StoreConflictError(
                        f"{self.storage.url}: commit {token} expected number {expected_head} to be the newest, it is "
                        f"{seq - 1}: another writer is active. Stop one of them, read the head again and retry"
                    )
                data, commit = encode_manifest(
                    seq=seq,
                    kind=kind,
                    token=token,
                    record=plain,
                    tables=refs,
                    created_s=self._clock.now_s(),
                    previous_sha256=self._ledger.previous_sha256,
                    blobs=tuple(self._find_blob(ref) for ref in blobs),
                )
                try:
                    self.storage.put_new(manifest_key(seq), data)
                except StoreConflictError:
                    self._refresh()
                    if len(self._ledger.commits) == seq:
                        raise StoreError(f"{manifest_key(seq)} exists but cannot be read yet; try again") from None
                    continue
                self._ledger.take(commit)
                return commit

    def commit_step(
        self,
        record: StepRecord,
        *,
        rollouts: Iterable[rows.FinishedRollout] = (),
        branches: Iterable[TrainingBranch] = (),
        token: str,
        blobs: Iterable[str] = (),
        expected_head: int | None = None,
    ) -> Commit:
        """Publish one optimizer step; see `commit`.

        `rollouts` (dropped ones too) and `branches` are those that earlier commits of the step do not hold yet.
        """
        rollouts = list(rollouts)
        tables = {**_tables(rollouts, branches), "steps": steps_table([record])}
        blobs = [*blobs, *_workspaces(rollouts)]
        return self.commit(STEP, tables, record.summary(), token, blobs=blobs, expected_head=expected_head)

    def commit_rollouts(
        self,
        kind: str,
        rollouts: Iterable[rows.FinishedRollout],
        branches: Iterable[TrainingBranch],
        record: Mapping[str, Any],
        token: str,
        *,
        blobs: Iterable[str] = (),
        expected_head: int | None = None,
    ) -> Commit:
        """Publish finished rollouts (a complete group) with the branches selected from them; see `commit`.

        Their kept workspaces (`workspace_ref`) are among the commit's blobs.
        """
        rollouts = list(rollouts)
        tables = _tables(rollouts, branches)
        blobs = [*blobs, *_workspaces(rollouts)]
        return self.commit(kind, tables, record, token, blobs=blobs, expected_head=expected_head)

    def put_table(self, name: str, table: pa.Table) -> ObjectRef:
        """Write a table's object ahead of its commit (a long rollout as soon as it ends); invisible until committed."""
        rollout_ids = tuple(table.column("rollout_id").to_pylist()) if name == "rollouts" else ()
        return self.put_parquet(name, to_parquet(name, table), num_rows=table.num_rows, rollout_ids=rollout_ids)

    def put_parquet(self, name: str, data: Data, *, num_rows: int, rollout_ids: tuple[str, ...] = ()) -> ObjectRef:
        """Write an object that is serialised already (parquet.py); see `put_table`."""
        sha256 = hashlib.sha256(data).hexdigest()
        key = self._ledger.free_key(f"data/{name}/{sha256}", ".parquet")
        self._put_content(key, data)
        return ObjectRef(
            key=key,
            size_bytes=len(data),
            sha256=sha256,
            num_rows=num_rows,
            schema_version=VERSIONS[name],
            rollout_ids=rollout_ids,
        )

    def put_blob(self, data: bytes, *, kind: str) -> str:
        """Keep bytes under their own checksum and return it (`sha256:...`); the same bytes are written once.

        A commit that names the reference (`blobs`) keeps the blob; one that no commit names is removed by garbage
        collection after its grace period.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"blob kind {kind!r}: use lower-case letters, digits, '_' and '-', 32 at most")
        sha256 = hashlib.sha256(data).hexdigest()
        ref = f"{BLOB_REF_PREFIX}{sha256}"
        with self._lock:
            blob = BlobRef(key=self._ledger.free_key(f"blobs/{sha256}"), size_bytes=len(data), sha256=sha256, kind=kind)
            known = ref in self._ledger.blobs or self._loose_blobs.get(ref) == blob
        if not known:
            self._put_content(blob.key, data)
            with self._lock:
                self._loose_blobs[ref] = blob
        return ref

    def get_blob(self, ref: str) -> bytes:
        """A blob's bytes, its checksum verified; StoreError naming the object that is missing or damaged."""
        with self._lock:
            blob = self._find_blob(ref)
        data = self.storage.get(blob.key)
        if hashlib.sha256(data).hexdigest() != blob.sha256:
            raise StoreError(f"{blob.key} is damaged: its {len(data)} bytes do not match its name")
        return data

    def commits(self, kind: str | None = None) -> list[Commit]:
        """All commits (of one kind) in number order, others' included up to now."""
        with self._lock:
            self._refresh()
            return [commit for commit in self._ledger.commits if kind is None or commit.kind == kind]

    def latest(self, kind: str) -> Commit | None:
        """The newest commit of a kind, None when there is none."""
        return next(reversed(self.commits(kind)), None)

    def find(self, rollout_id: str) -> Commit:
        """The newest commit that holds a rollout; StoreError when none does."""
        with self._lock:
            if rollout_id not in self._ledger.by_rollout:
                self._refresh()
            if rollout_id not in self._ledger.by_rollout:
                raise StoreError(f"{self.storage.url} holds no rollout {rollout_id!r}")
            return self._ledger.by_rollout[rollout_id]

    def files(self, name: str) -> list[str]:
        """Where the objects lie that hold a table's committed rows now: paths, or s3:// places, for other programs."""
        schema_of(name, VERSIONS.get(name, 0))
        self.refresh()
        return [f"{self.storage.url}/{ref.key}" for of, ref in self._ledger.live_objects().values() if of == name]

    def read_table(self, commit: Commit, name: str) -> pa.Table:
        """A commit's table, checksums verified; StoreError naming the object that is missing, damaged or foreign."""
        refs = self._refs(commit, name)
        if len(refs) == 1:
            return self._reader.table(name, refs[0])
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
            return pa.concat_tables(pool.map(lambda ref: self._reader.table(name, ref), refs))

    def read_row_groups(self, name: str, ref: ObjectRef) -> list[pa.Table]:
        """A live object's row groups (`ledger.live_objects`), each as a table; its checksum is verified."""
        return self._reader.row_groups(name, ref)

    def read_object(self, name: str, ref: ObjectRef) -> pa.Table:
        """One committed object's rows, wherever they lie now; see `read_table`."""
        return self._reader.table(name, ref)

    def check_object(self, ref: ObjectRef) -> None:
        """StoreError unless an object's bytes are those that its manifest names."""
        self._reader.checked_bytes(ref)

    def read_trajectory(self, rollout_id: str) -> Trajectory:
        """One rollout's trajectory, reading only its own row groups."""
        return self.read_rollout(rollout_id).trajectory

    def read_rollout(self, rollout_id: str) -> rows.StoredRollout:
        """One rollout with its grade and harness result, reading only its own row groups."""
        commit = self.find(rollout_id)
        parts = [self._read_rows(commit, name, rollout_id) for name in ("rollouts", "nodes", "calls", "grades")]
        return _rebuilt(lambda: rows.read_rollouts(*parts), commit)[0]

    def read_trajectories(self, commit: Commit) -> list[Trajectory]:
        """A commit's trajectories in stored order."""
        parts = [self.read_table(commit, name) for name in ("rollouts", "nodes", "calls")]
        return _rebuilt(lambda: rows.read_trajectories(*parts), commit)

    def read_rollouts(self, commit: Commit) -> list[rows.StoredRollout]:
        """A commit's rollouts in stored order."""
        parts = [self.read_table(commit, name) for name in ("rollouts", "nodes", "calls", "grades")]
        return _rebuilt(lambda: rows.read_rollouts(*parts), commit)

    def read_branches(self, commit: Commit) -> list[TrainingBranch]:
        """The branches a step trained, exactly as they were given, in stored order."""
        table = self.read_table(commit, "selections")
        trajectories = self.read_trajectories(commit)
        return _rebuilt(lambda: rows.read_branches(table, trajectories), commit)

    def read_steps(self) -> list[StepRecord]:
        """Every committed step's full record, in commit order."""
        return [self.read_step(commit) for commit in self.commits(STEP)]

    def read_step(self, commit: Commit) -> StepRecord:
        """The full record of a step's commit."""
        records = step_records(self.read_table(commit, "steps"))
        if len(records) != 1:
            raise StoreError(f"commit {commit.seq} should hold one step record, it holds {len(records)}")
        return records[0]

    def _put_content(self, key: str, data: Data) -> None:
        """Create an object named by its content; one that is there already must hold the same bytes."""
        try:
            self.storage.put_new(key, data)
        except StoreConflictError:
            if self.storage.get(key) != data:
                raise StoreError(
                    f"{key} in {self.storage.url} is damaged: its content does not match its name; remove it and retry"
                ) from None

    def _find_blob(self, ref: str) -> BlobRef:
        """Where a blob lies: as a commit says, as this process put it, or as another process did."""
        sha256 = ref.removeprefix(BLOB_REF_PREFIX)
        if not _SHA256.fullmatch(sha256) or not ref.startswith(BLOB_REF_PREFIX):
            raise ValueError(f"{ref!r} is no blob reference ('sha256:' and 64 hexadecimal digits)")
        if ref not in self._ledger.blobs and ref not in self._loose_blobs:
            self._refresh()
        found = self._ledger.blobs.get(ref) or self._loose_blobs.get(ref)
        if found is None:
            key = self._ledger.free_key(f"blobs/{sha256}")
            size_bytes = self.storage.size(key)
            if size_bytes is None:
                raise ObjectMissingError(f"{key} is missing in {self.storage.url}: put the blob before it is used")
            found = BlobRef(key=key, size_bytes=size_bytes, sha256=sha256, kind=_UNNAMED_KIND)
        if found.key in self._ledger.given_up:
            raise StoreConflictError(_given_up(found.key))
        return found

    def _put_tables(
        self, tables: Mapping[str, pa.Table] | Mapping[str, pa.Table | Sequence[ObjectRef]]
    ) -> dict[str, tuple[ObjectRef, ...]]:
        """Objects of a commit that no garbage collection known so far has given up."""
        shards = [
            (name, shard)
            for name, value in tables.items()
            if isinstance(value, pa.Table)
            for shard in split_table(name, value)
        ]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
            put = list(pool.map(lambda item: self.put_table(*item), shards))
        refs: dict[str, tuple[ObjectRef, ...]] = {}
        for name, value in tables.items():
            own = [ref for (of, _), ref in zip(shards, put, strict=True) if of == name]
            refs[name] = tuple(own if isinstance(value, pa.Table) else value)
        for key in _keys(refs):
            if key in self._ledger.given_up:
                raise StoreConflictError(_given_up(key))
        return refs

    def _refs(self, commit: Commit, name: str) -> tuple[ObjectRef, ...]:
        refs = commit.tables.get(name, ())
        if not refs:
            raise StoreError(f"commit {commit.seq} ({commit.kind}) of {self.storage.url} has no table {name!r}")
        return refs

    def _read_rows(self, commit: Commit, name: str, rollout_id: str) -> pa.Table:
        refs = [ref for ref in self._refs(commit, name) if not ref.rollout_ids or rollout_id in ref.rollout_ids]
        return pa.concat_tables([self._reader.rows(name, ref, rollout_id) for ref in refs]).combine_chunks()

    def _repeated(self, kind: str, token: str) -> Commit:
        commit = self._ledger.by_token[token]
        if commit.kind != kind:
            raise StoreError(f"token {token!r} made commit {commit.seq} of kind {commit.kind}; it cannot make a {kind}")
        return replace(commit, repeated=True)

    def refresh(self) -> None:
        """Take in what others have committed since the last look; reads and commits do so where they need it."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        """Take in the manifests that were written since the last look."""
        while True:
            key = manifest_key(len(self._ledger.commits))
            try:
                commit = decode_manifest(self.storage.get(key), key=key)
            except ObjectMissingError:
                return
            if commit.previous_sha256 != self._ledger.previous_sha256:
                raise StoreError(
                    f"{key} in {self.storage.url} does not follow the manifest before it: one was replaced"
                )
            self._ledger.take(commit)

    def _check_marker(self) -> None:
        try:
            found = self.storage.get(_MARKER_KEY)
        except ObjectMissingError:
            raise StoreError(f"{self.storage.url} is no Gyre store: it has no {_MARKER_KEY}") from None
        if found != _MARKER:
            raise StoreError(f"{self.storage.url}: {_MARKER_KEY} names another format or version: {found[:80]!r}")

    def _check_numbers(self) -> None:
        """A manifest lost in between must not be taken for the end, or the next commit would fill its place."""
        with self._lock:
            self._refresh()
            numbers = [manifest_seq(key) for key in list_keys(self.storage, "manifest")]
            beyond = [number for number in numbers if number is not None and number > len(self._ledger.commits)]
            missing = manifest_key(len(self._ledger.commits))
            if beyond and self.storage.size(missing) is None:
                raise StoreError(
                    f"{self.storage.url} lacks {missing} but has number {min(beyond)}: "
                    "restore it from a backup; nothing was changed"
                )


def _keys(refs: Mapping[str, tuple[ObjectRef, ...]]) -> set[str]:
    return {ref.key for group in refs.values() for ref in group}


def _given_up(key: str) -> str:
    return f"{key} was put so long before its commit that garbage collection gave it up; put it again and commit then"


def _workspaces(rollouts: Sequence[rows.FinishedRollout]) -> list[str]:
    return [rollout.workspace_ref for rollout in rollouts if rollout.workspace_ref]


def _tables(rollouts: Sequence[rows.FinishedRollout], branches: Iterable[TrainingBranch]) -> dict[str, pa.Table]:
    selections = rows.selections_table(branches, [rollout.trajectory for rollout in rollouts])
    return {**rows.rollout_tables(rollouts), "selections": selections} if rollouts else {}


def _rebuilt(build: Any, commit: Commit) -> Any:
    """Run a conversion; values that this Gyre does not know (an unknown role or outcome) are the store's error."""
    try:
        return build()
    except (ValueError, KeyError) as error:
        raise StoreError(f"commit {commit.seq} holds something this Gyre cannot read: {error}") from error
