"""Prefect work pools whose limits follow the cells: `gyre-rollout` may run what serves, `gyre-train` what trains.

The limits are the elastic boundary that the UI shows, and a gate for work that is queued in the pools: raising one
lets the next flow run start at once, lowering one lets running ones finish. Trouble with them never stops a run.
"""

import logging
import threading

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists

logger = logging.getLogger(__name__)

ROLLOUT_POOL = "gyre-rollout"
TRAIN_POOL = "gyre-train"
_DESCRIPTIONS = {
    ROLLOUT_POOL: "rollout slots of the cells that serve; follows the scheduler's moves",
    TRAIN_POOL: "cells that train; follows the scheduler's moves",
}


class WorkPools:
    """The two pools of a Prefect server. Any thread may resize; only changes are sent.

    Example: pools = WorkPools.open(); pools.resize(rollout=12, train=1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}

    @classmethod
    def open(cls) -> "WorkPools":
        """Make the pools where they do not exist yet."""
        with get_client(sync_client=True) as client:
            for name, description in _DESCRIPTIONS.items():
                try:
                    client.create_work_pool(WorkPoolCreate(name=name, type="process", description=description))
                except ObjectAlreadyExists:
                    continue
        return cls()

    def resize(self, *, rollout: int, train: int) -> None:
        """Set both limits."""
        with self._lock:
            wanted = {ROLLOUT_POOL: rollout, TRAIN_POOL: train}
            changed = {name: limit for name, limit in wanted.items() if self._sent.get(name) != limit}
            if not changed:
                return
            try:
                with get_client(sync_client=True) as client:
                    for name, limit in changed.items():
                        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
                        self._sent[name] = limit
            except Exception as error:  # the server may be restarting: the next move tries again
                logger.warning("work pools were not resized to %s: %r", changed, error)
