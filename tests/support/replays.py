"""Stored runs to replay, and a trainer whose weights are a hash of everything it was told."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_core.config import RunConfig
from gyre_core.replay.section import REPLAY, replay_section
from gyre_core.replay.stored import StoredStep, find_record, read_step_records, read_stored_step
from gyre_core.selection.batch import build_branches
from gyre_core.store import StepRecord, Store
from gyre_core.train.packing import pack_branches
from gyre_core.trajectory.tree import Trajectory
from gyre_core.transfer.branches import branches_to_ipc
from gyre_core.types import Grade, Outcome, Role, RolloutSpec, TrainingBranch
from tests.support.problems import harness_result
from tests.support.random_trees import make_tree
from tests.support.rollouts import Finished, call

BACK_END = {"name": "hash", "threads": 2}
_SHAPES = (
    (-1, 3, False, Role.MAIN),
    (0, 2, True, Role.MAIN),
    (1, 2, False, Role.MAIN),
    (2, 3, True, Role.MAIN),
    (0, 1, False, Role.SUB_AGENT),
    (4, 4, True, Role.SUB_AGENT),
)


class HashTrainer:
    """Weights are the hash of all that was trained, in order; `bend` makes the next step come out otherwise."""

    def __init__(self, weights: str = "first") -> None:
        self._weights = weights
        self._gradients: list[bytes] = []
        self.state, self.epoch = "rollout", 0
        self.bend = ""
        self.back_end = BACK_END
        self.packing: Sequence[Sequence[tuple[str, int]]] | None = None  # instead of what was sent
        self.difference: dict[str, Any] = {
            "different_weights": [],
            "num_weights": 3,
            "max_abs_weights": 0.0,
            "different_moments": [],
            "max_abs_moments": 0.0,
        }

    def status(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "state": self.state}

    def role(self, to: str, *, epoch: int) -> dict[str, Any]:
        assert epoch == self.epoch
        self.state, self.epoch = to, epoch + 1
        return self.status()

    def reset_gradients(self) -> None:
        self._gradients = []

    def micro_step(self, branches: Sequence[TrainingBranch]) -> dict[str, Any]:
        assert self.state == "train"
        self._gradients.append(branches_to_ipc(branches))
        keys = [[(branch.rollout_id, branch.branch) for branch in branches]]
        return {"keys": self.packing or keys, "stats": {}, "seconds": 0.5}

    def sum_begin(self) -> None:
        self._gradients.append(b"(")

    def sum_end(self) -> None:
        self._gradients.append(b")")

    def optimizer_step(
        self, *, num_rollouts: int, policy_version: int, learning_rate: float | None = None
    ) -> dict[str, Any]:
        told = repr((num_rollouts, policy_version, learning_rate, self.bend)).encode()
        text = b"".join([self._weights.encode(), *self._gradients, told])
        self._weights, before = hashlib.sha256(text).hexdigest(), self._weights
        return {"weights_before": before}

    def skip_step(self, *, policy_version: int) -> dict[str, Any]:
        return {"weights_before": self._weights}

    def weights(self) -> dict[str, Any]:
        return {"weights_digest": self._weights, "back_end": self.back_end}

    def compare_checkpoint(self, path: str) -> dict[str, Any]:
        return {"digest": self._weights, "checkpoint_digest": self._weights, **self.difference}


def store_run(
    store: Store,
    config: RunConfig,
    *,
    steps: int = 2,
    rewards: Sequence[float | None] = (0.0, 0.5, 1.0),
    section: bool = True,
    workspace_ref: str = "",
) -> HashTrainer:
    """Commit steps of one group each as a run does; returns the trainer that took them."""
    trainer = HashTrainer()
    trainer.role("train", epoch=0)
    for step in range(steps):
        group_id = f"s{step:04d}-p1"
        rollouts = [_rollout(group_id, step, member, reward, workspace_ref) for member, reward in enumerate(rewards)]
        built = build_branches(
            rollouts,
            selection=config.selection,
            run_seed=config.seed,
            trainer_version=step,
            max_staleness=config.scheduler.staleness,
            temperature=config.rollout.temperature,
        )
        facts = {
            "group_id": group_id,
            "step": step,
            "policy_version": step,
            "temperature": config.rollout.temperature,
            "rewards_by_rollout": {rollout.spec.rollout_id: rollout.grade.reward for rollout in rollouts},
        }
        commit = store.commit_rollouts("group", rollouts, built.branches, facts, token=group_id)
        packed = pack_branches(built.branches, config.train.micro_step_tokens, skip_zero_advantage=True)
        keys = [tuple((key.rollout_id, key.branch) for key in part.branches) for part in packed]
        branches = {(branch.rollout_id, branch.branch): branch for branch in built.branches}
        trainer.reset_gradients()
        for part in keys:
            trainer.micro_step([branches[key] for key in part])
        rate = config.train.learning_rate_at(step)
        taken = trainer.optimizer_step(num_rollouts=built.num_included, policy_version=step + 1, learning_rate=rate)
        outcomes = [rollout.grade.outcome.value for rollout in rollouts]
        dropped = built.dropped_reason
        record = StepRecord(
            step=step,
            version_before=step,
            version_after=step + 1,
            groups_trained=() if dropped else (group_id,),
            groups_dropped={group_id: dropped} if dropped else {},
            rollouts_dropped=built.left_out,
            outcomes={name: outcomes.count(name) for name in outcomes},
            seeds={"run": config.seed},
            micro_steps=tuple(keys),
            denominators={"rollouts": built.num_included},
            stats={"num_tokens": sum(part.num_tokens for part in packed), "duration_s": 2.0},
            checkpoint=f"version-{step + 1:05d}",
            extra={"groups": {group_id: commit.seq}},
        )
        if section:
            written = replay_section(
                config,
                learning_rate=rate,
                weights_before=taken["weights_before"],
                weights_after=trainer.weights()["weights_digest"],
                back_end=BACK_END,
            )
            record = replace(record, extra={**record.extra, REPLAY: written})
        store.commit_step(record, token=f"step-{step}")
    return trainer


def read_back(store: Store, config: RunConfig, label: int = 1) -> StoredStep:
    """Step `label` of a stored run."""
    return read_stored_step(store, config, find_record(read_step_records(store), label))


def open_store(folder: Path) -> Store:
    return Store.open(str(folder / "store"))


def _rollout(group_id: str, step: int, member: int, reward: float | None, workspace_ref: str) -> Finished:
    rollout_id = f"{group_id}-{member:02d}"
    tree = make_tree(_SHAPES, rollout_id, versions=[step] * len(_SHAPES))
    calls = tuple(call(rollout_id, index, node) for index, node in enumerate((1, 3, 5)))
    outcome = Outcome.FINISHED if reward is not None else Outcome.VERIFIER_FAILED
    return Finished(
        spec=RolloutSpec(
            rollout_id=rollout_id,
            group_id=group_id,
            problem_id="p1",
            step=step,
            member=member,
            dispatch_version=step,
            seed=member,
        ),
        trajectory=Trajectory(rollout_id=rollout_id, tree=tree, calls=calls),
        grade=Grade(outcome=outcome, reward=reward, reason="made up", verifier_attempts=1),
        harness=harness_result(),
        workspace_ref=workspace_ref,
    )
