"""Prefect work pools whose limits follow the cells: `gyre-rollout` may run what serves, `gyre-train` what trains.

The limits are the elastic boundary that the UI shows, and a gate for work that is queued in the pools: raising one
lets the next flow run start at once, lowering one lets running ones finish. Trouble with them never stops a run, and
no move waits for them: a busy server takes seconds. Each limit that the server has taken is an event,
`gyre.pool.resized`.
"""

import contextvars
import logging
import threading
import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events import emit_event
from prefect.exceptions import ObjectAlreadyExists

logger = logging.getLogger(__name__)

_RETRY_S = 2.0
_CLOSE_S = 10.0

ROLLOUT_POOL = "gyre-rollout"
TRAIN_POOL = "gyre-train"
_DESCRIPTIONS = {
    ROLLOUT_POOL: "rollout slots of the cells that serve; follows the scheduler's moves",
    TRAIN_POOL: "cells that train; follows the scheduler's moves",
}


class WorkPools:
    """The two pools of a Prefect server. Any thread may resize, and never waits for the server: a thread of its own
    sends the newest limits, changes only, and tries again while the server does not answer.

    Example: pools = WorkPools.open(); pools.resize(rollout=12, train=1); pools.close()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._closed = False
        context = contextvars.copy_context()  # Prefect's settings, and the flow run that its events belong to
        self._thread = threading.Thread(target=context.run, args=(self._send_all,), name="work-pools", daemon=True)

    @classmethod
    def open(cls) -> "WorkPools":
        """Make the pools where they do not exist yet."""
        with get_client(sync_client=True) as client:
            for name, description in _DESCRIPTIONS.items():
                try:
                    client.create_work_pool(WorkPoolCreate(name=name, type="process", description=description))
                except ObjectAlreadyExists:
                    continue
        pools = cls()
        pools._thread.start()
        return pools

    def resize(self, *, rollout: int, train: int) -> None:
        """Set both limits, soon."""
        with self._changed:
            self._wanted = {ROLLOUT_POOL: rollout, TRAIN_POOL: train}
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is not sent yet, for a while; may be repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted != self._sent)
                wanted, closed = self._wanted, self._closed
            if wanted != self._sent and not self._send(wanted) and not closed:
                time.sleep(_RETRY_S)
            elif closed:
                return

    def _send(self, wanted: dict[str, int]) -> bool:
        changed = {name: limit for name, limit in wanted.items() if self._sent.get(name) != limit}
        try:
            with get_client(sync_client=True) as client:
                for name, limit in changed.items():
                    client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
                    self._sent[name] = limit
                    emit_event(
                        event="gyre.pool.resized",
                        resource={"prefect.resource.id": f"gyre.pool.{name}", "prefect.resource.name": name},
                        payload={"limit": limit},
                    )
        except Exception as error:  # the server may be restarting
            logger.warning("work pools were not resized to %s: %r", changed, error)
            return False
        return True
