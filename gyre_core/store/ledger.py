"""What the manifests read so far say: commits in number order and where the things in them lie now.

Enters: commits, in number order. Leaves: look-ups by token, rollout and blob; for each object the place of its rows
after compactions; the keys that garbage collection has given up. Holds no object's content and does no input or
output; the store feeds it.

Maintenance speaks through commits too, so that it has a place in the order of all commits: a `compaction` says which
objects' rows lie in which new object, a `gc` names keys that no commit may refer to any more (maintenance.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gyre_core.errors import StoreError
from gyre_core.store.manifest import FIRST_PREVIOUS, BlobRef, Commit, ObjectRef, ref_from_json

COMPACTION = "compaction"  # kinds of commits that only maintenance makes
GC = "gc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an object's rows lie: a range of row groups of a compacted object.

    Example: Place(ref=compacted, first=4, end=6)
    """

    ref: ObjectRef
    first: int  # row group
    end: int  # one past the last


class Ledger:
    """An index of the commits followed so far.

    Example: ledger.take(commit); ledger.by_rollout["s0003-p07-02"] is commit
    """

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.by_token: dict[str, Commit] = {}  # the first of each token
        self.by_rollout: dict[str, Commit] = {}  # the newest of each rollout
        self.blobs: dict[str, BlobRef] = {}  # by their ref, of every commit
        self.places: dict[str, Place] = {}  # by the key of an object whose rows a compaction moved
        self.moved_s: dict[str, float] = {}  # when they were moved
        self.given_up: set[str] = set()  # keys that garbage collection may have deleted; never used again

    @property
    def previous_sha256(self) -> str:
        """What the next manifest must name as its predecessor's hash."""
        return self.commits[-1].sha256 if self.commits else FIRST_PREVIOUS

    def take(self, commit: Commit) -> None:
        """Add the next commit; StoreError for a maintenance commit that this Gyre cannot follow."""
        self.commits.append(commit)
        self.by_token.setdefault(commit.token, commit)
        self.by_rollout.update((rollout_id, commit) for rollout_id in commit.rollout_ids)
        self.blobs.update((blob.ref, blob) for blob in commit.blobs)
        try:
            if commit.kind == COMPACTION:
                self._take_compaction(commit)
            elif commit.kind == GC:
                self.given_up.update(commit.record["keys"])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"maintenance commit {commit.seq} ({commit.kind}) cannot be followed: {error!r}"
            ) from error

    def free_key(self, stem: str, suffix: str = "") -> str:
        """`stem` and `suffix`, with a number in between when garbage collection has given that key up."""
        key, number = f"{stem}{suffix}", 1
        while key in self.given_up:
            number += 1
            key = f"{stem}-{number}{suffix}"
        return key

    def live_objects(self) -> dict[str, tuple[str, ObjectRef]]:
        """The objects that hold the committed rows now: key -> (table, reference), in commit order."""
        live: dict[str, tuple[str, ObjectRef]] = {}
        for name, ref in self.committed_objects():
            place = self.places.get(ref.key)
            held = ref if place is None else place.ref
            live[held.key] = (name, held)
        return live

    def committed_objects(self) -> Iterator[tuple[str, ObjectRef]]:
        """Every (table, reference) of every commit, wherever the rows lie now."""
        for commit in self.commits:
            for name, refs in commit.tables.items():
                yield from ((name, ref) for ref in refs)

    def live_keys(self) -> set[str]:
        """Every key that readers need."""
        return {*self.live_objects(), *(blob.key for blob in self.blobs.values())}

    def _take_compaction(self, commit: Commit) -> None:
        refs = {entry["key"]: ref_from_json(entry) for entry in commit.record["objects"]}
        places = {
            key: Place(ref=refs[into], first=int(first), end=int(end))
            for key, (into, first, end) in commit.record["moved"].items()
        }
        for key, place in self.places.items():  # rows that were moved before are moved on with the object they are in
            if (onward := places.get(place.ref.key)) is not None:
                first = onward.first + place.first
                self.places[key] = Place(ref=onward.ref, first=first, end=first + place.end - place.first)
        self.places.update(places)
        self.moved_s.update((key, commit.created_s) for key in places)
