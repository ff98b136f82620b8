"""A training run without processes: real flow code, tasks and store; cell, proxy and rollouts are fakes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.config import RunConfig, parse_run_config
from gyre_core.grading.problems import Problem
from gyre_core.metrics import MetricsWriter
from gyre_core.proxy.pool import ProxyAddress, Shards
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import Grade, Outcome, RolloutSpec, TrainingBranch
from tasks.context import RunContext
from tasks.progress import RunProgress
from tests.support.problems import harness_result
from tests.support.rollouts import Finished, call, output_node, prompt_node


class SimulatedDeath(BaseException):
    """Stands for a kill -9: nothing catches it."""


class FakeCell:
    """The control API of a cell, in memory. `die_at` names the verb after whose n-th call the process "dies"."""

    def __init__(self, *, policy_version: int, die_at: tuple[str, int] | None = None) -> None:
        self.state, self.epoch, self.version = "rollout", 0, policy_version
        self.published = policy_version
        self.calls: Counter[str] = Counter()
        self.trained: list[str] = []  # rollout ids of the optimizer steps that were taken
        self._pending: list[str] = []
        self._saving = ""
        self._die_at = die_at

    def status(self) -> dict[str, Any]:
        return {
            "cell_id": "cell-0",
            "state": self.state,
            "epoch": self.epoch,
            "engine_url": "http://127.0.0.1:1",
            "engine_key": "key-of-the-engine",
        }

    def role(self, to: str, *, epoch: int) -> dict[str, Any]:
        assert epoch == self.epoch
        assert to == "train" or self.published == self.version, "an engine must not serve unpublished weights"
        self.state = "training" if to == "train" else "rollout"
        self.epoch += 1
        return self._done("role", {**self.status()})

    def reset_gradients(self) -> None:
        self._pending.clear()

    def micro_step(self, branches: list[TrainingBranch]) -> dict[str, Any]:
        assert self.state == "training"
        self._pending += sorted({branch.rollout_id for branch in branches})
        keys = [[(branch.rollout_id, branch.branch) for branch in branches]]
        targets = float(sum(int(branch.target.sum()) for branch in branches))
        return self._done("micro_step", {"keys": keys, "stats": {"num_targets": targets, "loss": 0.5}})

    def optimizer_step(self, *, num_rollouts: int, policy_version: int) -> dict[str, Any]:
        assert policy_version == self.version + 1
        self.version = policy_version
        self.trained += self._pending
        self._pending = []
        return self._done("optimizer_step", {"grad_norm": 1.0})

    def skip_step(self, *, policy_version: int) -> dict[str, Any]:
        self.version = policy_version
        return self._done("skip_step", {"grad_norm": 0.0})

    def save_checkpoint(self, path: str, extra: dict[str, Any]) -> dict[str, Any]:
        Path(path).mkdir(parents=True)
        (Path(path) / "version").write_text(str(self.version))
        (Path(path) / "extra.json").write_text(json.dumps(extra))
        self._saving = path
        return self._done("save_checkpoint", {"seconds": 0.0})

    def finish_checkpoint(self) -> dict[str, Any]:
        assert self.published == self.version, "files are written while the weights are published"
        (Path(self._saving) / "durable").touch()
        return self._done("finish_checkpoint", {"bytes": 1, "write_s": 0.0, "seconds": 0.0})

    def export_hf(self, path: str) -> dict[str, Any]:
        Path(path).mkdir(parents=True)
        return self._done("export_hf", {"seconds": 0.0})

    def publish(self) -> dict[str, Any]:
        self.published = self.version
        return self._done("publish", {"version": self.version, "checksum": f"c{self.version}"})

    def _done(self, verb: str, result: dict[str, Any]) -> dict[str, Any]:
        self.calls[verb] += 1
        if self._die_at == (verb, self.calls[verb]):
            raise SimulatedDeath(verb)
        return result


class FakeReporter:
    """Counts what would be shown."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.moves: list[tuple[str, str]] = []

    def role_change(self, cell_id: str, to: str, reason: str, *, epoch: int) -> None:
        self.moves.append((to, reason))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.update([name])


class FakeServices:
    def __init__(self, cell: FakeCell) -> None:
        self.cell, self.proxies = cell, Shards([ProxyAddress(url="http://127.0.0.1:1", secret="secret")])


def small_config(folder: Path, **overrides: Any) -> RunConfig:
    """Two groups of three rollouts a step, three steps."""
    tree: dict[str, Any] = {
        "name": "t",
        "runs_dir": str(folder / "runs"),
        "model": {"path": "policy"},
        "data": {"train": "problems"},
        "rollout": {"harness": {"command": ["{python}"]}, "group_size": 3, "groups_per_step": 2, "slots": 2},
        "train": {"steps": 3},
        "store": {"min_free_bytes": 0},
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return parse_run_config(tree, base_dir=folder)


def make_context(
    config: RunConfig, folder: RunFolder, cell: FakeCell, *, problem_ids: tuple[str, ...] = ("a", "b", "c", "d")
) -> RunContext:
    """What `open_run` builds, with fakes for everything outside this process."""
    store = Store.open(folder.store_url)
    steps = store.commits("step")
    context = RunContext(
        config=config,
        folder=folder,
        store=store,
        problems={name: _problem(name) for name in problem_ids},
        heldout={},
        services=FakeServices(cell),  # type: ignore[arg-type]
        sandbox=None,  # type: ignore[arg-type]
        progress=RunProgress(folder.run_id, num_steps=config.train.steps, quiet=True),
        reporter=FakeReporter(),  # type: ignore[arg-type]
        metrics=MetricsWriter(folder.path),
        policy_version=int(steps[-1].record["version_after"]) if steps else 0,
    )
    return context


def _problem(name: str) -> Problem:
    """A problem that nothing reads files of: harness and verifier are fakes."""
    nowhere = Path("/nonexistent")
    return Problem(problem_id=name, instruction="Do it.", dir=nowhere, tests_dir=nowhere, environment_dir=None)


def finished_rollout(spec: RolloutSpec, reward: float | None, outcome: Outcome = Outcome.FINISHED) -> Finished:
    """A rollout of one call, [7 8] after the prompt 1 2 3, at its dispatch's version."""
    rollout_id = spec.rollout_id
    nodes = (
        prompt_node(0, -1, [1, 2, 3]),
        output_node(1, 0, [7, 8], [-0.5, -0.25], call_id=f"{rollout_id}-c0", version=spec.dispatch_version),
    )
    tree = TrajectoryTree(rollout_id=rollout_id, nodes=nodes)
    return Finished(
        spec=spec,
        trajectory=Trajectory(rollout_id=rollout_id, tree=tree, calls=(call(rollout_id, 0, 1, output_tokens=2),)),
        grade=Grade(outcome=outcome, reward=reward, reason="made up", verifier_attempts=1),
        harness=harness_result(),
    )


def reward_by_member(spec: RolloutSpec) -> float:
    """0, 0.5 and 1 for the three members."""
    return float(np.clip(spec.member / 2, 0, 1))
