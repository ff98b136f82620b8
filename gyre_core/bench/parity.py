"""`gyre bench parity`: do the engine and the trainer mean the same model, and does tree packing change anything?

Enters: a recorded run, or random models and forests by seed. Leaves: the largest difference between the sampler's
log-probs, as recorded while sampling, and the trainer's of the same tokens with the same weights; and the largest
relative differences between tree-packed and branch-by-branch log-probs and gradients, in fp32, with one process and
with weights split over two. Every sampled token of the compared rollouts counts, trained or not. Packings that are
broken on purpose go through the same comparison and must fail it.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.bench.tree_train import TreeTrainSize, synthetic_forest, write_random_qwen3
from gyre_core.config.models import TrainConfig
from gyre_core.errors import StoreError
from gyre_core.selection.batch import training_branches
from gyre_core.selection.branches import select_branches
from gyre_core.store import Store
from gyre_core.store.run_store import newest_run, open_run_store
from gyre_core.types import Role, TrainingBranch

BOUND = 1e-5  # relative, fp32: what packing may change
CAUGHT = 100 * BOUND  # a broken packing must be further off than this
SEEDS = (0, 1, 2)
TENSOR_PARALLEL = (1, 2)
_RATIO = 0.5  # unique tokens of branch tokens
_SIZE = TreeTrainSize(layers=2, hidden=64, heads=4, vocab=64, branch_tokens=160, trees=2, budget_tokens=1024, rounds=1)
_MAX_PACKED_ROLLOUTS = 16  # the branch-by-branch half recomputes every prefix: keep it to seconds


def bench_parity(runs_dir: Path, run_id: str | None) -> dict[str, Any]:
    """The recorded run's comparison beside `synthetic_parity`'s; the two max_rel keys are the worst of both."""
    recorded, synthetic = recorded_parity(runs_dir, run_id), synthetic_parity()
    worst = {key: max(recorded.get(key, 0.0), synthetic[key]) for key in ("max_rel_logprob_err", "max_rel_grad_err")}
    return {**synthetic, **recorded, **worst, "within_bound": max(worst.values()) <= BOUND}


def recorded_parity(runs_dir: Path, run_id: str | None) -> dict[str, Any]:
    """Compare at the first and at the newest policy version of the run whose weights are at hand.

    Raises StoreError when the run holds no rollout of such a version.
    """
    from gyre_core.train.megatron.backend import MegatronTrainer
    from gyre_core.train.parity import packed_vs_branch_parity, sampler_trainer_parity

    started = time.monotonic()
    folder = newest_run(runs_dir, run_id)
    config, store = open_run_store(folder)
    versions: dict[int, Path | None] = {0: None}
    steps = store.read_steps()
    if steps and (folder.checkpoints / steps[-1].checkpoint).is_dir():
        versions[steps[-1].version_after] = folder.checkpoints / steps[-1].checkpoint
    trainer = MegatronTrainer(config.model.path, config.train, seed=config.seed)
    by_version: dict[str, Any] = {}
    packed: dict[str, float] = {}
    try:
        for version, checkpoint in versions.items():
            branches = _sampled_at(store, version)
            if not branches:
                continue
            if checkpoint is not None:
                trainer.load_checkpoint(checkpoint)
            by_version[str(version)] = sampler_trainer_parity(trainer, branches)
            if not packed:
                few = sorted({branch.rollout_id for branch in branches})[:_MAX_PACKED_ROLLOUTS]
                packed = packed_vs_branch_parity(trainer, [item for item in branches if item.rollout_id in few])
    finally:
        trainer.close()
    if not by_version:
        raise StoreError(f"run {folder.run_id} holds no rollouts of policy versions {sorted(versions)} to compare")
    return {
        "run": folder.run_id,
        "sampler_trainer_max_abs": max(item["sampler_trainer_max_abs"] for item in by_version.values()),
        "tokens": sum(item["tokens"] for item in by_version.values()),
        "by_version": by_version,
        **packed,
        "wall_s": round(time.monotonic() - started, 2),
    }


def synthetic_parity(seeds: Sequence[int] = SEEDS, tensor_parallel: Sequence[int] = TENSOR_PARALLEL) -> dict[str, Any]:
    """Packed against branch by branch on a random model and forests of each seed, for each number of processes.

    Keys: max_rel_logprob_err and max_rel_grad_err (worst of all), `per_seed` rows, `controls` (by name the *smallest*
    error that a broken packing showed, and whether every one was caught), within_bound.
    """
    from gyre_core.train.parallel import open_trainer
    from gyre_core.train.parity import CONTROLS, packed_vs_branch_parity

    rows = []
    for ranks in tensor_parallel:
        with tempfile.TemporaryDirectory(prefix="gyre-parity-") as folder:
            write_random_qwen3(Path(folder), _SIZE, seed=0)
            train = TrainConfig(tensor_parallel=ranks, threads=1, micro_step_tokens=_SIZE.budget_tokens)
            trainer = open_trainer(Path(folder), train)
            try:
                for seed in seeds:
                    branches = synthetic_forest(_RATIO, _SIZE, seed=seed)
                    report = packed_vs_branch_parity(trainer, branches, controls=CONTROLS)
                    rows.append({"seed": seed, "tensor_parallel": ranks, **report})
            finally:
                trainer.close()
    controls = {}
    for name in CONTROLS:
        found = [row["controls"][name] for row in rows]
        smallest = {key: min(item[key] for item in found) for key in found[0]}
        controls[name] = {**smallest, "caught": smallest["max_rel_grad_err"] > CAUGHT}
    logprob_error = max(row["max_rel_logprob_err"] for row in rows)
    grad_error = max(row["max_rel_grad_err"] for row in rows)
    return {
        "max_rel_logprob_err": logprob_error,
        "max_rel_grad_err": grad_error,
        "within_bound": max(logprob_error, grad_error) <= BOUND,
        "controls": controls,
        "per_seed": rows,
    }


def _sampled_at(store: Store, version: int) -> list[TrainingBranch]:
    """Every sampled token of the rollouts of one policy version, each once, as branches with advantage 1."""
    branches: list[TrainingBranch] = []
    for kind in ("group", "heldout-group"):
        for commit in store.commits(kind):
            if commit.record["policy_version"] != version:
                continue
            for stored in store.read_rollouts(commit):
                tree = stored.trajectory.tree
                selected = select_branches(
                    tree,
                    max_branches=0,
                    role_order=[role for role in Role if role is not Role.AUX],
                    rng=np.random.default_rng(0),
                )
                branches += training_branches(
                    stored.spec, tree, selected, advantage=1.0, temperature=float(commit.record["temperature"])
                )
    return branches
