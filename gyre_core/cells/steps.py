"""The open step of a cell that sums: the flow opens, feeds, seals and fetches it, the trainer works it off.

    flow:            open -> group, group ... -> seal -> finish (waits)          abort
    trainer thread:  work: claim, compute, take over ... -> optimizer step -> next version offered

Enters: the flow's verbs, from any thread, in this order, each as often as its answer gets lost; `work` on the trainer's
thread, which returns at a micro-step boundary when it is asked to pause and goes on when it is called again. Leaves:
the step's statistics and its account. Invariants: one step at a time; a step is finished once or not at all; a group
counts once however often it is sent; weights and version change together, at the step's end.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gyre_core.errors import GyreError, TrainError
from gyre_core.train.members import CoreMember, Replica
from gyre_core.train.queue_records import QueueRules, StepIdentity
from gyre_core.train.queue_step import StepQueue
from gyre_core.train.stats import StepStats
from gyre_core.types import TrainingBranch

logger = logging.getLogger(__name__)

MAX_WAIT_S = 20.0  # of one `finish`


class SteppingTrainer(Protocol):
    """What a step needs of a trainer beside its replica."""

    def weights_digest(self) -> str: ...
    def optimizer_step(self, num_rollouts: int, learning_rate: float | None = None) -> StepStats: ...
    def reset_gradients(self) -> None: ...


class StepSource(Protocol):
    """Where steps come from: a hub with satellites (cells/members.py), or `LocalSteps`."""

    @property
    def core(self) -> CoreMember: ...
    def open_step(self, step: int, rules: QueueRules) -> StepQueue: ...
    def publish_weights(self, policy_version: int) -> str: ...


class LocalSteps:
    """Steps of a trainer that shares them with nobody. Example: LocalSteps(replica, trainer.weights_digest, "cell")"""

    def __init__(self, replica: Replica, digest: Callable[[], str], owner: str) -> None:
        self.core = CoreMember(replica)
        self._digest = digest
        self._owner = owner
        self._version = 0
        self._weights = ""

    def publish_weights(self, policy_version: int) -> str:
        """The trainer's weights have this version now."""
        self._version, self._weights = policy_version, self._digest()
        return self._weights

    def open_step(self, step: int, rules: QueueRules) -> StepQueue:
        """A step from these weights; it does not survive this process."""
        identity = StepIdentity(step=step, policy_version=self._version, weights=self._weights)
        return StepQueue(identity, rules, owner=self._owner)


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    step: int
    policy_version: int
    queue: StepQueue
    learning_rate: float
    opened_s: float
    sealed_s: float = 0.0
    packing_s: float = 0.0
    weights_before: str = ""
    result: dict[str, Any] | None = None
    error: str = ""
    stepping: bool = False

    @property
    def over(self) -> bool:
        return self.result is not None or bool(self.error)


class StepDesk:
    """See the module. Example: desk.open(3, policy_version=3, learning_rate=1e-6); desk.seal(48); desk.finish(10.0)"""

    def __init__(
        self, source: StepSource, trainer: SteppingTrainer, rules: QueueRules, on_version: Callable[[int], None]
    ) -> None:
        """`on_version` is called on the trainer's thread as soon as the weights have a new version."""
        self._source = source
        self._trainer = trainer
        self._rules = rules
        self._on_version = on_version
        self._changed = threading.Condition()
        self._open: _OpenStep | None = None

    # -- the flow's verbs ------------------------------------------------------------------------------------------

    def open(self, step: int, *, policy_version: int, held_version: int, learning_rate: float) -> dict[str, Any]:
        """Open a step of the weights of `policy_version`, which must be what the trainer holds. Safe to repeat.

        After a restart it holds what the journal of this very step knows. Raises ValueError while another is open.
        """
        with self._changed:
            found = self._open
            if found is not None and (found.step, found.policy_version) == (step, policy_version) and not found.error:
                return self.describe() or {}
            if found is not None and not found.over:
                raise ValueError(f"step {found.step} is open: finish or abort it before step {step}")
            if policy_version != held_version:
                raise ValueError(f"the trainer holds policy version {held_version}, step {step} is of {policy_version}")
            queue = self._source.open_step(step, self._rules)
            if queue.identity.policy_version != policy_version:
                queue.abort("its weights are not offered")
                raise GyreError(f"version {policy_version} could not be offered to satellites: see the cell's log")
            self._open = _OpenStep(
                step=step,
                policy_version=policy_version,
                queue=queue,
                learning_rate=learning_rate,
                opened_s=time.monotonic(),
            )
            return self.describe() or {}

    def add_group(self, group_id: str, branches: Sequence[TrainingBranch]) -> dict[str, Any]:
        """A graded group becomes micro-steps at once; one without signal has none. Safe to repeat."""
        found = self._found()
        started = time.monotonic()
        if found.queue.has_group(group_id):
            return {"group_id": group_id, "known": True, "micro_steps": list(found.queue.group(group_id))}
        if found.over:
            raise ValueError(f"step {found.step} is over: group {group_id} belongs to another")
        try:
            steps = found.queue.add_group(group_id, branches)
        except ValueError:
            if not found.queue.has_group(group_id):  # else two requests met
                raise
            steps = found.queue.group(group_id)
        found.packing_s += time.monotonic() - started
        return {"group_id": group_id, "known": False, "micro_steps": list(steps)}

    def seal(self, num_rollouts: int) -> dict[str, Any]:
        """No more groups come; the step divides by `num_rollouts`. Safe to repeat with the same number."""
        if num_rollouts < 0:
            raise ValueError(f"a step divides by the rollouts that it includes, got {num_rollouts}")
        found = self._found()
        if not found.over:
            found.queue.seal(num_rollouts)
            found.sealed_s = found.sealed_s or time.monotonic()
        return self.describe() or {}

    def finish(self, wait_s: float) -> dict[str, Any] | None:
        """The finished step's statistics and account; None while it runs, after waiting for `wait_s` at most.

        Raises TrainError for a step that was refused: weights and version are as before, the groups the caller's.
        """
        found = self._found()
        with self._changed:
            self._changed.wait_for(lambda: found.over, max(0.0, min(wait_s, MAX_WAIT_S)))
            if found.error:
                raise TrainError(found.error)
            return found.result

    def abort(self) -> bool:
        """Give the open step up; returns whether there was one. The trainer's gradients are then to be reset.

        One that takes its optimizer step at this moment is not given up but finished.
        """
        with self._changed:
            found = self._open
            if found is None:
                return False
            self._changed.wait_for(lambda: found.over or not found.stepping)
            if found.over:
                return False
            self._open = None
        found.queue.abort("it was given up")
        return True

    def gone(self, trainer: str, reason: str) -> tuple[str, ...]:
        """A member's process has ended: others compute its work from now on. Returns the sessions that are lost."""
        found = self._open
        return found.queue.gone(trainer, reason) if found is not None and not found.over else ()

    @property
    def running(self) -> bool:
        """Whether a step is open that is neither finished nor refused."""
        found = self._open
        return found is not None and not found.over

    def describe(self) -> dict[str, Any] | None:
        """The step for /status; None before the first."""
        found = self._open
        if found is None:
            return None
        state = found.queue.status()
        names = ("sealed", "groups", "pending", "leased", "completed", "taken", "requeued", "trainers")
        return {
            "step": found.step,
            "policy_version": found.policy_version,
            **{name: state[name] for name in names},
            "finished": found.result is not None,
            "error": found.error,
        }

    # -- the trainer's thread --------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let `work` look at its pause flag at once."""
        found = self._open
        if found is not None:
            found.queue.wake()

    def work(self, pause: threading.Event) -> None:
        """Work the open step off until it is stepped, refused, given up, or `pause` is set. Raises nothing of it."""
        found = self._open
        if found is None or found.over:
            return
        try:
            if not found.weights_before:
                found.weights_before = self._trainer.weights_digest()
            account = self._source.core.run(found.queue, pause)
            if account is None:
                return
            with self._changed:
                if self._open is not found:
                    raise TrainError("it was given up")
                found.stepping = True
            started = time.monotonic()
            stats = self._step(found, bool(account.taken))
            stepped_s = time.monotonic() - started
        except Exception as error:
            if not isinstance(error, GyreError | ValueError):
                logger.exception("step %d failed", found.step)
            logger.error("step %d is refused: %s", found.step, error)
            found.queue.abort(f"{type(error).__name__}: {error}")
            with self._changed:
                found.error = str(error) or type(error).__name__
                self._changed.notify_all()
            return
        found.queue.finish()
        version = found.policy_version + 1
        self._on_version(version)
        started = time.monotonic()
        try:
            self._source.publish_weights(version)
        except Exception:  # the step is done all the same; the next one will not open
            logger.exception("the weights of version %d cannot be offered", version)
        with self._changed:
            now = time.monotonic()
            found.result = {
                **stats,
                "account": account.to_json(),
                "weights_before": found.weights_before,
                "policy_version": version,
                "packing_s": found.packing_s,
                "seconds": stepped_s,  # of the optimizer step, gradients_s included
                "offer_s": now - started,
                **self._source.core.seconds,
                "tail_s": now - (found.sealed_s or found.opened_s),  # from the last group on
                "step_s": now - found.opened_s,
            }
            self._changed.notify_all()

    def _step(self, found: _OpenStep, has_gradient: bool) -> dict[str, Any]:
        if has_gradient:
            num_rollouts = found.queue.num_rollouts
            assert num_rollouts is not None, "a sealed step knows its rollouts"
            return asdict(self._trainer.optimizer_step(num_rollouts, found.learning_rate))
        self._trainer.reset_gradients()
        return {"grad_norm": 0.0, "learning_rate": found.learning_rate, "gradients_s": 0.0, "duration_s": 0.0}

    def _found(self) -> _OpenStep:
        found = self._open
        if found is None:
            raise ValueError("no step is open")
        return found
