"""Trainers of several processes as members of a step: what one hands over, the other adds, part by part."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import MegatronReplica, ParallelReplica
from gyre_core.train.parallel import ParallelTrainer
from gyre_core.transfer.gradients import flat_bytes, flatten, unflatten
from tests.support.satellites import groups_of_step, num_rollouts
from tests.support.training import write_tiny_qwen3

pytestmark = pytest.mark.timeout(240)

SETTINGS = {"loss": "grpo", "clip_low": 0.9, "clip_high": 9.0, "learning_rate": 1e-3, "threads": 1}
HALVES = [list(groups_of_step(step, num_groups=3).values()) for step in (0, 1)]
ROLLOUTS = sum(num_rollouts({str(index): group for index, group in enumerate(half)}) for half in HALVES)


@dataclass
class Members:
    core: ParallelTrainer
    satellite: ParallelTrainer
    one: MegatronTrainer


@pytest.fixture(scope="module", params=["tp2", "dp2"])
def members(request, tmp_path_factory) -> Iterator[Members]:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_qwen3(folder / "model")
    before = torch.get_num_threads()
    split = {"tensor_parallel": 2} if request.param == "tp2" else {"data_parallel": 2}
    config = TrainConfig(**SETTINGS, **split)
    made = Members(
        core=ParallelTrainer(folder / "model", config),
        satellite=ParallelTrainer(folder / "model", config),
        one=MegatronTrainer(folder / "model", TrainConfig(**SETTINGS)),
    )
    yield made
    for trainer in (made.core, made.satellite, made.one):
        trainer.close()
    torch.set_num_threads(before)


def over_the_wire(tensors: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    memory = torch.empty(flat_bytes(like), dtype=torch.uint8)
    flatten(tensors, memory)
    return unflatten(memory, like)


def test_sums_of_two_members_step_as_one_trainer_does_and_again_with_the_same_bits(members: Members) -> None:
    core, satellite, one = (
        ParallelReplica(members.core),
        ParallelReplica(members.satellite),
        MegatronReplica(members.one),
    )
    for group in HALVES[0]:
        core.compute(group)
    for group in HALVES[1]:
        satellite.compute(group)
    for half in HALVES:
        for group in half:
            one.compute(group)
    handed = over_the_wire(satellite.gradients(), satellite.gradient_shapes())
    core.add_gradients(over_the_wire(handed, core.gradient_shapes()), len(HALVES[1]))
    whole, expected = members.core.gradients(), members.one.gradients()
    for name, gradient in expected.items():
        assert float((whole[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)) <= 1e-5, name
    first = members.core.optimizer_step(ROLLOUTS)
    alone = members.one.optimizer_step(ROLLOUTS)
    assert first.num_micro_steps >= alone.num_micro_steps  # copies share a micro-step in parts
    assert first.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)

    # The satellite, which has not stepped, takes the core's weights and does the step once more, as a replay does: both
    # halves itself, the second one summed from zero.
    assert members.satellite.weights_digest() != members.core.weights_digest()
    stepped = members.core.weights_digest()
    satellite.reset_gradients()
    for group in HALVES[0]:
        satellite.compute(group)
    members.satellite.put_gradients_aside()
    for group in HALVES[1]:
        satellite.compute(group)
    members.satellite.take_gradients_back()
    members.satellite.optimizer_step(ROLLOUTS)
    assert members.satellite.weights_digest() == stepped

    # New weights reach every copy and part.
    core.compute(HALVES[1][0])
    members.core.optimizer_step(ROLLOUTS)
    satellite.load_weights(over_the_wire(core.weights(), satellite.weight_shapes()))
    assert members.satellite.weights_digest() == members.core.weights_digest() != stepped
    told = [member.logprobs(HALVES[0][0]) for member in (members.satellite, members.core)]
    for ours, theirs in zip(*told, strict=True):
        assert (ours == theirs).all()
    core.close()
    satellite.close()


def test_sums_are_refused_without_a_beginning_or_with_two(members: Members) -> None:
    with pytest.raises(ValueError, match="no sum was begun"):
        members.core.take_gradients_back()
    members.core.put_gradients_aside()
    with pytest.raises(ValueError, match="begun already"):
        members.core.put_gradients_aside()
    members.core.reset_gradients()
    with pytest.raises(ValueError, match="no sum was begun"):
        members.core.take_gradients_back()


def test_gradients_of_another_layout_are_refused(members: Members) -> None:
    core = ParallelReplica(members.core)
    wrong = [torch.zeros(3) for _ in core.gradient_shapes()]
    with pytest.raises(AssertionError):
        core.add_gradients(wrong, 1)
    with pytest.raises(ValueError, match="another model or layout"):
        MegatronReplica(members.one).add_gradients(wrong, 1)
    core.close()
