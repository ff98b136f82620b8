"""`gyre bench parity`: do the engine and the trainer mean the same model, and does tree packing change anything?

Enters: a recorded run. Leaves: the largest difference between the sampler's log-probs, as recorded while sampling,
and the trainer's of the same tokens with the same weights; and the largest relative differences between tree-packed
and branch-by-branch log-probs and gradients. Every sampled token of the compared rollouts counts, trained or not.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.errors import StoreError
from gyre_core.selection.batch import training_branches
from gyre_core.selection.branches import select_branches
from gyre_core.store import Store
from gyre_core.store.run_store import newest_run, open_run_store
from gyre_core.types import Role, TrainingBranch

_MAX_PACKED_ROLLOUTS = 16  # the branch-by-branch half recomputes every prefix: keep it to seconds


def bench_parity(runs_dir: Path, run_id: str | None) -> dict[str, Any]:
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
