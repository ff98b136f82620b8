"""Keeping a store small: garbage collection of what no commit needs, compaction of many small objects into few.

Enters: a store, ages and sizes. Leaves: reports; with `apply`, commits that say what was done.

Neither ever races a writer, because each publishes a commit before it changes anything, and commits have one order:
- `collect` lists the store, reads the commits up to number h, and publishes as number h + 1 the keys that none of them
  needs. A writer that committed before is among the commits it read. A writer that commits later has read number h + 1
  first: it refers to none of those keys, but writes its bytes anew under another name (store.py). Only then are the
  objects deleted; a collection that was killed in between is finished by the next one. The grace period is for
  courtesy, not for correctness: it spares writers that put a table long before its commit.
- `compact` writes joined objects and publishes where each old object's rows lie in them. Nothing is deleted: readers
  with an older view go on reading the old objects until a collection, and look again when one is gone.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_core.errors import StoreConflictError
from gyre_core.store.ledger import COMPACTION, GC
from gyre_core.store.manifest import ObjectRef, ref_json
from gyre_core.store.parquet import join_parquet
from gyre_core.store.storage import StoredObject
from gyre_core.store.store import Store

DEFAULT_GRACE_S = 24 * 3600.0  # longer than any rollout waits between its objects and its commit
DEFAULT_TARGET_BYTES = 64 * 2**20  # large enough to read fast, small enough to join in memory
_COLLECTED_FOLDERS = ("data", "blobs", "probe")
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection found, and with `applied` deleted.

    Example: collect(store, apply=True).size_bytes
    """

    keys: tuple[str, ...]  # not needed and older than the grace period
    size_bytes: int  # of them
    num_young: int  # not needed, but younger than the grace period
    applied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    """What a compaction joined.

    Example: compact(store).num_before
    """

    num_before: int  # objects that were, or would be, joined
    num_after: int  # objects they became
    size_bytes: int  # of the objects joined
    applied: bool


def collect(store: Store, *, grace_s: float = DEFAULT_GRACE_S, apply: bool = False) -> CollectReport:
    """Find (and with `apply` delete) the objects that no commit needs and that are older than `grace_s`.

    StoreConflictError when other writers commit faster than the collection can look.
    """
    for _ in range(_ATTEMPTS):
        found = [item for folder in _COLLECTED_FOLDERS for item in store.storage.list_objects(folder)]
        head = store.head
        report, fresh = _collectable(store, found, grace_s)
        if not apply:
            return report
        try:
            if fresh:
                store.commit_maintenance(GC, {"keys": fresh}, f"gc-{uuid.uuid4().hex}", expected_head=head)
        except StoreConflictError:
            continue
        for key in report.keys:
            store.storage.delete(key)
        return CollectReport(keys=report.keys, size_bytes=report.size_bytes, num_young=report.num_young, applied=True)
    raise StoreConflictError(f"{store.storage.url}: writers commit too fast to collect now; nothing was deleted")


def compact(store: Store, *, target_bytes: int = DEFAULT_TARGET_BYTES, apply: bool = False) -> CompactReport:
    """Join neighbouring objects of each table into ones of about `target_bytes`; the old ones stay until a collection.

    Objects of half that size and more are left alone, so that a repeated compaction does not rewrite everything.
    """
    for _ in range(_ATTEMPTS):
        head = store.head
        batches = list(_batches(store, target_bytes))
        if not apply or not batches:
            break
        record = _joined(store, batches)
        if _published(store, record, head):
            break
    else:
        raise StoreConflictError(f"{store.storage.url}: other maintenance is going on; nothing was changed")
    return CompactReport(
        num_before=sum(len(refs) for _, refs in batches),
        num_after=len(batches),
        size_bytes=sum(ref.size_bytes for _, refs in batches for ref in refs),
        applied=apply,
    )


def _collectable(store: Store, found: list[StoredObject], grace_s: float) -> tuple[CollectReport, list[str]]:
    """The report, and those of its keys that no collection has given up yet."""
    ledger = store.ledger
    live = ledger.live_keys()
    now_s = store.now_s()
    keys, fresh, size_bytes, num_young = [], [], 0, 0
    for item in found:
        if item.key in live:
            continue
        age_s = now_s - max(item.modified_s, ledger.moved_s.get(item.key, 0.0))
        if age_s < grace_s and item.key not in ledger.given_up:
            num_young += 1
            continue
        keys.append(item.key)
        size_bytes += item.size_bytes
        if item.key not in ledger.given_up and not item.key.startswith("probe/"):
            fresh.append(item.key)
    return CollectReport(keys=tuple(keys), size_bytes=size_bytes, num_young=num_young, applied=False), fresh


def _batches(store: Store, target_bytes: int) -> Iterator[tuple[str, list[ObjectRef]]]:
    """Neighbouring small objects of a table, two or more."""
    by_table: dict[str, list[ObjectRef]] = {}
    for name, ref in store.ledger.live_objects().values():
        if ref.size_bytes * 2 < target_bytes:
            by_table.setdefault(name, []).append(ref)
    for name, refs in by_table.items():
        batch: list[ObjectRef] = []
        for ref in refs:
            if batch and sum(one.size_bytes for one in batch) + ref.size_bytes > target_bytes:
                if len(batch) > 1:
                    yield name, batch
                batch = []
            batch.append(ref)
        if len(batch) > 1:
            yield name, batch


def _joined(store: Store, batches: list[tuple[str, list[ObjectRef]]]) -> dict:
    objects, moved = [], {}
    for name, refs in batches:
        groups = [store.read_row_groups(name, ref) for ref in refs]
        data = join_parquet(name, [group for of_one in groups for group in of_one])
        into = store.put_parquet(name, data, num_rows=sum(ref.num_rows for ref in refs))
        objects.append(ref_json(into))
        first = 0
        for ref, of_one in zip(refs, groups, strict=True):  # row groups stay as they are: places are counted in them
            moved[ref.key] = [into.key, first, first + len(of_one)]
            first += len(of_one)
    return {"objects": objects, "moved": moved}


def _published(store: Store, record: dict, head: int) -> bool:
    """Publish after any number of writers' commits; False when other maintenance came between."""
    token = f"compaction-{uuid.uuid4().hex}"
    while True:
        try:
            store.commit_maintenance(COMPACTION, record, token, expected_head=head)
            return True
        except StoreConflictError:
            newest = store.head
            if any(commit.kind in (COMPACTION, GC) for commit in store.commits()[head + 1 : newest + 1]):
                return False
            head = newest
