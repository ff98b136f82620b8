"""What the manifests read so far say: commits in number order and where the things in them lie.

Enters: commits, in number order. Leaves: look-ups by token, rollout and blob. Holds no object's content and does no
input or output; the store feeds it.
"""

from gyre_core.store.manifest import FIRST_PREVIOUS, BlobRef, Commit


class Ledger:
    """An index of the commits followed so far.

    Example: ledger.take(commit); ledger.by_rollout["s0003-p07-02"] is commit
    """

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.by_token: dict[str, Commit] = {}  # the first of each token
        self.by_rollout: dict[str, Commit] = {}  # the newest of each rollout
        self.blobs: dict[str, BlobRef] = {}  # by their ref, of every commit

    @property
    def previous_sha256(self) -> str:
        """What the next manifest must name as its predecessor's hash."""
        return self.commits[-1].sha256 if self.commits else FIRST_PREVIOUS

    def take(self, commit: Commit) -> None:
        """Add the next commit."""
        self.commits.append(commit)
        self.by_token.setdefault(commit.token, commit)
        self.by_rollout.update((rollout_id, commit) for rollout_id in commit.rollout_ids)
        self.blobs.update((blob.ref, blob) for blob in commit.blobs)
