"""The micro-steps of one optimizer step, leased to trainers. Pure: a Clock in, decisions out, no I/O and no threads.

Enters: micro-steps (while the queue is open), joins, claims, completions, failures, take-overs. Leaves: leases, and at
the end the proof that every micro-step counts exactly once in the summed gradient; each change is told to `on_event`.

A trainer's gradient is one buffer: it is taken whole or not at all. So the unit of trust is the *session*, the time
between a trainer's empty gradient and its take-over. A session that misses a deadline, dies, fails or is cut off loses
everything it did; its micro-steps go back to the front of the queue, and the trainer must clear its gradient and join
anew. The *owner* is the trainer that sums: its sessions have no deadline, because nobody can step without it.
Invariants, at any time: each micro-step is pending, leased, completed or taken, in exactly one session if not pending;
a taken one never changes again; `closed` means that no more come and the taken sessions cover every micro-step once.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gyre_core.clock import Clock
from gyre_core.errors import TrainError
from gyre_core.train.queue_rates import LeaseRule, Rates

SessionEnd = Literal["taken", "cut_off"]


class CutOffError(TrainError):
    """The session lost its micro-steps (deadline, death, failure): clear the gradient and join again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to compute one micro-step until a deadline.

    Example: Lease(micro_step_id="s3-m0", session="cell-0#1", attempt=1, deadline_s=30.0)
    """

    micro_step_id: str
    session: str
    attempt: int  # from 1; how often the micro-step was leased
    deadline_s: float  # on the queue's monotonic clock; infinite for the owner


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """Where the micro-steps are; the first four sum to all. Example: QueueCounts(pending=2, leased=1, ...)"""

    pending: int
    leased: int
    completed: int  # done by a session whose gradient was not taken yet
    taken: int
    requeued: int  # times a micro-step went back, over the whole step
    failed: int  # times a trainer reported that it could not compute one (a gradient that is not finite)


@dataclass(slots=True)
class _Session:
    trainer: str
    owner: bool
    seen_s: float
    lease: Lease | None = None
    leased_s: float = 0.0
    parked: bool = False
    completed: dict[str, Lease] = field(default_factory=dict)


@dataclass(slots=True)
class _MicroStep:
    num_tokens: int
    attempts: int = 0
    owner_only: bool = False


class MicroStepQueue:
    """See the module. Not thread-safe: one owner calls it.

    Example: queue.add("m0", 4096); queue.seal(); lease = queue.claim(queue.join("cell-0")); queue.complete(lease)
    """

    def __init__(
        self,
        *,
        clock: Clock,
        rule: LeaseRule | None = None,
        rates: Rates | None = None,
        silence_s: float = math.inf,
        name: str = "",
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`silence_s`: a session without a lease that is not `seen` for so long is cut off. `name` begins every session
        id, so that ids of different steps differ. `rates` outlive a step: pass the last one's.
        """
        self._clock = clock
        self._rule = rule or LeaseRule()
        self.rates = rates if rates is not None else Rates()
        self._silence_s = silence_s
        self._name = f"{name}/" if name else ""
        self._on_event = on_event or (lambda event: None)
        self._pending: deque[str] = deque()
        self._steps: dict[str, _MicroStep] = {}
        self._sessions: dict[str, _Session] = {}
        self._ended: dict[str, SessionEnd] = {}
        self._taken: dict[str, str] = {}  # micro-step -> session
        self._joined = 0
        self._requeued = 0
        self._failed = 0
        self._sealed = False

    # -- the work --------------------------------------------------------------------------------------------------

    def add(self, micro_step_id: str, num_tokens: int = 0) -> None:
        """One more micro-step, behind the others; ValueError for a known id or a sealed queue."""
        if self._sealed:
            raise ValueError(f"the queue is sealed: {micro_step_id} belongs to another step")
        self._insert(micro_step_id, num_tokens)
        self._pending.append(micro_step_id)
        self._on_event({"event": "add", "micro_step": micro_step_id, "tokens": num_tokens})

    def split(self, micro_step_id: str, parts: Sequence[tuple[str, int]]) -> None:
        """Put smaller ones (id, tokens) in the place of a pending micro-step; ValueError when it is not pending."""
        if micro_step_id not in self._pending:
            raise ValueError(f"{micro_step_id} is not pending: it cannot be split")
        if not parts:
            raise ValueError(f"{micro_step_id} cannot be split into nothing")
        at = self._pending.index(micro_step_id)
        owner_only = self._steps[micro_step_id].owner_only
        for part, num_tokens in parts:
            self._insert(part, num_tokens)
            self._steps[part].owner_only = owner_only
        del self._pending[at], self._steps[micro_step_id]
        for part, _ in reversed(parts):
            self._pending.insert(at, part)
        self._on_event({"event": "split", "micro_step": micro_step_id, "parts": [list(part) for part in parts]})

    def seal(self) -> None:
        """No more micro-steps come. Safe to repeat."""
        if not self._sealed:
            self._sealed = True
            self._on_event({"event": "seal"})

    # -- trainers --------------------------------------------------------------------------------------------------

    def join(self, trainer: str, *, owner: bool = False) -> str:
        """Open a session for a trainer whose gradient is empty; returns its id. Possible at any time."""
        self._joined += 1
        session = f"{self._name}{trainer}#{self._joined}"
        self._sessions[session] = _Session(trainer=trainer, owner=owner, seen_s=self._clock.monotonic_s())
        self._on_event({"event": "join", "trainer": trainer, "owner": owner, "session": session})
        return session

    def seen(self, session: str) -> None:
        """The trainer is there. Raises CutOffError for a session that has ended."""
        self._live(session).seen_s = self._clock.monotonic_s()

    def claim(self, session: str, micro_step_id: str | None = None) -> Lease | None:
        """Lease the next micro-step, or None when none is pending for it now (a cut-off may bring some back).

        `micro_step_id` asks for a certain pending one. Raises CutOffError for a session that has ended and ValueError
        when the session holds an open lease.
        """
        self.expire()
        state = self._live(session)
        now = state.seen_s = self._clock.monotonic_s()
        if state.lease is not None:
            raise ValueError(f"session {session} must complete {state.lease.micro_step_id} before it claims more")
        wanted = self._pending if micro_step_id is None else [micro_step_id]
        found = next((name for name in wanted if state.owner or not self._steps[name].owner_only), None)
        if found is None:
            return None
        self._pending.remove(found)
        step = self._steps[found]
        step.attempts += 1
        seconds = self._rule.seconds(step.num_tokens, self.rates.of(state.trainer), step.attempts)
        state.lease = Lease(
            micro_step_id=found,
            session=session,
            attempt=step.attempts,
            deadline_s=math.inf if state.owner else now + seconds,
        )
        state.leased_s = now
        self._on_event({"event": "claim", "session": session, "micro_step": found})
        return state.lease

    def complete(self, lease: Lease, *, measure: bool = True) -> None:
        """The micro-step's gradient is in the session's buffer. Safe to repeat after a lost answer.

        `measure=False` leaves the trainer's rate alone (a journal is told again). Raises CutOffError when the lease no
        longer holds: the buffer contains what others will compute again.
        """
        self.expire()
        state = self._live(lease.session)
        now = state.seen_s = self._clock.monotonic_s()
        if _same(state.completed.get(lease.micro_step_id), lease):
            return
        if not _same(state.lease, lease):
            raise CutOffError(f"{lease.micro_step_id} is not leased to {lease.session}")
        assert state.lease is not None
        state.completed[lease.micro_step_id] = state.lease
        state.lease = None
        if measure:
            self.rates.measured(state.trainer, self._steps[lease.micro_step_id].num_tokens, now - state.leased_s)
        self._on_event({"event": "complete", "session": lease.session, "micro_step": lease.micro_step_id})

    def fail(self, lease: Lease) -> tuple[str, ...]:
        """The trainer could not compute it and has dropped its gradient: its session ends, and from now on only the
        owner may compute this micro-step. Returns what went back. Raises CutOffError as `complete` does.
        """
        self.expire()
        state = self._live(lease.session)
        if not _same(state.lease, lease):
            raise CutOffError(f"{lease.micro_step_id} is not leased to {lease.session}")
        self.mark_failed(lease.micro_step_id)
        return self.cut_off(lease.session)

    def mark_failed(self, micro_step_id: str) -> None:
        """Only the owner may compute this micro-step from now on."""
        self._failed += 1
        self._steps[micro_step_id].owner_only = True
        self._on_event({"event": "fail", "micro_step": micro_step_id})

    def park(self, session: str) -> None:
        """The trainer has gone and left its gradient where the owner can read it: silence says nothing from now on."""
        state = self._live(session)
        if state.lease is not None:
            raise ValueError(f"session {session} is computing {state.lease.micro_step_id}: its gradient is not whole")
        state.parked = True

    def take_over(self, session: str) -> tuple[str, ...]:
        """The session's whole gradient was added to the step's: its micro-steps, now final. Ends the session.

        Raises CutOffError for a session that has ended and ValueError while it holds an open lease.
        """
        self.expire()
        state = self._live(session)
        if state.lease is not None:
            raise ValueError(f"session {session} is computing {state.lease.micro_step_id}: its gradient is not whole")
        for micro_step in state.completed:
            assert micro_step not in self._taken, f"{micro_step} taken twice"
            self._taken[micro_step] = session
        self._end(session, "taken")
        return tuple(state.completed)

    def cut_off(self, session: str) -> tuple[str, ...]:
        """End a session without its gradient; returns what went back to the front of the queue, in order."""
        state = self._live(session)
        back = [*state.completed] + ([state.lease.micro_step_id] if state.lease else [])
        self._pending.extendleft(reversed(back))
        self._requeued += len(back)
        self._end(session, "cut_off")
        return tuple(back)

    def expire(self) -> tuple[str, ...]:
        """Cut off every session past its lease's deadline, or silent; returns them. Called by the other verbs too."""
        now = self._clock.monotonic_s()
        late = [name for name, state in self._sessions.items() if self._limit_s(state) <= now]
        for session in late:
            self.cut_off(session)
        return tuple(late)

    def next_deadline_s(self) -> float | None:
        """When `expire` may next find something, for an owner that sleeps; None when never."""
        first = min((self._limit_s(state) for state in self._sessions.values()), default=math.inf)
        return first if first < math.inf else None

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        """No more micro-steps come."""
        return self._sealed

    @property
    def drained(self) -> bool:
        """Nothing is pending or leased and no more come: time to take the sessions over."""
        return self._sealed and not self._pending and all(state.lease is None for state in self._sessions.values())

    @property
    def closed(self) -> bool:
        """Every micro-step is in a gradient that was taken: the optimizer may step."""
        return self._sealed and len(self._taken) == len(self._steps)

    def taken(self) -> dict[str, str]:
        """Micro-step -> the session whose gradient holds it: what the step's commit lists."""
        return dict(self._taken)

    def pending(self) -> tuple[tuple[str, int], ...]:
        """Pending micro-steps with their tokens, next first."""
        return tuple((name, self._steps[name].num_tokens) for name in self._pending)

    def sessions(self, *, owner: bool | None = None) -> tuple[str, ...]:
        """Live sessions in the order in which they joined; `owner` chooses the owner's or the others."""
        return tuple(name for name, state in self._sessions.items() if owner is None or state.owner is owner)

    def trainer_of(self, session: str) -> str:
        """Whose session it is. Raises CutOffError for a session that has ended."""
        return self._live(session).trainer

    def trainers(self) -> tuple[str, ...]:
        """Who has a live session, sorted."""
        return tuple(sorted({state.trainer for state in self._sessions.values()}))

    def completed(self, session: str) -> tuple[str, ...]:
        """What the session's gradient holds, in order. Raises CutOffError for a session that has ended."""
        return tuple(self._live(session).completed)

    def lease_of(self, session: str) -> Lease | None:
        """The session's open lease. Raises CutOffError for a session that has ended."""
        return self._live(session).lease

    def ended(self, session: str) -> SessionEnd | None:
        """How a session of this queue ended; None while it lives or when it is unknown."""
        return self._ended.get(session)

    def counts(self) -> QueueCounts:
        """Where everything is now."""
        return QueueCounts(
            pending=len(self._pending),
            leased=sum(state.lease is not None for state in self._sessions.values()),
            completed=sum(len(state.completed) for state in self._sessions.values()),
            taken=len(self._taken),
            requeued=self._requeued,
            failed=self._failed,
        )

    def _insert(self, micro_step_id: str, num_tokens: int) -> None:
        if micro_step_id in self._steps:
            raise ValueError(f"micro-step ids must be unique, {micro_step_id} is not")
        self._steps[micro_step_id] = _MicroStep(num_tokens=num_tokens)

    def _limit_s(self, state: _Session) -> float:
        if state.owner or state.parked:
            return math.inf
        return state.lease.deadline_s if state.lease else state.seen_s + self._silence_s

    def _end(self, session: str, how: SessionEnd) -> None:
        del self._sessions[session]
        self._ended[session] = how
        self._on_event({"event": "end", "session": session, "how": how})

    def _live(self, session: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise CutOffError(f"session {session} has ended: clear the gradient and join again")
        return state


def _same(held: Lease | None, shown: Lease) -> bool:
    """Whether a trainer shows the lease that it was given; deadlines are the queue's own business."""
    return held is not None and (held.micro_step_id, held.attempt) == (shown.micro_step_id, shown.attempt)
