"""Trainers as members of a step (members.Replica)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from gyre_core.errors import TrainError
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import PackedMicroStep, pack_for_training
from gyre_core.train.parallel import ParallelTrainer
from gyre_core.train.stats import combine_stats
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
        return [parameter.detach() for _, parameter in sorted(self.trainer.model.named_parameters())]


class ParallelReplica:
    """A trainer of several processes as a core without satellites: its gradient stays in its ranks.

    Example: CoreMember(ParallelReplica(ParallelTrainer(path, TrainConfig(tensor_parallel=2)))).run(queue)
    """

    def __init__(self, trainer: ParallelTrainer) -> None:
        self.trainer = trainer

    def compute(self, branches: Sequence[TrainingBranch]) -> Mapping[str, float]:
        """As MegatronReplica's; with data_parallel the micro-step is dealt out in parts where it can be split."""
        packed = self._packed(branches)
        return combine_stats([asdict(stats) for stats in self.trainer.micro_steps(packed)])

    def gradients(self) -> list[Tensor]:
        """Raises TrainError: nobody else reads or adds to them."""
        raise TrainError("a trainer of several processes shares its steps with no satellite")

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """As `gradients`."""
        raise TrainError("a trainer of several processes shares its steps with no satellite")

    def reset_gradients(self) -> None:
        """Drop all sums."""
        self.trainer.reset_gradients()

    def weights(self) -> list[Tensor]:
        """As `gradients`."""
        raise TrainError("a trainer of several processes shares its steps with no satellite")

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
