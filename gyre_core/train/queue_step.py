"""One step's queue with its data: groups come in while they are graded, members claim them, the owner takes over.

Enters: the branches of graded groups, members' requests, offers of their gradients. Leaves: work (a lease and
branches), what a member should do next, take-overs for the owner, and at the end the account of what was trained.
Thread-safe: the owner's trainer thread and the service's event loop use it at once. Invariants: those of
gyre_core/train/queue.py; a session whose gradient is being read gets no more work; a gradient that says it holds
something else than the queue knows is not taken.
"""

import contextlib
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import TrainError
from gyre_core.train.queue import CutOffError, Lease, MicroStepQueue
from gyre_core.train.queue_account import SumOrder, make_account, queue_status
from gyre_core.train.queue_bodies import MicroStepBodies
from gyre_core.train.queue_journal import StepJournal
from gyre_core.train.queue_rates import Rates, tail_parts
from gyre_core.train.queue_records import (
    Instruction,
    QueueRules,
    StaleStepError,
    StepAccount,
    StepIdentity,
    TakeOver,
    Work,
)
from gyre_core.transfer.gradients import BufferOffer
from gyre_core.types import TrainingBranch

logger = logging.getLogger(__name__)


class StepQueue:
    """See the module. Example: queue = StepQueue(identity, QueueRules(micro_step_tokens=4096)); queue.add_group(...)"""

    def __init__(
        self,
        identity: StepIdentity,
        rules: QueueRules,
        *,
        owner: str = "core",
        rates: Rates | None = None,
        journal_folder: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`owner` names the trainer that sums. With a journal the queue of the same identity is restored from it."""
        self.identity = identity
        self.rules = rules
        self._owner = owner
        self._clock = clock or SystemClock()
        self._changed = threading.Condition(threading.RLock())
        self._stamp = 0  # counts changes: a poll that changed nothing wakes nobody
        self._looked = 0  # the owner's last look at it
        self._listeners: list[Callable[[], None]] = []
        self._groups: dict[str, list[str]] = {}
        self._stats: dict[str, Mapping[str, float]] = {}
        self._offers: dict[str, BufferOffer] = {}
        self._reading: set[str] = set()
        self._leaving: set[str] = set()  # get no more work: their gradient is taken before the step's end
        self._order = SumOrder()
        self.num_rollouts: int | None = None  # what the step divides by, once it is sealed with it
        self._own: str | None = None
        self._over = ""  # why, once it is
        self._cut_off: list[str] = []
        self._journal: StepJournal | None = None
        events: list[dict[str, Any]] = []
        if journal_folder is not None:
            self._journal, events = StepJournal.open(journal_folder, asdict(identity))
        self._bodies = MicroStepBodies(rules, self._journal)
        names = [event["name"] for event in events if event["event"] == "name"]
        self.name = names[0] if names else f"step-{identity.step}-{secrets.token_hex(4)}"
        self._replaying = bool(events)
        if not names:
            self._record({"event": "name", "name": self.name}, always=True)
        self._queue = MicroStepQueue(
            clock=self._clock,
            rule=rules.lease,
            rates=rates,
            silence_s=rules.silence_s,
            name=self.name,
            on_event=self._on_event,
        )
        if events:
            self._restore(events)
            self._replaying = False
            for session in self._queue.sessions(owner=True):  # the sum they were in is gone
                self._queue.cut_off(session)

    # -- the owner -------------------------------------------------------------------------------------------------

    def has_group(self, group_id: str) -> bool:
        """Whether the group is in this step already (after a restart)."""
        with self._changed:
            return group_id in self._groups

    def group(self, group_id: str) -> tuple[str, ...]:
        """A known group's micro-steps."""
        with self._changed:
            return tuple(self._groups[group_id])

    def add_group(self, group_id: str, branches: Sequence[TrainingBranch]) -> tuple[str, ...]:
        """A graded group becomes micro-steps at once; returns their ids. A group without signal has none.

        Raises ValueError for a group that is known, for bad branches and for a sealed queue.
        """
        parts = self._bodies.pack(branches, self.rules.micro_step_tokens)  # not under the lock: it takes its time
        with self._change():
            if group_id in self._groups:
                raise ValueError(f"group {group_id} is in step {self.identity.step} already")
            if self._queue.sealed:
                raise ValueError(f"step {self.identity.step} is sealed: group {group_id} belongs to another")
            steps = [(f"{group_id}.{index}", tokens) for index, (_, tokens) in enumerate(parts)]
            for (micro_step, _), (part, _) in zip(steps, parts, strict=True):
                self._bodies.keep(micro_step, part)
            self._record({"event": "group", "group": group_id, "micro_steps": steps})
            self._groups[group_id] = [micro_step for micro_step, _ in steps]
            for micro_step, tokens in steps:
                self._queue.add(micro_step, tokens)
            return tuple(self._groups[group_id])

    def seal(self, num_rollouts: int | None = None) -> None:
        """No more groups come. The last micro-steps are split, so that members of known rates end together.

        `num_rollouts`, what the step divides by, is kept with the step. Raises ValueError for another than before.
        """
        with self._change():
            if num_rollouts is not None and self.num_rollouts is None:
                self.num_rollouts = num_rollouts
                self._record({"event": "rollouts", "count": num_rollouts})
            if num_rollouts is not None and num_rollouts != self.num_rollouts:
                raise ValueError(f"step {self.identity.step} divides by {self.num_rollouts}, not by {num_rollouts}")
            if self._queue.sealed:
                return
            members = {self._owner, *self._queue.trainers()}
            known = self._queue.rates.all()
            pending = self._queue.pending()
            counts = tail_parts(
                [tokens for _, tokens in pending],
                [self._queue.rates.of(member) or 1.0 for member in sorted(members)] if known else [1.0] * len(members),
                min_tokens=self.rules.tail_tokens,
            )
            for (micro_step, tokens), count in zip(pending, counts, strict=True):
                if count > 1:
                    self._split(micro_step, math.ceil(tokens / count))
            self._queue.seal()

    def owner_next(self) -> Work | tuple[TakeOver, ...] | Literal["closed"] | None:
        """What the owner does now: compute, take these gradients over in this order, step; or wait (None).

        Its own completed micro-steps count as taken: they are in the sum. Raises TrainError once the step is over.
        """
        with self._change():
            if self._over:
                raise TrainError(f"step {self.identity.step} is over: {self._over}")
            self._queue.expire()
            self._looked = self._stamp
            if self._own is None:
                self._own = self._queue.join(self._owner, owner=True)
            parked = [name for name in self._queue.sessions(owner=False) if self._is_left(name)]
            if parked:
                return self._read(parked)
            lease = self._queue.claim(self._own)
            if lease is not None:
                return Work(lease=lease, body=self._bodies.body(lease.micro_step_id))
            if not self._queue.drained:
                return None
            if self._queue.completed(self._own):
                self._queue.take_over(self._own)
                self._own = None
            if self._queue.closed:
                return "closed"
            holding = [name for name in self._queue.sessions(owner=False) if self._queue.completed(name)]
            if any(name not in self._offers for name in holding):
                return None
            return self._read(holding)

    def taken(self, session: str) -> int:
        """The gradient was read whole: it counts from now on, add it. Returns how many micro-steps are in it.

        Raises CutOffError when it came too late.
        """
        with self._change():
            self._reading.discard(session)
            self._offers.pop(session, None)
            micro_steps = self._queue.take_over(session)
            self._order.added(session, micro_steps)
            return len(micro_steps)

    def lost(self, session: str, reason: str) -> None:
        """The gradient could not be read: what is in it is computed again."""
        with self._change():
            self._reading.discard(session)
            self._offers.pop(session, None)
            logger.warning("gradient of %s is lost: %s", session, reason)
            with contextlib.suppress(CutOffError):
                self._queue.cut_off(session)

    def finish(self) -> None:
        """The optimizer has stepped: members may forget their gradients, the journal goes."""
        with self._change():
            assert self._queue.closed, "a step is finished after all of it was taken"
            self._over = "it is done"
            self._stamp += 1
            if self._journal is not None:
                self._journal.remove()
                self._journal = None

    def abort(self, reason: str) -> None:
        """The step is refused: every gradient of it is worth nothing. The data stay with the caller."""
        with self._change():
            for session in self._queue.sessions():
                self._queue.cut_off(session)
            self._over = reason
            self._stamp += 1
            if self._journal is not None:
                self._journal.remove()
                self._journal = None

    def account(self) -> StepAccount:
        """What was trained, proven: each branch of each group exactly once. Raises TrainError unless it is closed."""
        with self._changed:
            if not self._queue.closed:
                raise TrainError(f"step {self.identity.step} is not closed: {self._queue.counts()}")
            names = self._bodies.names
            return make_account(self._queue, self._groups, names, self._stats, self._order, self._cut_off)

    def wait(self, timeout_s: float) -> None:
        """Return when something changed since `owner_next`, a deadline passed, or after `timeout_s`."""
        with self._changed:
            if self._stamp != self._looked:
                return
            deadline = self._queue.next_deadline_s()
            if deadline is not None:
                timeout_s = min(timeout_s, max(0.0, deadline - self._clock.monotonic_s()))
            self._changed.wait(timeout_s)

    # -- members ---------------------------------------------------------------------------------------------------

    def join(self, trainer: str, *, policy_version: int, weights: str) -> str:
        """A member whose gradient is empty and whose weights are the step's; returns its session.

        Raises StaleStepError for other weights, and when the step is over.
        """
        with self._change():
            mine = self.identity
            if self._over:
                raise StaleStepError(f"step {mine.step} is over: {self._over}")
            if trainer == self._owner:
                raise ValueError(f"{trainer} is the owner's name: a member needs another")
            if (policy_version, weights) != (mine.policy_version, mine.weights):
                raise StaleStepError(
                    f"step {mine.step} trains version {mine.policy_version} ({mine.weights[:8]}), {trainer} holds "
                    f"{policy_version} ({weights[:8]}): pull the weights"
                )
            for former in self._sessions_of(trainer):  # it has one gradient: what it does not offer is gone
                self._queue.cut_off(former) if self._holds(former) else self._queue.take_over(former)
            return self._queue.join(trainer)

    def claim(self, session: str) -> Work | Instruction | None:
        """Work, or what to do; None when there is nothing yet. A repeated claim gives the open lease again.

        Raises CutOffError when the session was cut off.
        """
        with self._change():
            if self._over:
                return "over"
            self._queue.expire()
            if self._queue.ended(session) == "taken":
                if session in self._leaving:
                    return "left"
                return "rejoin" if self._queue.pending() else None
            self._queue.seen(session)
            if session in self._leaving and self._queue.lease_of(session) is None:
                return self._farewell(session)
            if session in self._reading:
                return None
            lease = self._queue.lease_of(session) or self._queue.claim(session)
            if lease is not None:
                self._offers.pop(session, None)
                return Work(lease=lease, body=self._bodies.body(lease.micro_step_id))
            if self._queue.drained and self._queue.completed(session) and session not in self._offers:
                return "hand_over"
            return None

    def complete(self, lease: Lease, stats: Mapping[str, float]) -> None:
        """The micro-step's gradient is in the member's (or the owner's) buffer. Raises CutOffError when too late."""
        with self._change():
            if self._over:
                raise StaleStepError(f"step {self.identity.step} is over: {self._over}")
            self._queue.complete(lease)
            self._stats[lease.micro_step_id] = dict(stats)
            self._record({"event": "stats", "micro_step": lease.micro_step_id, "stats": dict(stats)})
            if lease.session == self._own:
                self._order.computed(lease.session, lease.micro_step_id)

    def leave(self, trainer: str) -> None:
        """The member goes: no more work for it. What it has done is taken as soon as it lies ready (`offer`)."""
        with self._change():
            if self._over:
                return
            for session in self._sessions_of(trainer, offered=True):
                if session not in self._leaving:
                    self._leaving.add(session)
                    self._stamp += 1
                    if session in self._offers:
                        self._park(session, self._offers[session])

    def gone(self, trainer: str, reason: str) -> tuple[str, ...]:
        """The member's process has ended: what it computes and what it did not offer is lost; returns its sessions.

        What it offered may still be read whole (shared memory outlives its process): the owner's read will tell.
        """
        with self._change():
            lost = self._sessions_of(trainer)
            for session in lost:
                logger.warning("%s is lost: %s", session, reason)
                self._queue.cut_off(session)
            return lost

    def wake(self) -> None:
        """Let the owner look again at once."""
        with self._changed:
            self._stamp += 1
            self._changed.notify_all()

    def fail(self, lease: Lease, reason: str) -> None:
        """The member refused the micro-step and dropped its gradient; the owner will try it. Raises CutOffError."""
        with self._change():
            logger.warning("%s could not compute %s: %s", lease.session, lease.micro_step_id, reason)
            self._queue.fail(lease)

    def offer(self, session: str, offer: BufferOffer, micro_steps: Sequence[str]) -> None:
        """The member's gradient lies ready, and holds these micro-steps.

        Raises CutOffError when the session has ended, also when it ends now because it holds something else.
        """
        with self._change():
            self._queue.seen(session)
            known = self._queue.completed(session)
            if sorted(micro_steps) != sorted(known) or offer.label != session:
                self._queue.cut_off(session)
                raise CutOffError(f"{session} offers {len(micro_steps)} micro-steps, the queue knows {len(known)}")
            if session in self._reading:
                return
            if session in self._leaving:
                self._offers[session] = offer
                self._stamp += 1
                self._park(session, offer)
            elif self._queue.drained:
                self._offers[session] = offer
                self._stamp += 1

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def over(self) -> str:
        """Why the step is over; empty while it runs."""
        return self._over

    def status(self) -> dict[str, Any]:
        """Counts, sessions and rates as plain data."""
        with self._changed:
            return {
                **asdict(self.identity),
                "name": self.name,
                "over": self._over,
                "groups": len(self._groups),
                "cut_off": list(self._cut_off),
                **queue_status(self._queue, self._offers),
            }

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` (from any thread) after each change until the returned function is called."""
        with self._changed:
            self._listeners.append(listener)

        def remove() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return remove

    # -- parts -----------------------------------------------------------------------------------------------------

    def _read(self, sessions: list[str]) -> tuple[TakeOver, ...]:
        self._reading.update(sessions)
        return tuple(TakeOver(session=name, offer=self._offers[name]) for name in sessions)

    def _is_left(self, session: str) -> bool:
        return session in self._leaving and session in self._offers and session not in self._reading

    def _holds(self, session: str) -> bool:
        return bool(self._queue.completed(session)) or self._queue.lease_of(session) is not None

    def _sessions_of(self, trainer: str, *, offered: bool = False) -> tuple[str, ...]:
        """The member's live sessions; those whose gradient lies ready only if they are asked for."""
        mine = [name for name in self._queue.sessions(owner=False) if self._queue.trainer_of(name) == trainer]
        return tuple(name for name in mine if offered or name not in self._offers)

    def _farewell(self, session: str) -> Instruction:
        if not self._queue.completed(session):
            self._queue.take_over(session)
            return "left"
        return "left" if session in self._offers else "hand_over"

    def _park(self, session: str, offer: BufferOffer) -> None:
        """Told to the journal, so that an owner that is started anew reads it although the member asks no more."""
        self._queue.park(session)
        self._record({"event": "park", "session": session, "offer": offer.to_json()})

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            before = self._stamp
            try:
                yield
            finally:
                if self._stamp != before:
                    self._changed.notify_all()
                    for listener in self._listeners:
                        listener()

    def _on_event(self, event: dict[str, Any]) -> None:
        self._stamp += 1
        if event["event"] == "end" and event["how"] == "cut_off":
            self._offers.pop(event["session"], None)
            self._reading.discard(event["session"])
            self._cut_off.append(event["session"])
        if event["event"] != "add":  # in the group's line
            self._record(event)

    def _record(self, event: dict[str, Any], *, always: bool = False) -> None:
        if self._journal is not None and (always or not self._replaying):
            self._journal.append(event)

    def _restore(self, events: list[dict[str, Any]]) -> None:
        """Tell the queue again what happened, but for what died with the owner."""
        queue = self._queue
        leases: dict[str, Lease] = {}
        for event in events:
            match event["event"]:
                case "group":
                    self._groups[event["group"]] = [micro_step for micro_step, _ in event["micro_steps"]]
                    for micro_step, tokens in event["micro_steps"]:
                        queue.add(micro_step, tokens)
                case "split":
                    parts = [(name, tokens) for name, tokens in event["parts"]]
                    queue.split(event["micro_step"], parts)
                    self._renamed(event["micro_step"], [name for name, _ in parts])
                case "rollouts":
                    self.num_rollouts = event["count"]
                case "seal":
                    queue.seal()
                case "join":
                    session = queue.join(event["trainer"], owner=event["owner"])
                    assert session == event["session"], f"{session} is not {event['session']}"
                case "claim":
                    lease = queue.claim(event["session"], event["micro_step"])
                    assert lease is not None
                    leases[event["session"]] = lease
                case "complete":
                    queue.complete(leases[event["session"]], measure=False)
                case "stats":
                    self._stats[event["micro_step"]] = event["stats"]
                case "fail":
                    queue.mark_failed(event["micro_step"])
                case "park":
                    queue.park(event["session"])
                    self._leaving.add(event["session"])
                    self._offers[event["session"]] = BufferOffer.from_json(event["offer"])
                case "end" if event["how"] == "cut_off":
                    queue.cut_off(event["session"])
                case "end" if not queue.completed(event["session"]):
                    queue.take_over(event["session"])  # it left with nothing
        for micro_step in [name for steps in self._groups.values() for name in steps]:
            self._bodies.restore(micro_step)
        logger.info("step %d goes on from its journal: %s", self.identity.step, queue.counts())

    def _split(self, micro_step: str, budget: int) -> None:
        named = self._bodies.split(micro_step, budget)
        if named:
            self._queue.split(micro_step, named)
            self._renamed(micro_step, [name for name, _ in named])

    def _renamed(self, micro_step: str, parts: Sequence[str]) -> None:
        for steps in self._groups.values():
            if micro_step in steps:
                at = steps.index(micro_step)
                steps[at : at + 1] = parts
        self._bodies.names.pop(micro_step, None)
