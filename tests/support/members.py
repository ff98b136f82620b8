"""Members of a step without a real model: a replica whose gradient is the sum of its branches' tokens; real HTTP.

Gradients are small integers in fp32, so sums are exact and independent of order: what a step should hold is known.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.errors import TrainError
from gyre_core.train.members import Satellite
from gyre_core.train.queue_client import QueueClient
from gyre_core.transfer.gradients import BufferReader, flat_bytes
from gyre_core.transfer.shared_memory import SharedMemoryBuffer, SharedMemoryReader
from gyre_core.types import TrainingBranch
from tests.support.training import make_branch

VOCAB = 64
SECRET = "members-secret"
POISON = 63  # a branch with this token has no finite gradient


class CountingReplica:
    """gradient[t] counts the targets with token t; a weight moves by the counts.

    `before` is called before each micro-step.
    """

    def __init__(self, before: Callable[[Sequence[TrainingBranch]], object] = lambda branches: None) -> None:
        self.weight = torch.zeros(VOCAB)
        self.sums = torch.zeros(VOCAB)
        self.before = before
        self.num_computed = 0

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        self.before(branches)
        self.num_computed += 1
        for branch in branches:
            ids = torch.from_numpy(branch.token_ids[branch.target].astype("int64"))
            if bool((ids == POISON).any()):
                self.reset_gradients()
                raise TrainError("its gradient is not finite")
            self.sums += torch.bincount(ids, minlength=VOCAB)
        return {"loss": float(len(branches)), "duration_s": 0.0}

    def gradients(self) -> list[Tensor]:
        return [self.sums]

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        self.sums += buffers[0]

    def reset_gradients(self) -> None:
        self.sums.zero_()

    def weights(self) -> list[Tensor]:
        return [self.weight]

    def load_weights(self, values: Sequence[Tensor]) -> None:
        self.weight.copy_(values[0])

    gradient_shapes, weight_shapes = gradients, weights

    def step(self) -> dict[str, float]:
        """Divide by nothing, step, clear."""
        self.weight += self.sums
        total = float(self.sums.sum())
        self.reset_gradients()
        return {"total": total}


def group(
    name: str, *, rollouts: int = 2, length: int = 6, token: int = 0, poison: bool = False
) -> list[TrainingBranch]:
    """A group whose rollouts differ from the first token on; `length` targets each."""
    made = []
    for index in range(rollouts):
        ids = [index] + [(token + index + at) % (VOCAB - 1) for at in range(length)]
        if poison and index == 0:
            ids[-1] = POISON
        made.append(make_branch(ids, range(1, length + 1), rollout_id=f"{name}-r{index}", group_id=name))
    return made


def target_counts(groups: Sequence[Sequence[TrainingBranch]]) -> Tensor:
    """The gradient that a step over these groups must hold."""
    counts = torch.zeros(VOCAB)
    for branches in groups:
        for branch in branches:
            ids = torch.from_numpy(branch.token_ids[branch.target].astype("int64"))
            counts += torch.bincount(ids, minlength=VOCAB)
    return counts


@contextmanager
def counting_hub(
    work_dir: Path, replica: CountingReplica | None = None, *, port: int = 0, reader: BufferReader | None = None
) -> Iterator[MemberHub]:
    """A served hub with version 0 published."""
    settings = HubSettings(secret=SECRET, work_dir=work_dir, port=port)
    hub = MemberHub(replica or CountingReplica(), settings, reader=reader)
    with hub:
        hub.publish_weights(0)
        yield hub


@contextmanager
def satellite_thread(
    name: str, url: str, replica: CountingReplica, *, stop: threading.Event | None = None
) -> Iterator[Satellite]:
    """A satellite of this process, stopped at the end, or by `stop` before; its memory goes at the end."""
    stop = stop or threading.Event()
    with (
        QueueClient(url, SECRET, wait_s=0.3) as client,
        SharedMemoryBuffer(flat_bytes(replica.gradients())) as buffer,
    ):
        satellite = Satellite(name, client, replica, buffer, SharedMemoryReader())
        thread = threading.Thread(target=satellite.run, args=(stop,), daemon=True)
        thread.start()
        try:
            yield satellite
        finally:
            stop.set()
            thread.join(20.0)
            assert not thread.is_alive(), f"{name} did not stop"


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a condition of another thread or process; AssertionError when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)
