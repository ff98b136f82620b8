"""Which workspaces a run keeps in its store, and why another is not kept.

Enters: a rollout's workspace before its verifier runs, later its grade. Leaves: a blob reference for the rollout's
record, or a reason. Invariants: the archives of a run never exceed its quota, processes before a resume included; a
workspace that cannot be kept is a reason, never an error of the rollout or the run.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_core.config.models import GradingConfig
from gyre_core.errors import StoreError
from gyre_core.rollout.archive import ArchiveError, archive_workspace
from gyre_core.store import Store
from gyre_core.types import Grade, RolloutSpec

logger = logging.getLogger(__name__)

BLOB_KIND = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWorkspace:
    """What became of one workspace; both empty when it was not asked for.

    Example: KeptWorkspace(ref="", dropped="quota: ...")
    """

    ref: str = ""  # for Store.get_blob
    dropped: str = ""  # why it was not kept


class WorkspaceKeeper:
    """Puts archives into a run's store until its quota is used up. Safe to share between threads.

    Example: settle = keeper.take(spec, workspace); grade = ...; kept = settle(grade)
    """

    def __init__(self, store: Store, grading: GradingConfig) -> None:
        self._store = store
        self._grading = grading
        self._lock = threading.Lock()
        self._bytes_by_sha256 = {
            blob.sha256: blob.size_bytes
            for commit in store.commits()
            for blob in commit.blobs
            if blob.kind == BLOB_KIND
        }

    def take(self, spec: RolloutSpec, workspace: Path) -> Callable[[Grade], KeptWorkspace]:
        """Archive what a rollout left, before a verifier may change it; the returned function decides by its grade.

        The archive waits in a file beside the workspace: a verifier may take an hour, and many may run at once.
        """
        if self._grading.keep_workspaces == "none" or spec.step < 0:
            return lambda _: KeptWorkspace()
        try:
            archive = archive_workspace(workspace, max_bytes=self._grading.keep_workspace_bytes)
            waiting = workspace.parent / f"{workspace.name}.tar.zst"
            waiting.write_bytes(archive.data)
        except (ArchiveError, OSError) as error:
            dropped = KeptWorkspace(dropped=f"not archived: {error}")
            return lambda grade: dropped if self._wanted(grade) else KeptWorkspace()
        return lambda grade: self._put(spec, waiting) if self._wanted(grade) else KeptWorkspace()

    def _wanted(self, grade: Grade) -> bool:
        return self._grading.keep_workspaces == "all" or grade.reward is not None

    def _put(self, spec: RolloutSpec, waiting: Path) -> KeptWorkspace:
        try:
            archive = waiting.read_bytes()
        except OSError as error:
            return KeptWorkspace(dropped=f"not archived: {error}")
        sha256 = hashlib.sha256(archive).hexdigest()
        quota_bytes = self._grading.keep_quota_bytes
        with self._lock:
            used_bytes = sum(self._bytes_by_sha256.values())
            new = sha256 not in self._bytes_by_sha256  # equal archives are one blob
            if new and used_bytes + len(archive) > quota_bytes:
                reason = f"quota: {used_bytes} of {quota_bytes} bytes are used (grading.keep_quota_bytes)"
                return KeptWorkspace(dropped=reason)
            self._bytes_by_sha256[sha256] = len(archive)
        try:
            return KeptWorkspace(ref=self._store.put_blob(archive, kind=BLOB_KIND))
        except StoreError as error:
            with self._lock:
                if new:
                    self._bytes_by_sha256.pop(sha256, None)
            logger.warning("rollout %s: its workspace is not kept: %s", spec.rollout_id, error)
            return KeptWorkspace(dropped=f"store: {error}")
