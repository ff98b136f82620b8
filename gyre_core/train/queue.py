"""The micro-steps of one optimizer step, leased to trainers. Pure: a Clock in, decisions out, no I/O and no threads.

Enters: micro-step ids, joins, claims, completions, take-overs. Leaves: leases, and at the end the proof that every
micro-step counts exactly once in the summed gradient.

A trainer's gradient is one buffer: it is taken whole or not at all. So the unit of trust is the *session*, the time
between a trainer's empty gradient and its take-over. A session that misses a deadline, dies or is cut off loses
everything it did; its micro-steps go back to the front of the queue, and the trainer must clear its gradient and join
anew. Invariants, at any time: each micro-step is pending, leased, completed or taken, in exactly one session if not
pending; a taken one never changes again; `closed` means that the taken sessions cover every micro-step once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_core.clock import Clock
from gyre_core.errors import TrainError


class CutOffError(TrainError):
    """The session lost its micro-steps (deadline, death, take-over): clear the gradient and join again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to compute one micro-step until a deadline.

    Example: Lease(micro_step_id="s3-m0", session="cell-0#1", attempt=1, deadline_s=30.0)
    """

    micro_step_id: str
    session: str
    attempt: int  # from 1; how often the micro-step was leased
    deadline_s: float  # on the queue's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """Where the micro-steps are; the first four sum to all. Example: QueueCounts(pending=2, leased=1, ...)"""

    pending: int
    leased: int
    completed: int  # done by a session whose gradient was not taken yet
    taken: int
    requeued: int  # times a micro-step went back, over the whole step


@dataclass(slots=True)
class _Session:
    lease: Lease | None
    completed: dict[str, Lease]


class MicroStepQueue:
    """See the module. Not thread-safe: one owner calls it.

    Example: session = queue.join("cell-0"); lease = queue.claim(session); queue.complete(lease)
    """

    def __init__(self, micro_step_ids: Sequence[str], *, lease_s: float, clock: Clock) -> None:
        """`lease_s`: seconds a trainer has for one micro-step. ValueError for duplicate ids."""
        if len(set(micro_step_ids)) != len(micro_step_ids):
            raise ValueError("micro-step ids must be unique")
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, got {lease_s}")
        self._clock = clock
        self._lease_s = lease_s
        self._pending = deque(micro_step_ids)
        self._attempts = dict.fromkeys(micro_step_ids, 0)
        self._sessions: dict[str, _Session] = {}
        self._taken: dict[str, str] = {}  # micro-step -> session
        self._joined = 0
        self._requeued = 0

    def join(self, trainer: str) -> str:
        """Open a session for a trainer whose gradient is empty; returns its id. Possible at any time."""
        self._joined += 1
        session = f"{trainer}#{self._joined}"
        self._sessions[session] = _Session(lease=None, completed={})
        return session

    def claim(self, session: str) -> Lease | None:
        """Lease the next micro-step, or None when none is pending now (a cut-off may bring some back).

        Raises CutOffError for a dead session and ValueError when the session holds an open lease.
        """
        self.expire()
        state = self._live(session)
        if state.lease is not None:
            raise ValueError(f"session {session} must complete {state.lease.micro_step_id} before it claims more")
        if not self._pending:
            return None
        micro_step = self._pending.popleft()
        self._attempts[micro_step] += 1
        state.lease = Lease(
            micro_step_id=micro_step,
            session=session,
            attempt=self._attempts[micro_step],
            deadline_s=self._clock.monotonic_s() + self._lease_s,
        )
        return state.lease

    def complete(self, lease: Lease) -> None:
        """The micro-step's gradient is in the session's buffer. Safe to repeat after a lost answer.

        Raises CutOffError when the lease no longer holds: the buffer contains what others will compute again.
        """
        self.expire()
        state = self._live(lease.session)
        if state.completed.get(lease.micro_step_id) == lease:
            return
        if state.lease != lease:
            raise CutOffError(f"{lease.micro_step_id} is not leased to {lease.session}")
        state.completed[lease.micro_step_id] = lease
        state.lease = None

    def take_over(self, session: str) -> tuple[str, ...]:
        """The session's whole gradient was added to the step's: its micro-steps, now final. Ends the session.

        Raises CutOffError for a dead session and ValueError while it holds an open lease.
        """
        self.expire()
        state = self._live(session)
        if state.lease is not None:
            raise ValueError(f"session {session} is computing {state.lease.micro_step_id}: its gradient is not whole")
        for micro_step in state.completed:
            assert micro_step not in self._taken, f"{micro_step} taken twice"
            self._taken[micro_step] = session
        del self._sessions[session]
        return tuple(state.completed)

    def cut_off(self, session: str) -> tuple[str, ...]:
        """End a session without its gradient; returns what went back to the front of the queue, in order."""
        state = self._live(session)
        del self._sessions[session]
        back = [*state.completed] + ([state.lease.micro_step_id] if state.lease else [])
        self._pending.extendleft(reversed(back))
        self._requeued += len(back)
        return tuple(back)

    def expire(self) -> tuple[str, ...]:
        """Cut off every session whose lease is past its deadline; returns them. Called by the other verbs too."""
        now = self._clock.monotonic_s()
        late = [name for name, state in self._sessions.items() if state.lease and state.lease.deadline_s <= now]
        for session in late:
            self.cut_off(session)
        return tuple(late)

    def next_deadline_s(self) -> float | None:
        """When `expire` may next find something, for an owner that sleeps; None without open leases."""
        return min((state.lease.deadline_s for state in self._sessions.values() if state.lease), default=None)

    @property
    def drained(self) -> bool:
        """Nothing is pending or leased: time to take the sessions over."""
        return not self._pending and all(state.lease is None for state in self._sessions.values())

    @property
    def closed(self) -> bool:
        """Every micro-step is in a gradient that was taken: the optimizer may step."""
        return len(self._taken) == len(self._attempts)

    def taken(self) -> dict[str, str]:
        """Micro-step -> the session whose gradient holds it: what the step's commit lists."""
        return dict(self._taken)

    def counts(self) -> QueueCounts:
        """Where everything is now."""
        return QueueCounts(
            pending=len(self._pending),
            leased=sum(state.lease is not None for state in self._sessions.values()),
            completed=sum(len(state.completed) for state in self._sessions.values()),
            taken=len(self._taken),
            requeued=self._requeued,
        )

    def _live(self, session: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise CutOffError(f"session {session} has ended: clear the gradient and join again")
        return state
