"""A MegatronTrainer as a member of a step (members.Replica)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_for_training
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
