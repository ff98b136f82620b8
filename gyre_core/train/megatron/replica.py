"""Trainers as members of a step (members.Replica)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.sums import load_parameters, parameters, shaped
from gyre_core.train.packing import PackedMicroStep, pack_for_training
from gyre_core.train.parallel import ParallelTrainer
from gyre_core.train.stats import combine_stats
from gyre_core.transfer.gradients import flat_bytes, flatten, unflatten
from gyre_core.transfer.shared_memory import SharedMemoryBuffer
from gyre_core.types import TrainingBranch


class MegatronReplica:
    """One process and one layout: members of a step have equal models, so equal buffers.

    Example: CoreMember(MegatronReplica(trainer), SharedMemoryReader()).run(queue)
    """

    def __init__(self, trainer: MegatronTrainer) -> None:
        self.trainer = trainer

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        """Pack as the trainer's configuration says, forward and backward; raises TrainError, gradients dropped."""
        packed = pack_for_training(branches, self.trainer.config)
        return combine_stats([asdict(self.trainer.micro_step(part)) for part in packed])

    def gradients(self) -> list[Tensor]:
        """Megatron's fp32 buffers."""
        return self.trainer.gradient_buffers()

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """Add another replica's sums."""
        self.trainer.add_gradients(buffers, num_micro_steps)

    def reset_gradients(self) -> None:
        """Drop all sums."""
        self.trainer.reset_gradients()

    def weights(self) -> list[Tensor]:
        """The model's parameters by name order, in the model's own memory."""
        return parameters(self.trainer.model)

    def load_weights(self, values: Sequence[Tensor]) -> None:
        """Take the core's."""
        load_parameters(self.trainer.model, values)

    def gradient_shapes(self) -> list[Tensor]:
        """Shapes and types of `gradients`."""
        return self.trainer.gradient_buffers()

    def weight_shapes(self) -> list[Tensor]:
        """Shapes and types of `weights`."""
        return parameters(self.trainer.model)


class ParallelReplica:
    """A trainer of several processes as a member: its parts go through memory of this machine, one after the other.

    Members of a step have the same layout: part i of one is added to part i of the other. With data_parallel the
    gradient that is handed over is the sum of the copies.

    Example: CoreMember(ParallelReplica(ParallelTrainer(path, TrainConfig(tensor_parallel=2)))).run(queue)
    """

    def __init__(self, trainer: ParallelTrainer) -> None:
        self.trainer = trainer
        layouts = trainer.layouts()
        self._gradients = _Staging([shaped(gradients) for gradients, _ in layouts])
        self._weights = _Staging([shaped(weights) for _, weights in layouts])

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        """As MegatronReplica's; with data_parallel the micro-step is dealt out in parts where it can be split."""
        packed = self._packed(branches)
        return combine_stats([asdict(stats) for stats in self.trainer.micro_steps(packed)])

    def gradients(self) -> list[Tensor]:
        """The parts' sums, until the next call."""
        self.trainer.stage("gradients", self._gradients.path, self._gradients.offsets)
        return self._gradients.tensors()

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """Add another replica's sums."""
        self._gradients.fill(buffers)
        self.trainer.add_staged_gradients(self._gradients.path, self._gradients.offsets, num_micro_steps)

    def reset_gradients(self) -> None:
        """Drop all sums."""
        self.trainer.reset_gradients()

    def weights(self) -> list[Tensor]:
        """The parts' parameters, until the next call."""
        self.trainer.stage("weights", self._weights.path, self._weights.offsets)
        return self._weights.tensors()

    def load_weights(self, values: Sequence[Tensor]) -> None:
        """Take the core's."""
        self._weights.fill(values)
        self.trainer.load_staged_weights(self._weights.path, self._weights.offsets)

    def gradient_shapes(self) -> list[Tensor]:
        """Shapes and types of `gradients`."""
        return self._gradients.like

    def weight_shapes(self) -> list[Tensor]:
        """Shapes and types of `weights`."""
        return self._weights.like

    def close(self) -> None:
        """Give the memory back."""
        self._gradients.close()
        self._weights.close()

    def _packed(self, branches: Sequence[TrainingBranch]) -> list[PackedMicroStep]:
        config = self.trainer.config
        whole = pack_for_training(branches, config)
        if config.data_parallel == 1 or len(whole) >= config.data_parallel:
            return whole
        largest = max(len(branch.token_ids) for branch in branches)
        budget = max(largest, -(-sum(part.num_tokens for part in whole) // config.data_parallel))
        try:
            return pack_for_training(branches, config.model_copy(update={"micro_step_tokens": budget}))
        except ValueError:  # a rollout that must stay whole is larger
            return whole


class _Staging:
    """Memory that the ranks and their driver share; its room is taken at the first use."""

    def __init__(self, parts: Sequence[list[Tensor]]) -> None:
        self.like = [tensor for part in parts for tensor in part]
        sizes = [flat_bytes(part) for part in parts]
        self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._buffer: SharedMemoryBuffer | None = None

    @property
    def path(self) -> Path:
        return self._opened().path

    def tensors(self) -> list[Tensor]:
        """What stands in it."""
        return unflatten(self._opened().memory, self.like)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Write all parts."""
        flatten(list(values), self._opened().memory)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _opened(self) -> SharedMemoryBuffer:
        if self._buffer is None:
            self._buffer = SharedMemoryBuffer(sum(tensor.nbytes for tensor in self.like))
        return self._buffer
