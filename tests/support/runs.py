"""A training run without processes: real flow code, tasks and store; cell, proxy and rollouts are fakes."""

import json
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gyre_core.cells.fleet_proxies import EngineLoad
from gyre_core.config import RunConfig, parse_run_config
from gyre_core.grading.problems import Problem
from gyre_core.metrics import MetricsWriter
from gyre_core.proxy.pool import ProxyAddress, Shards
from gyre_core.run_folder import RunFolder
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView, Move
from gyre_core.store import Store
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import Grade, Outcome, RolloutSpec, TrainingBranch
from tasks.context import RunContext
from tasks.progress import RunProgress
from tasks.scheduling import Scheduling
from tests.support.problems import harness_result
from tests.support.rollouts import Finished, call, output_node, prompt_node

T = TypeVar("T")


class SimulatedDeath(BaseException):
    """Stands for a kill -9: nothing catches it."""


class FakeFleet:
    """Cells in memory, core first, and the core's control API. `die_at` names the verb after whose n-th call the
    process "dies". Micro-steps are computed as soon as the core trains.
    """

    def __init__(self, *, policy_version: int, cells: int = 1, slots: int = 2, die_at: tuple[str, int] | None = None):
        self.states = [CellState.ROLLOUT] * cells
        self.served = [policy_version] * cells
        self.slots = slots
        self.version = self.target = policy_version
        self.calls: Counter[str] = Counter()
        self.moved: list[tuple[str, str]] = []
        self.handed: list[str] = []  # groups in the order in which training got them
        self.trained: list[str] = []  # rollout ids of the optimizer steps that were taken
        self.checkpoint: tuple[str, int] | None = None
        self.core_generation = 0
        self._changed = threading.Condition()
        self._groups: dict[str, list[TrainingBranch]] = {}
        self._sealed: int | None = None
        self._saving = ""
        self._die_at = die_at

    # -- the fleet

    @property
    def core(self) -> "FakeFleet":
        return self

    def check(self) -> None: ...

    def open(self) -> None: ...

    def on_event(self, listener: Any) -> None: ...

    load = EngineLoad()

    def views(self, *, ask: bool = True) -> tuple[CellView, ...]:
        with self._changed:
            return tuple(
                CellView(cell_id=f"cell-{index}", state=state, slots=self.slots)
                for index, state in enumerate(self.states)
            )

    def move(self, move: Move) -> "FakeReport":
        index = int(move.cell_id.removeprefix("cell-"))
        with self._changed:
            self.states[index] = CellState.TRAINING if move.to == "train" else CellState.ROLLOUT
            if move.to == "rollout":
                self.served[index] = self.target
                assert self.target == self.version, "a cell returns with the newest weights"
            self.moved.append((move.cell_id, move.to))
            self._changed.notify_all()
        return self._done("move", FakeReport(epoch=len(self.moved)))

    def refresh(self, policy_version: int) -> "FakeReport":
        with self._changed:
            self.target = policy_version
            for index, state in enumerate(self.states):
                if state is CellState.ROLLOUT:
                    self.served[index] = policy_version
        return self._done("refresh", FakeReport(policy_version=policy_version))

    def set_checkpoint(self, path: Path, policy_version: int) -> None:
        self.checkpoint = (path.name, policy_version)

    # -- the core

    def status(self) -> dict[str, Any]:
        with self._changed:
            training = self.states[0] is CellState.TRAINING
            pending = 0 if training else sum(bool(branches) for branches in self._groups.values())
            return {"step": {"pending": pending, "leased": 0, "finished": False}}

    def train_open(self, *, step: int, policy_version: int, learning_rate: float) -> dict[str, Any]:
        assert policy_version == self.version
        return self._done("train_open", {})

    def train_group(self, group_id: str, branches: list[TrainingBranch]) -> dict[str, Any]:
        with self._changed:
            assert self._sealed is None and group_id not in self._groups, "every group once"
            self._groups[group_id] = list(branches)
            self.handed.append(group_id)
        return self._done("train_group", {})

    def train_seal(self, *, num_rollouts: int) -> dict[str, Any]:
        with self._changed:
            self._sealed = num_rollouts
        return self._done("train_seal", {})

    def train_finish(self, *, wait_s: float) -> dict[str, Any] | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.states[0] is CellState.TRAINING, wait_s):
                return None
            assert self._sealed is not None
            groups, self._groups, self._sealed = self._groups, {}, None
            self.version += 1
            self.trained += sorted({branch.rollout_id for part in groups.values() for branch in part})
        micro_steps = {f"{name}.0": part for name, part in groups.items() if part}
        targets = float(sum(int(branch.target.sum()) for part in groups.values() for branch in part))
        account = {
            "taken": {name: "step/core#1" for name in micro_steps},
            "groups": {name: ([f"{name}.0"] if part else []) for name, part in groups.items()},
            "branches": {
                name: [(branch.rollout_id, branch.branch) for branch in part] for name, part in micro_steps.items()
            },
            "stats": {"num_targets": targets, "loss": 0.5} if micro_steps else {},
            "requeued": 0,
            "failed": 0,
            "cut_off": [],
            "rates": {},
            "sums": [{"session": "step/core#1", "owner": True, "micro_steps": list(micro_steps)}]
            if micro_steps
            else [],
        }
        return self._done("train_finish", {"grad_norm": 1.0 if micro_steps else 0.0, "account": account})

    def save_checkpoint(self, path: str, extra: dict[str, Any]) -> dict[str, Any]:
        Path(path).mkdir(parents=True)
        (Path(path) / "version").write_text(str(self.version))
        (Path(path) / "extra.json").write_text(json.dumps(extra))
        self._saving = path
        return self._done("save_checkpoint", {"seconds": 0.0})

    def finish_checkpoint(self) -> dict[str, Any]:
        serving = {served for served, state in zip(self.served, self.states, strict=True) if state is CellState.ROLLOUT}
        assert serving <= {self.version}, "files are written while the weights are published"
        (Path(self._saving) / "durable").touch()
        return self._done("finish_checkpoint", {"bytes": 1, "write_s": 0.0, "seconds": 0.0})

    def export_hf(self, path: str) -> dict[str, Any]:
        Path(path).mkdir(parents=True)
        return self._done("export_hf", {"seconds": 0.0})

    def _done(self, verb: str, result: T) -> T:
        self.calls[verb] += 1
        if self._die_at == (verb, self.calls[verb]):
            raise SimulatedDeath(verb)
        return result


@dataclass(frozen=True)
class FakeReport:
    """Of a move or a refresh."""

    epoch: int = 0
    policy_version: int = 0
    failed: str = ""


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
    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet, self.proxies = fleet, Shards([ProxyAddress(url="http://127.0.0.1:1", secret="secret")])


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
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree.setdefault(section, {}).update(value)
    return parse_run_config(tree, base_dir=folder)


def make_context(
    config: RunConfig, folder: RunFolder, fleet: FakeFleet, *, problem_ids: tuple[str, ...] = ("a", "b", "c", "d")
) -> RunContext:
    """What `open_run` builds, with fakes for everything outside this process."""
    store = Store.open(folder.store_url)
    steps = store.commits("step")
    reporter: Any = FakeReporter()
    scheduling = Scheduling(config, fleet, reporter, pools=None)  # type: ignore[arg-type]
    scheduling.open()
    context = RunContext(
        config=config,
        folder=folder,
        store=store,
        problems={name: _problem(name) for name in problem_ids},
        heldout={},
        services=FakeServices(fleet),  # type: ignore[arg-type]
        sandbox=None,  # type: ignore[arg-type]
        progress=RunProgress(folder.run_id, num_steps=config.train.steps, quiet=True),
        reporter=reporter,
        scheduling=scheduling,
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
