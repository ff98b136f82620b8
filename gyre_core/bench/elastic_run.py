"""One emulated training run of `gyre bench elastic`: the configuration, `gyre train` as a process, what it left.

Enters: a scaled scenario and a policy. Leaves: the run's times on the cluster's clock, what its cells did, and what its
control plane cost: CPU and memory of every process, by kind. The run is an ordinary one: the flow, its Prefect server,
proxies, cells and store are those of any other.
"""

import itertools
import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gyre_core.bench.elastic_inputs import save_emulated_model, save_emulated_problems
from gyre_core.bench.elastic_scale import Scaled
from gyre_core.config.emulation import account_path
from gyre_core.errors import GyreError
from gyre_core.process import ChildProcess, log_tail, python_command
from gyre_core.rollout.emulated import API_KEY, BASE_URL
from gyre_core.store import Store

FREE = 1e7  # compression at which nothing takes time
_SAMPLE_S = 2.0
_NO_LIMIT_S = 86400.0  # wall seconds
_KINDS = (("gyre_core.cells", "cells"), ("gyre_core.proxy", "proxy"), ("prefect", "Prefect server"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """What one run took.

    Example: run.hours, run.steps_per_hour, run.cpu_s["flow"]
    """

    policy: str
    train_cells: int
    steps: int
    hours: float  # of the cluster, from the first dispatch to the last commit
    wall_s: float  # of these, on this machine
    step_hours: tuple[float, ...]
    step_s: tuple[float, ...]  # wall seconds that the flow measured, from dispatch to commit
    serving_share: float  # of cell time: at least one call ran
    training_share: float  # a micro-step or the optimizer ran
    switch_share: float
    idle_training_share: float  # in the training role without anything to train: groups, barrier, optimizer
    moves: int
    calls: int
    calls_moved: int
    rollouts: int
    targets_trained: int
    staleness_max: int
    cpu_s: dict[str, float]  # by kind of process
    memory_mb: dict[str, float]  # largest resident size of one process of the kind
    decisions: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def steps_per_hour(self) -> float:
        return self.steps / self.hours

    @property
    def idle_share(self) -> float:
        """Of cell time: neither calls nor training nor a switch; what is not `idle_training_share` has no calls."""
        return max(0.0, 1.0 - self.serving_share - self.training_share - self.switch_share)


def write_inputs(folder: Path, *, problems: int) -> None:
    """Model folder and problems, for all runs below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_emulated_model(folder / "model")
    save_emulated_problems(folder / "problems", problems)


def run_config(
    folder: Path, scaled: Scaled, *, name: str, policy: str, train_cells: int, steps: int, compression: float
) -> dict[str, Any]:
    """The configuration of a run, as a TOML file says it."""
    workload, cluster = scaled.scenario.workload, scaled.scenario.cluster
    emulation = scaled.emulation.model_copy(update={"compression": compression})
    context = max(256, scaled.context_tokens)
    limited = math.isfinite(workload.limit_s) and compression < FREE
    limit_s = workload.limit_s / compression if limited else _NO_LIMIT_S
    rollouts = cluster.slots * cluster.cells
    return {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "context_length": context},
        "data": {"train": str(folder / "problems")},
        "rollout": {
            "group_size": workload.group_size,
            "groups_per_step": workload.groups,
            "slots": rollouts,
            "time_limit_s": limit_s,
            "overall_limit_s": 2 * limit_s + 60.0,
            "max_new_tokens": context - 1,
            "harness": {
                "name": "emulated",
                "dialect": "chat",
                "command": ["emulated"],
                "env": {BASE_URL: "{base_url}", API_KEY: "{api_key}"},
            },
        },
        "grading": {"attempts": 1, "timeout_s": 3600.0},
        "train": {
            "steps": steps,
            "micro_step_tokens": max(context, _group_tokens(scaled) // scaled.scenario.costs.micro_steps),
        },
        "scheduler": {
            "policy": policy,
            "cells": cluster.cells,
            "train_cells": train_cells,
            "staleness": scaled.scenario.staleness,
            "dead_after_s": 60.0,
        },
        "engine": {"max_total_tokens": 2 * context, "call_timeout_s": 86400.0},
        "transfer": {"backend": "local"},
        "proxy": {"journal_sync": "session", "role_tables": [{"harness": "emulated"}]},
        "prefect": {"port": 0},
        "emulate": emulation.model_dump(mode="json", exclude_none=True),
    }


def _group_tokens(scaled: Scaled) -> int:
    """Emulated tokens of a mean group."""
    workload = scaled.emulation.workload
    return round(workload.sampled_tokens * workload.unique_ratio) * scaled.scenario.workload.group_size


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """A configuration of numbers, texts, lists of them and tables as TOML."""
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a configuration holds no {value}")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items())} }}"
    return json.dumps(value)


def run_training(folder: Path, config: Mapping[str, Any], *, timeout_s: float) -> EmulatedRun:
    """Run `gyre train` on the configuration to its end; raises GyreError with its log's tail."""
    name = str(config["name"])
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    log = folder / f"{name}.log"
    command = python_command("gyre_core.cli", "train", str(path), "--run", name, "--quiet")
    child = ChildProcess(name, command, log_path=log)
    watch = ProcessWatch(child.pid, Path(config["runs_dir"]))
    started = time.monotonic()
    try:
        while child.running():
            if time.monotonic() - started > timeout_s:
                raise GyreError(f"{name} did not end within {timeout_s:.0f} s; its log:\n{log_tail(log)}")
            watch.sample()
            time.sleep(_SAMPLE_S)
    finally:
        child.stop(grace_s=30.0)
    if child.wait() != 0:
        raise GyreError(f"{name} failed; its log {log} ends with:\n{log_tail(log)}")
    return read_run(folder / "runs" / name, config, watch)


def read_run(folder: Path, config: Mapping[str, Any], watch: "ProcessWatch") -> EmulatedRun:
    """What a run's store and its cells say."""
    compression = float(config["emulate"]["compression"])
    store = Store.open(f"{folder}/store")
    commits, steps = store.commits("step"), store.read_steps()
    if not steps:
        raise GyreError(f"{folder} holds no step")
    first = commits[0].created_s - float(steps[0].stats["step_s"])
    ends = [first, *(commit.created_s for commit in commits)]
    wall_s = ends[-1] - first
    accounts = [
        json.loads(account_path(folder, f"cell-{index}").read_text()) for index in range(config["scheduler"]["cells"])
    ]
    cell_s = wall_s * compression * len(accounts)
    decisions = [decision for step in steps for decision in step.extra.get("decisions", [])]
    outcomes = [outcome for decision in decisions for outcome in decision["outcomes"]]
    return EmulatedRun(
        policy=str(config["scheduler"]["policy"]),
        train_cells=int(config["scheduler"]["train_cells"]),
        steps=len(steps),
        hours=wall_s * compression / 3600,
        wall_s=wall_s,
        step_hours=tuple((end - start) * compression / 3600 for start, end in itertools.pairwise(ends)),
        step_s=tuple(float(step.stats["step_s"]) for step in steps),
        serving_share=sum(account["serving_s"] for account in accounts) / cell_s,
        training_share=sum(account["training_s"] for account in accounts) / cell_s,
        switch_share=sum(account["switch_s"] for account in accounts) / cell_s,
        idle_training_share=max(0.0, sum(a["training_role_s"] - a["training_s"] for a in accounts) / cell_s),
        moves=sum(not outcome.get("failed") for outcome in outcomes),
        calls=sum(account.get("calls", 0) for account in accounts),
        calls_moved=sum(int(outcome.get("calls_moved", 0)) for outcome in outcomes),
        rollouts=sum(sum(step.outcomes.values()) for step in steps),
        targets_trained=max(int(account["targets_trained"]) for account in accounts),
        staleness_max=max(int(step.stats.get("staleness_max", 0)) for step in steps),
        cpu_s=watch.cpu_s(),
        memory_mb=watch.memory_mb(),
        decisions=decisions,
    )


class ProcessWatch:
    """CPU and memory of a run's process and all below it, and of the Prefect server it shares with others, by kind.

    Call `sample` now and then.
    """

    def __init__(self, pid: int, runs_dir: Path) -> None:
        self._root = psutil.Process(pid)
        self._server = _prefect_server(runs_dir)
        self._server_cpu_s = _cpu_s(self._server)
        self._cpu: dict[int, tuple[str, float]] = {}
        self._memory: dict[str, float] = defaultdict(float)
        self._kinds: dict[int, str] = {}
        self._known: dict[int, psutil.Process] = {}
        self.alive = 0  # processes at the last look
        self._lock = threading.Lock()

    def sample(self) -> dict[str, float]:
        """Look at all processes; returns resident MB by kind, now, all of a kind together."""
        now: dict[str, float] = defaultdict(float)
        try:
            processes = [self._root, *self._root.children(recursive=True)]
            processes += [self._server] if self._server is not None else []
        except psutil.Error:
            return {}
        self.alive = len(processes)
        for process in processes:
            self._known.setdefault(process.pid, process)
            try:
                kind = self._kinds.get(process.pid) or self._kind(process)
                cpu_s, memory = _cpu_s(process), process.memory_info().rss / 1e6
            except psutil.Error:
                continue
            with self._lock:
                self._kinds[process.pid] = kind
                self._cpu[process.pid] = (kind, cpu_s - (self._server_cpu_s if process == self._server else 0.0))
                self._memory[kind] = max(self._memory[kind], memory)
            now[kind] += memory
        return dict(now)

    def left(self) -> int:
        """Processes of the run that live still; the Prefect server, which other runs use too, is none of them."""
        ours = [process for pid, process in self._known.items() if self._kinds.get(pid) != "Prefect server"]
        return sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ours)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by kind."""
        sums: dict[str, float] = defaultdict(float)
        for kind, seconds in self._cpu.values():
            sums[kind] += seconds
        return {kind: round(seconds, 1) for kind, seconds in sorted(sums.items())}

    def memory_mb(self) -> dict[str, float]:
        """Largest resident size of one process of a kind."""
        return {kind: round(size, 1) for kind, size in sorted(self._memory.items())}

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self._root.pid:
            return "flow"
        line = " ".join(process.cmdline())
        return next((kind for word, kind in _KINDS if word in line), "other")


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system


def _prefect_server(runs_dir: Path) -> psutil.Process | None:
    """The server of this folder's runs, when it runs already."""
    try:
        return psutil.Process(int(json.loads((runs_dir / "prefect" / "server.json").read_text())["pid"]))
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def cpu_share(run: EmulatedRun) -> float:
    """CPU of the control plane over what this machine has, start and end of the processes included."""
    return sum(run.cpu_s.values()) / (run.wall_s * (os.cpu_count() or 1))


def shares_line(run: EmulatedRun, name: str) -> str:
    """The run for people, under the name of its row."""
    return (
        f"{name:20s} {run.train_cells:5d} {run.hours:8.2f} {run.steps_per_hour:9.3f} {run.serving_share:8.1%} "
        f"{run.training_share:8.1%} {run.switch_share:7.1%} {run.idle_share:6.1%} {run.moves:6d} {run.wall_s:7.0f}"
    )


HEADER = "policy               split    hours  steps/h   serving training  switch   idle  moves  wall s"
