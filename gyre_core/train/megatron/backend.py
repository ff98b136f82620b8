"""The trainer: packed micro-steps in, summed gradients, optimizer steps, exported weights and checkpoints out.

Invariants: gradients accumulate unnormalised and are divided once, by the included rollouts, in the optimizer step; a
non-finite loss or gradient is a TrainError raised before weights or optimizer state change, with the step's gradients
dropped; equal inputs give equal bits on CPU; learning rate 0 leaves the weights bit-identical.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.checkpoint_manifest import CheckpointManifest, SavedCheckpoint
from gyre_core.train.flops import model_cost
from gyre_core.train.megatron import cpu, groups
from gyre_core.train.packing import PackedMicroStep, every_position, pack_branches
from gyre_core.train.stats import MicroStepStats, StateDifference, StepStats
from gyre_core.types import TrainingBranch

cpu.install()  # before megatron's modules read torch.cuda

from megatron.core import __version__ as megatron_version  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

from gyre_core.train import loss as losses  # noqa: E402
from gyre_core.train.megatron import architecture, checkpoint, hf, ranks, sums  # noqa: E402
from gyre_core.train.megatron.difference import different_bits, largest_difference  # noqa: E402
from gyre_core.train.megatron.model import Forest, TreeGPTModel, forest_of  # noqa: E402

_ADAM_EPS = 1e-8  # torch's and Megatron's default


class MegatronTrainer:
    """One training replica on megatron-core. Use from one thread at a time; call `close` at the end.

    Example: trainer = MegatronTrainer(Path("policy"), TrainConfig(learning_rate=1e-5), seed=0)
    """

    def __init__(self, hf_path: Path, config: TrainConfig, seed: int = 0) -> None:
        """Load a Hugging Face checkpoint folder; ConfigError when this back end cannot train it."""
        self.config = config
        self.hf_path = hf_path
        self.hf_model = architecture.read_hf_config(hf_path)
        architecture.check_tensor_parallel(self.hf_model, config.tensor_parallel)
        weights = hf.to_megatron(hf.load_hf_tensors(hf_path), self.hf_model)
        self.device = torch.device("cuda", torch.cuda.current_device()) if not cpu.ON_CPU else torch.device("cpu")
        self._threads = config.threads or torch.get_num_threads()
        self._closed = False
        groups.open_groups(seed, config.tensor_parallel)
        try:
            self._use_threads()
            self._build(weights)
        except BaseException:
            groups.close_groups()
            self._closed = True
            raise
        self.step = 0  # optimizer steps done since the loaded Hugging Face checkpoint
        self._micro_steps = 0  # accumulated since the last optimizer step
        self._saving: checkpoint.PendingSave | None = None

    def _build(self, weights: dict[str, Tensor]) -> None:
        train = self.config
        megatron_config = architecture.transformer_config(
            self.hf_model, recompute=train.recompute, dtype=train.dtype, tensor_parallel=train.tensor_parallel
        )
        self.model = TreeGPTModel(megatron_config, self.hf_model)
        parameters = dict(self.model.named_parameters())
        assert parameters.keys() == weights.keys(), sorted(parameters.keys() ^ weights.keys())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(hf.shard(name, weights[name], ranks.tensor_rank(), ranks.tensor_ranks()))
                # Megatron says this where it initialises weights, which we do not; without it the gradient's norm, and
                # so its clipping, would count the first rank's part alone.
                vars(parameter)["tensor_model_parallel"] = hf.is_split(name)
        self.model.to(self.device, architecture.DTYPES[train.dtype])  # norms are built in fp32
        self._ddp = DistributedDataParallel(
            megatron_config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
        )
        self._ddp.broadcast_params()
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            bf16=self.config.dtype == "bfloat16",  # then the optimizer steps fp32 copies of the weights
            params_dtype=architecture.DTYPES[self.config.dtype],
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            adam_beta1=self.config.adam_beta1,
            adam_beta2=self.config.adam_beta2,
            adam_eps=_ADAM_EPS,
            clip_grad=self.config.grad_clip,
        )
        with cpu.cuda_literals():
            self._optimizer: Any = get_megatron_optimizer(optimizer_config, [self._ddp])
        self._prepare_optimizer_state()
        self.sums = sums.StepSums(self._gradient_buffers())
        self.reset_gradients()

    # -- training --------------------------------------------------------------------------------------------------

    def micro_step(self, packed: PackedMicroStep, reference_logprobs: np.ndarray | None = None) -> MicroStepStats:
        """Forward, loss, backward; adds to the step's gradients.

        `reference_logprobs` [R] is the ratio's reference for each loss row. Without it the reference is the sampler's
        log-probs, or with `reference = "burst_start"` the trainer's own, which is right for the burst's first step.

        Raises TrainError for a non-finite loss or gradient (the gradients of the step are dropped, nothing else has
        changed) and ValueError for token ids outside the vocabulary.
        """
        started = time.perf_counter()
        self._use_threads()
        forest = self._forest(packed)
        sampler = self._tensor(packed.rows.sampler_logprob)
        with torch.enable_grad():
            logprobs = self._ddp(forest)
            terms = self._loss(packed, logprobs, sampler, reference_logprobs)
            loss = terms.loss.item()
            if not np.isfinite(loss):
                self._refuse(packed, f"its loss is {loss}")
            terms.loss.backward()
        self._micro_steps += 1
        finite = all(bool(torch.isfinite(buffer.sum())) for buffer in self._gradient_buffers())
        if not ranks.all_agree(finite, self.device):
            self._refuse(packed, "its gradient is not finite")
        apart = (logprobs.detach() - sampler).abs()
        ratios = terms.unit_ratios
        return MicroStepStats(
            loss=loss,
            num_tokens=packed.num_tokens,
            num_branch_tokens=packed.num_branch_tokens,
            num_targets=packed.rows.num_rows,
            num_units=packed.num_units,
            clipped_units=terms.clipped_units,
            clipped_tokens=terms.clipped_tokens,
            dropped_tokens=terms.dropped_tokens,
            kl=terms.kl_sum,
            weight_sum=float(packed.rows.weight.sum(dtype=np.float64)),
            ratio_min=ratios.min().item(),
            ratio_mean=ratios.mean().item(),
            ratio_max=ratios.max().item(),
            sampler_trainer_max_abs=apart.max().item(),
            sampler_trainer_mean_abs=apart.mean().item(),
            flops=model_cost(self.hf_model).flops(packed).total,
            duration_s=time.perf_counter() - started,
        )

    def optimizer_step(self, num_rollouts: int, learning_rate: float | None = None) -> StepStats:
        """Divide the summed gradient by the step's included rollouts, clip, take one AdamW step, clear the gradients.

        `learning_rate` is this step's; without it the configuration's first one.

        Raises ValueError for num_rollouts < 1; TrainError when no micro-step was accumulated or the gradient is not
        finite (gradients are dropped, weights and optimizer state are as before).
        """
        started = time.perf_counter()
        self._use_threads()
        if num_rollouts < 1:
            raise ValueError(f"an optimizer step needs at least one included rollout, got {num_rollouts}")
        num_micro_steps = round(ranks.sum_over_all(self._micro_steps, self.device) / ranks.tensor_ranks())
        if num_micro_steps == 0:
            raise TrainError("optimizer step refused: no micro-step since the last one, or its gradients were dropped")
        finalize_model_grads([self._ddp])  # also sums replicated norms over tensor-parallel ranks: never skip
        squares = 0.0
        for buffer in self._gradient_buffers():
            buffer.mul_(1.0 / num_rollouts)
            squares += float(torch.linalg.vector_norm(buffer, dtype=torch.float64)) ** 2
        if not np.isfinite(ranks.sum_over_all(squares, self.device)):
            self.reset_gradients()
            raise TrainError(f"optimizer step {self.step + 1} refused: the gradient is not finite; gradients dropped")
        gradients_s = time.perf_counter() - started
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["lr"] = rate
        with cpu.cuda_literals():
            outcome: Any = self._optimizer.step()
        succeeded, grad_norm, _ = outcome
        assert succeeded, "without a loss scale every step succeeds"
        self.step += 1
        self.reset_gradients()
        return StepStats(
            step=self.step,
            num_rollouts=num_rollouts,
            num_micro_steps=num_micro_steps,
            grad_norm=float(grad_norm),
            learning_rate=rate,
            gradients_s=gradients_s,
            duration_s=time.perf_counter() - started,
        )

    def gradient_buffers(self) -> list[Tensor]:
        """The flat fp32 buffers of the step's unnormalised sums: Megatron's own memory, to be read and not kept."""
        return self._gradient_buffers()

    def add_gradients(self, buffers: Sequence[Tensor], num_micro_steps: int) -> None:
        """Add another replica's sums of `num_micro_steps` micro-steps; ValueError when they are shaped otherwise."""
        self.sums.add(buffers)
        self._micro_steps += num_micro_steps if ranks.first_copy() else 0

    def put_gradients_aside(self) -> None:
        """Micro-steps sum from zero until `take_gradients_back`, as in another replica; ValueError if they do."""
        if self.sums.aside is not None:
            raise ValueError("a sum was begun already: end it first")
        aside, micro_steps = self.sums.copies(), self._micro_steps
        self.reset_gradients()
        self.sums.aside, self._micro_steps = aside, micro_steps

    def take_gradients_back(self) -> None:
        """Add what was summed since to what was put aside, as another replica's; ValueError when nothing was."""
        self.sums.take_back()

    @property
    def accumulated_micro_steps(self) -> int:
        """Micro-steps in the gradient buffer since the last optimizer step or reset."""
        return self._micro_steps

    def reset_gradients(self) -> None:
        """Forget what the current step accumulated."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.sums.aside = None
        self._micro_steps = 0

    def logprobs(self, branches: Sequence[TrainingBranch], *, share_prefixes: bool = True) -> list[np.ndarray]:
        """The trainer's log-probs of every token given those before it: float32 [T] a branch, 0 at position 0.

        At each branch's own temperature, in the order given; gradients and weights are untouched.
        """
        self._use_threads()
        out = [np.zeros(len(branch.token_ids), np.float32) for branch in branches]
        asked = [every_position(branch, index) for index, branch in enumerate(branches) if len(branch.token_ids) > 1]
        budget = max([self.config.micro_step_tokens, *(len(branch.token_ids) for branch in asked)])
        for packed in pack_branches(asked, budget, share_prefixes=share_prefixes):
            with torch.no_grad():
                values = self.model(self._forest(packed)).cpu().numpy()
            at = packed.position[packed.rows.child]
            for index, key in enumerate(packed.branches):
                mine = packed.rows.branch == index
                out[key.branch][at[mine]] = values[mine]
        return out

    # -- weights and state -----------------------------------------------------------------------------------------

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under Hugging Face names, one tensor at a time, as copies in the model's own dtype."""
        yield from hf.to_hf(self._full_weights(), self.hf_model)

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder, with the config and tokenizer of the one that was loaded.

        Nothing stands at `folder` unless it is whole. Raises TrainError when the folder exists or the disk refuses.
        """
        if folder.exists():
            raise TrainError(f"{folder} exists already; exports are never overwritten")
        partial = folder.with_name(folder.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a process that died while writing
            hf.write_hf(self.export_hf(), self.hf_path, partial)
            os.replace(partial, folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise TrainError(f"{folder} could not be written: {error}") from error

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the accumulated, undivided gradients by megatron-core name, whole and summed over all ranks."""
        return {
            name: ranks.full_gradient(name, _main_grad(parameter)) for name, parameter in self.model.named_parameters()
        }

    def master_weights(self) -> list[Tensor]:
        """What the optimizer steps: the weights themselves, or with bfloat16 their fp32 copies; not copied."""
        return [
            parameter
            for part in self._optimizer.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        ]

    def weights_digest(self) -> str:
        """Hex xxh3-128 over all weights in name order: equal digests mean equal bits."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self._full_weights(), key=lambda pair: pair[0]):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> SavedCheckpoint:
        """`begin_checkpoint`, and wait until it is durable."""
        return self.begin_checkpoint(folder, extra).result()

    def begin_checkpoint(self, folder: Path, extra: dict[str, Any], policy_version: int = -1) -> checkpoint.PendingSave:
        """Begin to write weights, AdamW state, step, rng and `extra` (plain JSON data) to a new folder, all or nothing.

        Returns when the trainer may go on; the folder is there once `result` of what is returned has come back. An
        earlier one is waited for, so at most one copy of the state is in memory.

        Raises TrainError when the folder exists, the disk refuses, or a step is half accumulated.
        """
        if self._micro_steps:
            raise TrainError("a checkpoint in the middle of a step would lose its gradients; step or reset first")
        self.finish_checkpoint()
        state = self._sharded_state(loading=False)
        state["gyre"] = {"step": self.step, "extra": json.dumps(extra), "rng": torch.get_rng_state()}
        manifest = CheckpointManifest(
            step=self.step,
            policy_version=policy_version,
            weights_digest=self.weights_digest(),
            model=checkpoint.model_layout(state["model"]),
            world_size=torch.distributed.get_world_size(),
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
            back_end=self.back_end(),
            extra=extra,
        )
        self._saving = checkpoint.begin_save(state, folder, manifest)
        return self._saving

    def finish_checkpoint(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint that was begun last, if its end was not waited for; TrainError when it failed."""
        saving, self._saving = self._saving, None
        return saving.result() if saving is not None else None

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Restore what `save_checkpoint` wrote and return its `extra`; training goes on bit for bit (on CPU).

        Learning rate, decay and betas are the configuration's, not the checkpoint's. Raises TrainError for a checkpoint
        that is missing, unfinished, torn, damaged, newer, not Gyre's or of another model; then nothing has changed.
        Tensors are read in place: after any other failure load another checkpoint or build a new trainer.
        """
        self.reset_gradients()
        state = checkpoint.load(self._sharded_state(loading=True), folder)
        try:
            gyre = state["gyre"]
            # Megatron leaves out the step of an optimizer that has not stepped, and then cannot load that.
            inner = state["optimizer"].get("optimizer", state["optimizer"])  # with bf16 beside the fp32 copies
            inner["state"].setdefault("common_step", torch.tensor(0.0))
            self.model.load_state_dict(state["model"], strict=False)
            with torch.no_grad(), cpu.cuda_literals():
                self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise TrainError(f"checkpoint {folder} does not fit this model: {error}") from error
        self._prepare_optimizer_state()
        self.step = int(gyre["step"])
        torch.set_rng_state(gyre["rng"])
        return json.loads(gyre["extra"])

    def compare_checkpoint(self, folder: Path) -> StateDifference:
        """Every weight and AdamW moment, bit by bit, against a checkpoint's, which the trainer holds afterwards.

        Raises TrainError as `load_checkpoint` does.
        """
        digest, mine, my_moments = self.weights_digest(), self._weights(), self._moments()
        mine = {name: tensor.clone() for name, tensor in mine.items()}
        my_moments = {name: tensor.clone() for name, tensor in my_moments.items()}
        self.load_checkpoint(folder)
        weights, moments = self._weights(), self._moments()
        return StateDifference(
            digest=digest,
            checkpoint_digest=self.weights_digest(),
            num_weights=len(weights),
            different_weights=different_bits(mine, weights),
            max_abs_weights=largest_difference(mine, weights),
            different_moments=different_bits(my_moments, moments),
            max_abs_moments=largest_difference(my_moments, moments),
        )

    def back_end(self) -> dict[str, Any]:
        """What decides the bits beside data and settings: versions, device, threads, the kind of processor."""
        return {
            "name": "megatron-core",
            "megatron_core": megatron_version,
            "torch": torch.__version__,
            "device": self.device.type,
            "threads": self._threads,
            "processor": torch.backends.cpu.get_cpu_capability() if cpu.ON_CPU else torch.cuda.get_device_name(),
            "world_size": torch.distributed.get_world_size(),
        }

    def close(self) -> None:
        """Free the process groups; the trainer is unusable afterwards. Calling it twice is harmless.

        A checkpoint that is being written is finished first; that it failed is told by its own `result` alone.
        """
        if not self._closed:
            self._closed = True
            with contextlib.suppress(TrainError):
                self.finish_checkpoint()
            groups.close_groups()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _loss(
        self, packed: PackedMicroStep, logprobs: Tensor, sampler: Tensor, reference: np.ndarray | None
    ) -> losses.LossTerms:
        rows = packed.rows
        weights = self._tensor(rows.weight)
        if reference is not None:
            if reference.shape != (rows.num_rows,):
                raise ValueError(f"reference_logprobs has shape {reference.shape} for {rows.num_rows} loss rows")
            compared = self._tensor(reference.astype(np.float32))
        else:
            compared = sampler if self.config.reference == "sampler" else logprobs.detach()
        if self.config.reference == "burst_start":
            weights = weights * losses.sampler_correction(compared, sampler)
        clip_low, clip_high = self.config.clip_range
        return losses.policy_loss(
            self.config.loss,
            logprobs,
            compared,
            weights,
            self._tensor(rows.advantage),
            self._tensor(rows.unit),
            num_units=packed.num_units,
            clip_low=clip_low,
            clip_high=clip_high,
            kl_coefficient=self.config.kl_coefficient,
        )

    def _forest(self, packed: PackedMicroStep) -> Forest:
        highest = int(packed.token_ids.max())
        if highest >= self.hf_model.vocab_size:
            raise ValueError(f"token id {highest} is outside the vocabulary of {self.hf_model.vocab_size}")
        return forest_of(packed, self.device)

    def _refuse(self, packed: PackedMicroStep, why: str) -> None:
        self.reset_gradients()
        raise TrainError(
            f"micro-step refused: {why} (rollouts {', '.join(packed.rollout_ids[:8])}); "
            "the gradients of the step are dropped, weights and optimizer state are as before"
        )

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _moments(self) -> dict[str, Tensor]:
        """AdamW's state tensors; parameters are numbered in the optimizer's order."""
        found = {}
        for part, chained in enumerate(self._optimizer.chained_optimizers):
            for index, state in enumerate(chained.optimizer.state.values()):
                found.update({f"{part}.{index}.{name}": state[name] for name in ("exp_avg", "exp_avg_sq")})
        return found

    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, ranks.full_tensor(name, parameter)

    def _gradient_buffers(self) -> list[Tensor]:
        ddp: Any = self._ddp  # `buffers` hides torch's method of that name
        return [buffer.grad_data for buffer in ddp.buffers + ddp.expert_parallel_buffers]

    def _prepare_optimizer_state(self) -> None:
        """Give every parameter its AdamW state, and every group the configuration's numbers.

        AdamW makes its state at the first step, but a checkpoint before it must hold one too; and Megatron expects a
        scheduler to write rates and decay (weight_decay x wd_mult: none for norms) into the groups.
        """
        for part in self._optimizer.chained_optimizers:
            part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
            for group in part.optimizer.param_groups:
                group["lr"] = self.config.learning_rate
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
                group["betas"] = (self.config.adam_beta1, self.config.adam_beta2)

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        model_state = self.model.sharded_state_dict()
        with cpu.cuda_literals():
            optimizer_state = self._optimizer.sharded_state_dict(model_state, is_loading=loading)
        return {"model": model_state, "optimizer": optimizer_state}

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _use_threads(self) -> None:
        if self._closed:
            raise RuntimeError("the trainer is closed")
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def _main_grad(parameter: Any) -> Tensor:
    return parameter.main_grad  # Megatron's fp32 accumulator
