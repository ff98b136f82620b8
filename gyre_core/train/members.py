"""The two ends of one step with several replicas: the core, which sums and steps, and the satellites.

    satellite: pull weights -> join -> claim, compute, complete ... -> hand the gradient in -> wait for the end
    core:      claim, compute, complete ... -> queue drained -> read the satellites' gradients, add -> step -> publish

A satellite that leaves in the middle of a step copies its gradient into a buffer, offers it and goes at once: reads are
one-sided, so the core takes it between two of its own micro-steps, or when it begins to train, or after it was started
anew, and the satellite need not wait. A core that does not answer within `leave_limit_s` cuts the session off later.

Enters: a step's queue (its own, or over HTTP) and a replica. Leaves: on the core the step's summed, undivided gradient,
to be divided once and stepped. Invariants: a gradient is added whole or not at all, in the order in which the sessions
joined (those that left come when they are seen); a satellite keeps its gradients until the step is over, so that a core
that died can take them again; a satellite never steps.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gyre_core.errors import TrainError, TransferError
from gyre_core.train.queue import CutOffError
from gyre_core.train.queue_client import CoreUnreachableError, MemberWork, QueueClient
from gyre_core.train.queue_records import StaleStepError, StepAccount, Work
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.branches import branches_from_ipc
from gyre_core.transfer.gradients import BufferOffer, BufferReader, OfferedBuffer, flat_bytes, flatten, pull, unflatten
from gyre_core.types import TrainingBranch

logger = logging.getLogger(__name__)
T = TypeVar("T")

_WAIT_S = 5.0  # longest sleep of the core between two looks at its queue
_RETRY_S = 0.5  # pause of a satellite whose core does not answer


class Replica(Protocol):
    """A trainer as a member uses it (see gyre_core/train/megatron/replica.py)."""

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        """Forward and backward of one micro-step; its gradient is added to the buffers. Returns its statistics.

        Raises TrainError for a result that is not finite; all gradients are then dropped.
        """
        ...

    def gradients(self) -> list[Tensor]:
        """The fp32 buffers of unnormalised sums, on the host or a device."""
        ...

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """Add another replica's sums."""
        ...

    def reset_gradients(self) -> None:
        """Drop all sums."""
        ...

    def weights(self) -> list[Tensor]:
        """All parameters in a fixed order."""
        ...

    def load_weights(self, values: Sequence[Tensor]) -> None:
        """Take these for the parameters, in that order."""
        ...

    def gradient_shapes(self) -> list[Tensor]:
        """Tensors shaped and typed as `gradients`, with any content or none."""
        ...

    def weight_shapes(self) -> list[Tensor]:
        """The same of `weights`."""
        ...


class CoreMember:
    """The core's end. Use from the trainer's thread.

    Example: account = CoreMember(replica, SharedMemoryReader()).run(queue)
    """

    def __init__(self, replica: Replica, reader: BufferReader | None = None) -> None:
        """`reader` reads the satellites' gradients; a core without satellites needs none."""
        self._replica = replica
        self._reader = reader
        self._staging: Tensor | None = None
        self._begun: StepQueue | None = None  # its sums are in the replica
        self.seconds: dict[str, float] = {}  # of the step: forward and backward, take-overs, waiting

    def run(self, queue: StepQueue, pause: threading.Event | None = None) -> StepAccount | None:
        """Work until all of the step is in the replica's gradient; the caller then steps and calls `queue.finish()`.

        Returns None at the first micro-step boundary after `pause` (then `queue.wake()`); the sums stay, and the next
        call with the same queue goes on. Raises TrainError when the step must be refused; the gradients are then
        dropped, the queue aborted.
        """
        try:
            if self._begun is not queue:
                self._replica.reset_gradients()
                self._begun, self.seconds = queue, {"compute_s": 0.0, "take_over_s": 0.0, "idle_s": 0.0}
            while pause is None or not pause.is_set():
                if self._next(queue):
                    return queue.account()
            return None
        except BaseException as error:
            self._begun = None
            self._replica.reset_gradients()
            queue.abort(f"{type(error).__name__}: {error}")
            raise

    def _next(self, queue: StepQueue) -> bool:
        """One thing after the other; True once the step is closed."""
        found, started = queue.owner_next(), time.monotonic()
        if found == "closed":
            return True
        if found is None:
            queue.wait(_WAIT_S)
            what = "idle_s"
        elif isinstance(found, Work):
            stats = self._replica.compute(branches_from_ipc(found.body))
            queue.complete(found.lease, stats)
            what = "compute_s"
        else:
            for take in found:
                self._take(queue, take.session, take.offer)
            what = "take_over_s"
        self.seconds[what] += time.monotonic() - started
        return False

    def _take(self, queue: StepQueue, session: str, offer: BufferOffer) -> None:
        buffers = self._replica.gradient_shapes()
        try:
            if self._reader is None:
                raise TransferError("this core reads no gradients")
            memory = pull(self._reader, offer, size_bytes=flat_bytes(buffers), label=session, staging=self._staging)
            taken = unflatten(memory, buffers)
            if not all(bool(torch.isfinite(buffer.sum())) for buffer in taken):
                raise TransferError("the gradient is not finite")
            num_micro_steps = queue.taken(session)
        except (TransferError, CutOffError) as error:
            self._staging = None
            queue.lost(session, str(error))
            return
        self._staging = memory
        self._replica.add_gradients(taken, num_micro_steps)


class Satellite:
    """A satellite's end: runs until it is told to stop, again and again.

    Example: Satellite("cell-1", client, replica, buffer, reader).run(threading.Event())
    """

    def __init__(
        self,
        name: str,
        client: QueueClient,
        replica: Replica,
        buffer: OfferedBuffer,
        reader: BufferReader,
        *,
        make_buffer: Callable[[], OfferedBuffer] | None = None,
        leave_limit_s: float = 10.0,
    ) -> None:
        """`buffer` has the size of the replica's gradients; `reader` reads the core's weights.

        `make_buffer` makes one more, for a member that leaves a step, comes back and leaves it again; without it the
        older gradient is given up then. `leave_limit_s`: how long a member that leaves tries to reach its core.
        """
        self.name = name
        self.leave_limit_s = leave_limit_s
        self._client = client
        self._replica = replica
        self._reader = reader
        self._make_buffer = make_buffer
        self._free: list[OfferedBuffer] = [buffer]
        self._left: list[tuple[str, OfferedBuffer]] = []  # (session, buffer): gradients that may still be read
        self._made: list[OfferedBuffer] = []
        self._give_up_s: float | None = None
        self._held: str | None = None  # checksum of the weights
        self._stale = False  # the core has said that it trains others
        self.version = -1  # of the weights; -1 before the first pull
        self.session: str | None = None  # while it works in a step
        self.counts = {"micro_steps": 0, "failed": 0, "cut_off": 0, "handed_over": 0, "pulls": 0, "left": 0}

    def run(self, stop: threading.Event) -> None:
        """Follow the core from step to step. Returns after `stop` (see `interrupt`), its gradient handed in."""
        self._give_up_s = None
        while not stop.is_set():
            try:
                if self._held is None or self._stale:
                    self._pull_weights(stop)
                    continue
                session = self._client.join(self.name, policy_version=self.version, weights=self._held)
                if session is not None:
                    self._work(session, stop)
            except StaleStepError as error:
                logger.info("%s: %s", self.name, error)
                self._stale = True
            except CoreUnreachableError as error:
                logger.warning("%s: %s", self.name, error)
                stop.wait(_RETRY_S)

    def interrupt(self) -> None:
        """After `stop` was set, from another thread: requests that wait for news end now."""
        with contextlib.suppress(CoreUnreachableError):
            self._client.leave(self.name)

    def pull(self, policy_version: int | None = None) -> None:
        """Hold the weights that the core offers now; not while `run` runs.

        Raises CoreUnreachableError, and TransferError when they do not arrive whole or are not this version.
        """
        found = self._client.weights(self.version, self._held, trainer=self.name, wait_s=0.0)
        if found is not None:
            self._copy(*found)
        if policy_version is not None and self.version != policy_version:
            raise TransferError(f"the core offers version {self.version}, not {policy_version}")

    @property
    def held(self) -> str | None:
        """Checksum of the weights that were pulled last."""
        return self._held

    def close(self) -> None:
        """Let go of the buffers that were made here."""
        for buffer in self._made:
            buffer.close()

    def _pull_weights(self, stop: threading.Event) -> None:
        found = self._client.weights(self.version, self._held, trainer=self.name)
        self._stale = False  # if they are stale all the same, the core says it again
        if found is None:
            return
        try:
            self._copy(*found)
        except TransferError as error:  # the core has overwritten it with newer ones, or is gone
            logger.warning("%s: weights of version %d were not pulled: %s", self.name, found[0], error)
            stop.wait(_RETRY_S)

    def _copy(self, version: int, offer: BufferOffer) -> None:
        if offer.checksum != self._held:  # else a step that changed nothing
            parameters = self._replica.weight_shapes()
            memory = pull(self._reader, offer, size_bytes=flat_bytes(parameters), label=f"v{version}")
            self._replica.load_weights(unflatten(memory, parameters))
            self.counts["pulls"] += 1
        self._held, self.version = offer.checksum, version

    def _work(self, session: str, stop: threading.Event) -> None:
        """One session, from an empty gradient to its end."""
        done: list[str] = []
        told = False
        self._replica.reset_gradients()
        self.session = session
        try:
            while not self._gives_up(stop):
                if stop.is_set() and not told:
                    told = self._again(lambda: self._client.leave(self.name) or True, stop) is True
                    continue
                found = self._again(lambda: self._client.claim(session), stop)
                if isinstance(found, MemberWork):
                    if not self._compute(session, found, done, stop):
                        return
                elif found == "hand_over":
                    self._hand_over(session, done, stop)
                elif found == "left":
                    self.counts["left"] += 1
                    return
                elif found is not None:  # rejoin, over
                    return
        except CutOffError as error:
            logger.warning("%s: %s", self.name, error)
            self.counts["cut_off"] += 1
        finally:
            self.session = None
            self._replica.reset_gradients()

    def _hand_over(self, session: str, done: list[str], stop: threading.Event) -> None:
        buffer = self._buffer_for(session)
        flatten(self._replica.gradients(), buffer.memory)
        offer = buffer.offer(session)
        self._again(lambda: self._client.offer(session, offer, done), stop)
        self.counts["handed_over"] += 1

    def _buffer_for(self, session: str) -> OfferedBuffer:
        """One whose last gradient is of a step that is over, or of this session."""
        step = session.rsplit("/", 1)[0]
        for owner, buffer in [entry for entry in self._left if entry[0].rsplit("/", 1)[0] != step]:
            self._left.remove((owner, buffer))
            self._free.append(buffer)
        mine = next((buffer for owner, buffer in self._left if owner == session), None)
        if mine is not None:
            return mine
        if not self._free:
            if self._make_buffer is not None:
                self._made.append(self._make_buffer())
                self._free.append(self._made[-1])
            else:
                self._free.append(self._left.pop(0)[1])
        self._left.append((session, self._free.pop()))
        return self._left[-1][1]

    def _compute(self, session: str, work: MemberWork, done: list[str], stop: threading.Event) -> bool:
        try:
            stats = self._replica.compute(branches_from_ipc(work.body))
        except (TrainError, ValueError) as error:
            logger.error("%s: %s refused: %s", self.name, work.micro_step, error)
            self.counts["failed"] += 1
            reason = str(error)
            self._again(lambda: self._client.fail(session, work, reason), stop)
            return False
        self._again(lambda: self._client.complete(session, work, stats), stop)
        done.append(work.micro_step)
        self.counts["micro_steps"] += 1
        return True

    def _again(self, request: Callable[[], T], stop: threading.Event) -> T | None:
        """Send a request until the core answers: it may be restarting, and the gradient is still good."""
        while not self._gives_up(stop):
            try:
                return request()
            except CoreUnreachableError as error:
                logger.warning("%s: %s", self.name, error)
                if stop.is_set():
                    time.sleep(_RETRY_S)
                else:
                    stop.wait(_RETRY_S)
        return None

    def _gives_up(self, stop: threading.Event) -> bool:
        """Whether it was told to stop and has tried for long enough since."""
        if not stop.is_set():
            return False
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + self.leave_limit_s
        return time.monotonic() >= self._give_up_s
