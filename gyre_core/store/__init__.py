"""Trajectories, grades, selections and steps as immutable Arrow tables under numbered, exclusive commits.

`Store.open` is the way in; `store.py` has the invariants, `schema.py` the tables, `storage.py` what a backend must do.
"""

from gyre_core.store.manifest import BlobRef, Commit, ObjectRef
from gyre_core.store.records import StepRecord
from gyre_core.store.store import Store
from gyre_core.store.tables import FinishedRollout, StoredRollout, rollout_tables, selections_table
from gyre_core.store.verify import VerifyReport, verify

__all__ = [
    "BlobRef",
    "Commit",
    "FinishedRollout",
    "ObjectRef",
    "StepRecord",
    "Store",
    "StoredRollout",
    "VerifyReport",
    "rollout_tables",
    "selections_table",
    "verify",
]
