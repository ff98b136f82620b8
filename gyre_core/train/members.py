"""The two ends of one step with several replicas: the core, which sums and steps, and the satellites.

    satellite: pull weights -> join -> claim, compute, complete ... -> hand the gradient in -> wait for the end
    core:      claim, compute, complete ... -> queue drained -> read the satellites' gradients, add -> step -> publish

Enters: a step's queue (its own, or over HTTP) and a replica. Leaves: on the core the step's summed, undivided gradient,
to be divided once and stepped. Invariants: a gradient is added whole or not at all, in the order in which the sessions
joined; a satellite keeps its gradient until the step is over, so that a core that died can take it again; a satellite
never steps.
"""

import logging
import threading
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
        """All parameters in a fixed order; writing to them changes the model."""
        ...


class CoreMember:
    """The core's end. Use from the trainer's thread.

    Example: account = CoreMember(replica, SharedMemoryReader()).run(queue)
    """

    def __init__(self, replica: Replica, reader: BufferReader) -> None:
        self._replica = replica
        self._reader = reader
        self._staging: Tensor | None = None

    def run(self, queue: StepQueue) -> StepAccount:
        """Work until all of the step is in the replica's gradient; the caller then steps and calls `queue.finish()`.

        Raises TrainError when the step must be refused; the gradients are then dropped, the queue aborted.
        """
        self._replica.reset_gradients()
        try:
            while True:
                found = queue.owner_next()
                if found is None:
                    queue.wait(_WAIT_S)
                elif found == "closed":
                    return queue.account()
                elif isinstance(found, Work):
                    stats = self._replica.compute(branches_from_ipc(found.body))
                    queue.complete(found.lease, stats)
                else:
                    for take in found:
                        self._take(queue, take.session, take.offer)
        except BaseException as error:
            self._replica.reset_gradients()
            queue.abort(f"{type(error).__name__}: {error}")
            raise

    def _take(self, queue: StepQueue, session: str, offer: BufferOffer) -> None:
        buffers = self._replica.gradients()
        try:
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
    """A satellite's end: runs until it is told to stop.

    Example: Satellite("cell-1", client, replica, buffer, reader).run(threading.Event())
    """

    def __init__(
        self, name: str, client: QueueClient, replica: Replica, buffer: OfferedBuffer, reader: BufferReader
    ) -> None:
        """`buffer` has the size of the replica's gradients; `reader` reads the core's weights."""
        self.name = name
        self._client = client
        self._replica = replica
        self._buffer = buffer
        self._reader = reader
        self._held: str | None = None  # checksum of the weights
        self._version = -1
        self.counts = {"micro_steps": 0, "failed": 0, "cut_off": 0, "handed_over": 0, "pulls": 0}

    def run(self, stop: threading.Event) -> None:
        """Follow the core from step to step. Returns after `stop`, at the next answer of the core."""
        while not stop.is_set():
            try:
                if self._held is None:
                    self._pull_weights(stop)
                    continue
                session = self._client.join(self.name, policy_version=self._version, weights=self._held)
                if session is not None:
                    self._work(session, stop)
            except StaleStepError as error:
                logger.info("%s: %s", self.name, error)
                self._pull_weights(stop)
            except CoreUnreachableError as error:
                logger.warning("%s: %s", self.name, error)
                stop.wait(_RETRY_S)

    def _pull_weights(self, stop: threading.Event) -> None:
        found = self._again(lambda: self._client.weights(self._version, self._held), stop)
        if found is None:
            return
        version, offer = found
        if offer.checksum == self._held:  # a step that changed nothing
            self._version = version
            return
        parameters = self._replica.weights()
        try:
            memory = pull(self._reader, offer, size_bytes=flat_bytes(parameters), label=f"v{version}")
        except TransferError as error:  # the core has overwritten it with newer ones, or is gone
            logger.warning("%s: weights of version %d were not pulled: %s", self.name, version, error)
            stop.wait(_RETRY_S)
            return
        with torch.no_grad():
            for parameter, value in zip(parameters, unflatten(memory, parameters), strict=True):
                parameter.copy_(value)
        self._held, self._version = offer.checksum, version
        self.counts["pulls"] += 1

    def _work(self, session: str, stop: threading.Event) -> None:
        """One session, from an empty gradient to its end."""
        done: list[str] = []
        self._replica.reset_gradients()
        try:
            while not stop.is_set():
                found = self._again(lambda: self._client.claim(session), stop)
                if isinstance(found, MemberWork):
                    if not self._compute(session, found, done, stop):
                        return
                elif found == "hand_over":
                    flatten(self._replica.gradients(), self._buffer.memory)
                    offer = self._buffer.offer(session)
                    self._again(lambda offer=offer: self._client.offer(session, offer, done), stop)
                    self.counts["handed_over"] += 1
                elif found is not None:  # rejoin, over
                    return
        except CutOffError as error:
            logger.warning("%s: %s", self.name, error)
            self.counts["cut_off"] += 1
        finally:
            self._replica.reset_gradients()

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
        while not stop.is_set():
            try:
                return request()
            except CoreUnreachableError as error:
                logger.warning("%s: %s", self.name, error)
                stop.wait(_RETRY_S)
        return None
