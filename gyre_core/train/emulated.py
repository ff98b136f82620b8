"""A trainer that takes the time a cost model says: `MegatronTrainer`'s verbs around a gradient of counts.

Enters: packed micro-steps. Leaves: after the cost model's time, a small real gradient, `gradient[t]` the number of
targets with token t modulo its size, and weights that grow by it with each step. So whether everything was trained
exactly once can be read off the weights: they sum to the number of targets trained so far. Counts are exact in fp32.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from gyre_core.config.emulation import EmulationConfig
from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.checkpoint_manifest import CheckpointManifest, SavedCheckpoint, seal_folder
from gyre_core.train.packing import PackedMicroStep
from gyre_core.train.stats import MicroStepStats, StateDifference, StepStats

logger = logging.getLogger(__name__)

_SIZE = 1024  # of the gradient: what travels between members
_STATE = "emulated.json"


class EmulatedTrainer:
    """See the module. `sleep` takes wall seconds; tests give their own.

    Example: trainer = EmulatedTrainer(TrainConfig(), EmulationConfig()); trainer.micro_step(packed)
    """

    def __init__(
        self, config: TrainConfig, emulation: EmulationConfig, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.config = config
        self.step = 0
        self.busy_s = 0.0  # of the cluster, in micro-steps and optimizer steps
        self.model = torch.nn.ParameterDict({"counts": torch.nn.Parameter(torch.zeros(_SIZE), requires_grad=False)})
        self._emulation = emulation
        self._sleep = sleep
        self._sums = torch.zeros(_SIZE)
        self._micro_steps = 0
        self._saved: SavedCheckpoint | None = None

    def micro_step(self, packed: PackedMicroStep, reference_logprobs: np.ndarray | None = None) -> MicroStepStats:
        """Wait as long as the micro-step's tokens take; count its targets."""
        started = time.perf_counter()
        self._take(self._emulation.train.compute_s(packed.num_tokens))
        ids = torch.from_numpy(packed.token_ids[packed.rows.child].astype(np.int64)) % _SIZE
        self._sums += torch.bincount(ids, minlength=_SIZE)
        self._micro_steps += 1
        return MicroStepStats(
            loss=0.0,
            num_tokens=packed.num_tokens,
            num_branch_tokens=packed.num_branch_tokens,
            num_targets=packed.rows.num_rows,
            num_units=packed.num_units,
            clipped_units=0,
            clipped_tokens=0,
            dropped_tokens=0,
            kl=0.0,
            weight_sum=float(packed.rows.weight.sum(dtype=np.float64)),
            ratio_min=1.0,
            ratio_mean=1.0,
            ratio_max=1.0,
            sampler_trainer_max_abs=0.0,
            sampler_trainer_mean_abs=0.0,
            flops=0.0,
            duration_s=time.perf_counter() - started,
        )

    def micro_steps(
        self, packed: Sequence[PackedMicroStep], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> list[MicroStepStats]:
        """One after the other."""
        return [self.micro_step(part) for part in packed]

    def optimizer_step(self, num_rollouts: int, learning_rate: float | None = None) -> StepStats:
        """Wait, add the counts to the weights, clear them. Raises as MegatronTrainer does."""
        started = time.perf_counter()
        if num_rollouts < 1:
            raise ValueError(f"an optimizer step needs at least one included rollout, got {num_rollouts}")
        if self._micro_steps == 0:
            raise TrainError("optimizer step refused: no micro-step since the last one")
        self._take(self._emulation.train.optimizer_s)
        num_micro_steps, total = self._micro_steps, float(self._sums.sum())
        with torch.no_grad():
            self.model["counts"].add_(self._sums)
        self.step += 1
        self.reset_gradients()
        return StepStats(
            step=self.step,
            num_rollouts=num_rollouts,
            num_micro_steps=num_micro_steps,
            grad_norm=total,
            learning_rate=self.config.learning_rate if learning_rate is None else learning_rate,
            gradients_s=0.0,
            duration_s=time.perf_counter() - started,
        )

    def gradient_buffers(self) -> list[Tensor]:
        """The counts of the open step."""
        return [self._sums]

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """Add another replica's counts."""
        self._sums += buffers[0]
        self._micro_steps += num_micro_steps

    def reset_gradients(self) -> None:
        """Forget the open step's counts."""
        self._sums.zero_()
        self._micro_steps = 0

    @property
    def accumulated_micro_steps(self) -> int:
        """Micro-steps in the counts."""
        return self._micro_steps

    @property
    def targets_trained(self) -> int:
        """How many targets the weights hold."""
        return int(self.model["counts"].sum(dtype=torch.float64))

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """The counts under a name."""
        yield "counts", self.model["counts"].detach()

    def weights_digest(self) -> str:
        """Hex xxh3-128 of the counts."""
        return xxhash.xxh3_128_hexdigest(self.model["counts"].detach().numpy().tobytes())

    def save_hf(self, folder: Path) -> None:
        """The counts as a folder."""
        folder.mkdir(parents=True)
        (folder / _STATE).write_text(json.dumps(self._state({})))

    def begin_checkpoint(self, folder: Path, extra: dict[str, Any], policy_version: int = -1) -> None:
        """Write the counts, the step and `extra`; whole or absent."""
        if self._micro_steps:
            raise TrainError("a checkpoint in the middle of a step would lose its gradients; step or reset first")
        if folder.exists():
            raise TrainError(f"checkpoint folder {folder} exists")
        started = time.perf_counter()
        self._take(self._emulation.switch.checkpoint_s)
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / _STATE).write_text(json.dumps(self._state(extra)))
        manifest = CheckpointManifest(
            step=self.step,
            policy_version=policy_version,
            weights_digest=self.weights_digest(),
            model={"counts": (_SIZE,)},
            world_size=1,
            tensor_parallel=1,
            back_end=self.back_end(),
            extra=extra,
        )
        size_bytes = seal_folder(part, manifest).size_bytes
        part.rename(folder)
        self._saved = SavedCheckpoint(path=folder, size_bytes=size_bytes, write_s=time.perf_counter() - started)

    def finish_checkpoint(self) -> SavedCheckpoint | None:
        """The checkpoint that was begun last."""
        saved, self._saved = self._saved, None
        return saved

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """What `begin_checkpoint` wrote; returns its `extra`. Raises TrainError when there is none."""
        try:
            state = json.loads((folder / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise TrainError(f"{folder} is no checkpoint of an emulated trainer: {error}") from error
        self.reset_gradients()
        with torch.no_grad():
            self.model["counts"].copy_(torch.tensor(state["counts"], dtype=torch.float32))
        self.step = int(state["step"])
        return state["extra"]

    def compare_checkpoint(self, folder: Path) -> StateDifference:
        """The counts against a checkpoint's, which the trainer holds afterwards."""
        digest, mine = self.weights_digest(), self.model["counts"].detach().clone()
        self.load_checkpoint(folder)
        apart = float((mine - self.model["counts"]).abs().max())
        return StateDifference(
            digest=digest,
            checkpoint_digest=self.weights_digest(),
            num_weights=1,
            different_weights=("counts",) if apart else (),
            max_abs_weights=apart,
            different_moments=(),
            max_abs_moments=0.0,
        )

    def back_end(self) -> dict[str, Any]:
        """That it is emulated."""
        return {"name": "emulated", "compression": self._emulation.compression}

    def close(self) -> None:
        """Nothing to free."""

    def _take(self, seconds: float) -> None:
        self.busy_s += seconds
        self._sleep(self._emulation.wall_s(seconds))

    def _state(self, extra: dict[str, Any]) -> dict[str, Any]:
        return {"step": self.step, "counts": self.model["counts"].detach().tolist(), "extra": extra}
