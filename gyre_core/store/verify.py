"""Walk a whole store: every manifest, every object's size and checksum, every trajectory's invariants.

Leaves a report; broken things are data in it, each with its key, so that one broken object does not hide the others.
"""

from dataclasses import dataclass

from gyre_core.errors import StoreError
from gyre_core.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a walk found.

    Example: verify(Store.open("runs/r1/store", read_only=True)).problems
    """

    num_commits: int
    num_objects: int  # referenced by manifests, each counted once
    num_rollouts: int
    size_bytes: int  # of the referenced objects
    problems: tuple[str, ...]  # one sentence each, naming the key
    unreferenced: tuple[str, ...]  # data objects without a manifest: left by killed writers, harmless

    @property
    def ok(self) -> bool:
        """Whether everything that was committed can be read."""
        return not self.problems


def verify(store: Store) -> VerifyReport:
    """Read everything once; StoreError only when the manifests themselves cannot be followed."""
    commits = store.commits()
    objects: dict[str, int] = {}
    problems: list[str] = []
    num_rollouts = 0
    for commit in commits:
        readable = True
        for name, refs in commit.tables.items():
            objects.update((ref.key, ref.size_bytes) for ref in refs)
            try:
                if refs:
                    store.read_table(commit, name)
            except StoreError as error:
                readable = False
                problems.append(f"commit {commit.seq}, table {name}: {error}")
        if readable and commit.tables.get("rollouts"):
            try:
                num_rollouts += len(store.read_rollouts(commit))
                if commit.tables.get("selections"):
                    store.read_branches(commit)
            except StoreError as error:
                problems.append(f"commit {commit.seq}: {error}")
    present = store.storage.list_keys("data")
    return VerifyReport(
        num_commits=len(commits),
        num_objects=len(objects),
        num_rollouts=num_rollouts,
        size_bytes=sum(objects.values()),
        problems=tuple(problems),
        unreferenced=tuple(key for key in present if key not in objects),
    )
