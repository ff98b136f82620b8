"""A replica whose micro-steps are spans in the traces of the rollouts that they train."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from gyre_core.tracing.spans import Tracing
from gyre_core.train.members import Replica
from gyre_core.types import TrainingBranch


class TracedReplica:
    """Another replica, and a span `train.micro_step` for each rollout of each micro-step.

    Example: CoreMember(TracedReplica(MegatronReplica(trainer), tracing, "cell-0"))
    """

    def __init__(self, replica: Replica, tracing: Tracing, cell_id: str) -> None:
        self._replica = replica
        self._tracing = tracing
        self._cell_id = cell_id

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        """As the replica's."""
        started_s, error = time.time(), ""
        try:
            return self._replica.compute(branches)
        except BaseException as failure:
            error = repr(failure)
            raise
        finally:
            self._record(branches, started_s, error)

    def _record(self, branches: Sequence[TrainingBranch], started_s: float, error: str) -> None:
        ended_s = time.time()
        own: dict[str, list[TrainingBranch]] = {}
        for branch in branches:
            own.setdefault(branch.rollout_id, []).append(branch)
        for rollout_id, trained in own.items():
            about = {
                "gyre.cell": self._cell_id,
                "gyre.branches": len(trained),
                "gyre.targets": sum(int(branch.target.sum()) for branch in trained),
                "gyre.rollouts_of_micro_step": len(own),
            }
            parent = self._tracing.rollout(rollout_id)
            self._tracing.record("train.micro_step", started_s, ended_s, about, parent=parent, error=error)

    def gradients(self) -> list[Tensor]:
        """As the replica's."""
        return self._replica.gradients()

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """As the replica's."""
        self._replica.add_gradients(buffers, num_micro_steps)

    def reset_gradients(self) -> None:
        """As the replica's."""
        self._replica.reset_gradients()

    def weights(self) -> list[Tensor]:
        """As the replica's."""
        return self._replica.weights()

    def load_weights(self, values: Sequence[Tensor]) -> None:
        """As the replica's."""
        self._replica.load_weights(values)

    def gradient_shapes(self) -> list[Tensor]:
        """As the replica's."""
        return self._replica.gradient_shapes()

    def weight_shapes(self) -> list[Tensor]:
        """As the replica's."""
        return self._replica.weight_shapes()
