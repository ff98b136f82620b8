"""Walk a whole store: every manifest, every object's size and checksum, every trajectory's invariants, every link.

Leaves a report; broken things are data in it, each with its key, so that one broken object does not hide the others.

What is checked: manifests form one chain without gaps (else a StoreError: nothing behind the gap can be trusted); each
object that holds committed rows is there, whole and of a known version; compacted objects hold the rows they stand
for; rollouts have valid trees, calls that point into them and one grade each; selections are paths of their trees;
blobs match their checksums and are named by the commits whose rollouts refer to them; and nothing is there twice: no
token, no step, no rollout of one kind of commit.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_core.errors import StoreError
from gyre_core.store.manifest import BlobRef, Commit, manifest_seq
from gyre_core.store.storage import list_keys
from gyre_core.store.store import STEP, Store
from gyre_core.store.tables import StoredRollout

_OURS = re.compile(r"data/[a-z]+/[0-9a-f]{64}(-\d+)?\.parquet|blobs/[0-9a-f]{64}(-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a walk found.

    Example: verify(Store.open("runs/r1/store", read_only=True)).problems
    """

    num_commits: int
    num_objects: int  # that hold the committed rows now, each counted once
    num_blobs: int
    num_rollouts: int
    size_bytes: int  # of those objects and blobs
    problems: tuple[str, ...]  # one sentence each, naming the key or the commit
    unreferenced: tuple[str, ...]  # objects that no commit needs: left by killed writers or compaction; harmless
    foreign: tuple[str, ...]  # keys in the store's folders that no Gyre wrote; harmless

    @property
    def ok(self) -> bool:
        """Whether everything that was committed can be read, and is there once."""
        return not self.problems


def verify(store: Store) -> VerifyReport:
    """Read everything once; StoreError only when the manifests themselves cannot be followed."""
    commits = store.commits()
    live = store.ledger.live_objects()
    blobs = {blob.key: blob for blob in store.ledger.blobs.values()}
    problems = [*_doubles(commits), *_compacted(store), *_blobs(store, blobs)]
    num_rollouts = 0
    for commit in commits:
        found, count = _commit(store, commit)
        problems += found
        num_rollouts += count
    present = [key for folder in ("data", "blobs") for key in list_keys(store.storage, folder)]
    manifests = [key for key in list_keys(store.storage, "manifest") if manifest_seq(key) is None]
    return VerifyReport(
        num_commits=len(commits),
        num_objects=len(live),
        num_blobs=len(blobs),
        num_rollouts=num_rollouts,
        size_bytes=sum(ref.size_bytes for _, ref in live.values()) + sum(blob.size_bytes for blob in blobs.values()),
        problems=tuple(problems),
        unreferenced=tuple(key for key in present if key not in live and key not in blobs and _OURS.fullmatch(key)),
        foreign=(*(key for key in present if not _OURS.fullmatch(key)), *manifests),
    )


def _doubles(commits: list[Commit]) -> Iterator[str]:
    tokens = Counter(commit.token for commit in commits)
    yield from (f"token {token!r} made {count} commits" for token, count in tokens.items() if count > 1)
    steps = Counter(commit.record.get("step") for commit in commits if commit.kind == STEP)
    yield from (f"step {step} was committed {count} times" for step, count in steps.items() if count > 1)
    rollouts = Counter((commit.kind, rollout_id) for commit in commits for rollout_id in commit.rollout_ids)
    for (kind, rollout_id), count in rollouts.items():
        if count > 1:
            yield f"rollout {rollout_id} is in {count} commits of kind {kind}"


def _compacted(store: Store) -> Iterator[str]:
    """Joined objects are read by parts elsewhere; here each is checked as a whole."""
    for ref in {place.ref.key: place.ref for place in store.ledger.places.values()}.values():
        try:
            store.check_object(ref)
        except StoreError as error:
            yield f"compacted object: {error}"


def _blobs(store: Store, blobs: dict[str, BlobRef]) -> Iterator[str]:
    for blob in blobs.values():
        try:
            size_bytes = len(store.get_blob(blob.ref))
        except StoreError as error:
            yield f"blob of kind {blob.kind}: {error}"
            continue
        if size_bytes != blob.size_bytes:
            yield f"{blob.key} has {size_bytes} bytes, its manifest says {blob.size_bytes}"


def _commit(store: Store, commit: Commit) -> tuple[list[str], int]:
    """A commit's problems and how many of its rollouts are whole."""
    problems = []
    for name, refs in commit.tables.items():
        try:
            if refs:
                store.read_table(commit, name)
        except StoreError as error:
            problems.append(f"commit {commit.seq}, table {name}: {error}")
    if problems or not commit.tables.get("rollouts"):
        return problems, 0
    try:
        rollouts = store.read_rollouts(commit)
        problems += _links(commit, rollouts)
        if commit.tables.get("selections"):
            store.read_branches(commit)
    except StoreError as error:
        return [*problems, f"commit {commit.seq}: {error}"], 0
    return problems, len(rollouts)


def _links(commit: Commit, rollouts: list[StoredRollout]) -> Iterator[str]:
    kept = {blob.ref for blob in commit.blobs}
    if tuple(rollout.spec.rollout_id for rollout in rollouts) != commit.rollout_ids:
        yield f"commit {commit.seq}: its manifest names other rollouts than its table rollouts"
    for rollout in rollouts:
        where = f"commit {commit.seq}, rollout {rollout.spec.rollout_id}"
        num_nodes = len(rollout.trajectory.tree.nodes)
        for call in rollout.trajectory.calls:
            if not 0 <= call.node_id < num_nodes:
                yield f"{where}: call {call.call_id} names node {call.node_id} of {num_nodes}"
        if rollout.workspace_ref and rollout.workspace_ref not in kept:
            yield f"{where}: its workspace {rollout.workspace_ref} is not among the commit's blobs"
