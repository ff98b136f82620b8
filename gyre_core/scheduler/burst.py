"""Counters of the open burst: what the flow tells, and the snapshot that a policy decides from.

Enters: rollouts dispatched and finished, groups that are graded, handed to training and trained; the cells and the
micro-step queue as they are now. Leaves: a `Snapshot`. Thread-safe: the flow counts, the controller looks. Every change
wakes who waits for one.

A rollout is finished when its harness has ended: from then on it needs no engine.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gyre_core.scheduler.policy import CellView, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The micro-steps of the open step. Example: QueueView(pending=3, leased=1)"""

    pending: int = 0  # handed to training, claimed by nobody
    leased: int = 0  # being computed


class Burst:
    """See the module. Example: burst = Burst(); burst.begin(step=0, groups=6); burst.dispatched(48)"""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stamp = 0
        self._step = -1
        self._outstanding: Counter[int] = Counter()  # dispatched and not finished, by the step that trains them
        self._dispatched = 0
        self._finished = 0
        self._untrained = 0
        self._waiting = 0  # graded groups of the open step that are not handed over yet
        self._handed = 0
        self._sealed = False
        self._ended = True
        self._next_ready = 0
        self._pending_dispatch = 0

    def begin(self, *, step: int, groups: int, next_ready: int = 0, pending_dispatch: int = 0) -> None:
        """A step with so many groups is open. Rollouts that still run are this burst's from now on.

        `pending_dispatch`: rollouts that will be dispatched when it ends.
        """
        with self._changed:
            self._step, self._untrained = step, groups
            self._dispatched, self._finished = self._outstanding.total(), 0
            self._waiting = self._handed = 0
            self._sealed = self._ended = False
            self._next_ready, self._pending_dispatch = next_ready, pending_dispatch
            self._tell()

    def reopen(self, *, groups: int) -> None:
        """The optimizer step was lost: all its groups, which are graded, are to be trained once more."""
        with self._changed:
            self._untrained = self._waiting = groups
            self._handed = 0
            self._sealed = False
            self._tell()

    def dispatched(self, rollouts: int, *, step: int) -> None:
        """Rollouts of this step's batch (-1: of none) that need an engine from now on, running or not."""
        with self._changed:
            self._outstanding[step] += rollouts
            self._dispatched += rollouts
            self._tell()

    def finished(self, *, step: int) -> None:
        """A rollout that needs no engine any more, whatever became of it."""
        with self._changed:
            self._outstanding[step] -= 1
            if not self._outstanding[step]:
                del self._outstanding[step]
            self._finished += 1
            self._tell()

    def group_ready(self, *, of_next: bool = False) -> None:
        """A group is graded; `of_next` when a later step trains it."""
        with self._changed:
            if of_next:
                self._next_ready += 1
            else:
                self._waiting += 1
            self._tell()

    def group_handed(self) -> None:
        """A group of the open step is in the micro-step queue."""
        with self._changed:
            self._waiting -= 1
            self._handed += 1
            self._tell()

    def sealed(self) -> None:
        """All groups of the step are in the queue: what is left is to compute and to step."""
        with self._changed:
            self._sealed = True
            self._tell()

    def trained(self) -> None:
        """The optimizer has stepped."""
        with self._changed:
            self._untrained = self._waiting = self._handed = 0
            self._tell()

    def end(self) -> None:
        """The step is committed; its cells may finish their moves."""
        with self._changed:
            self._ended = True
            self._tell()

    @property
    def ended(self) -> bool:
        """No step is open."""
        with self._changed:
            return self._ended

    @property
    def step(self) -> int:
        """The open step's index, or the last one's."""
        with self._changed:
            return self._step

    @property
    def outstanding(self) -> int:
        """The water level: rollouts that need an engine, of all batches."""
        with self._changed:
            return self._outstanding.total()

    @property
    def stamp(self) -> int:
        """Counts changes."""
        with self._changed:
            return self._stamp

    def wait(self, stamp: int, timeout_s: float) -> int:
        """Wait until something has changed since `stamp`, or the time is over; returns the new stamp."""
        with self._changed:
            self._changed.wait_for(lambda: self._stamp != stamp, timeout_s)
            return self._stamp

    def poke(self) -> None:
        """Wake who waits: something else has changed."""
        with self._changed:
            self._tell()

    def snapshot(self, cells: Sequence[CellView], queue: QueueView, **more: Any) -> Snapshot:
        """What a policy decides from; `more` are further fields of it. Raises ValueError without cells."""
        if not cells:
            raise ValueError("a run has at least one cell")
        with self._changed:
            queued = min(self._handed, queue.pending)
            ready = self._waiting + queued
            if self._untrained and self._sealed and not ready:
                ready = 1  # closing the step is work for the core, also when no group has a signal
            return Snapshot(
                cells=tuple(cells),
                dispatched=self._dispatched,
                finished=self._finished,
                ready_groups=ready,
                untrained_groups=self._untrained,
                queued_groups=queued,
                ungraded_groups=max(0, self._untrained - self._waiting - self._handed),
                pending_microsteps=queue.pending + queue.leased,
                next_ready_groups=self._next_ready,
                pending_dispatch=self._pending_dispatch,
                due_rollouts=self._outstanding[self._step] if self._untrained else None,
                **more,
            )

    def _tell(self) -> None:
        self._stamp += 1
        self._changed.notify_all()
