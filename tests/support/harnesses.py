"""Real harnesses in tests: the command of examples/harnesses, as a user runs it, and what it stored."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gyre_core.proxy.tokenizer import FastTokenizer
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Role

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples" / "harnesses" / "run.py"
POLICY = ROOT / "examples" / "quickstart" / "policy"
NOT_AVAILABLE = 3  # exit code of run.py: no registry, no Node, no build for this platform
_unavailable: dict[str, str] = {}  # asked once a test run: a registry that does not answer takes its time


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRun:
    """A run of a harness: the command's summary and the stored trajectory."""

    summary: dict[str, Any]
    inspected: str  # the tree as the command printed it
    trajectory: Trajectory
    workspace: Path

    def outputs(self) -> list[tuple[Role, str]]:
        """Role and text of every call's sampled tokens, in the order of the calls, read from the tree's nodes."""
        decode = FastTokenizer.load(POLICY).decode
        ids: dict[str, list[int]] = {call.call_id: [] for call in self.trajectory.calls}
        for node in self.trajectory.tree.nodes:
            if node.call_id:
                ids[node.call_id] += node.token_ids.tolist()
        return [(call.role, decode(ids[call.call_id])) for call in self.trajectory.calls]

    def prompts_with(self, text: str) -> list[str]:
        """The texts of the tree's prompt nodes that hold a text."""
        decode = FastTokenizer.load(POLICY).decode
        texts = [decode(node.token_ids.tolist()) for node in self.trajectory.tree.nodes if not node.call_id]
        return [found for found in texts if text in found]


def run_harness(name: str, scenario: str, folder: Path, *options: str, timeout_s: float = 280) -> HarnessRun:
    """Install (once a checkout) and run a harness; skips the test where it cannot be had."""
    if name in _unavailable:
        pytest.skip(_unavailable[name])
    command = [sys.executable, str(RUN), name, "--scenario", scenario, "--runs-dir", str(folder), "--keep", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder)
    if done.returncode == NOT_AVAILABLE:
        _unavailable[name] = done.stderr.strip()[-500:]
        pytest.skip(_unavailable[name])
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    inspected, _, last = done.stdout.rstrip().rpartition("\n")
    summary = json.loads(last)
    store = Store.open(RunFolder.open(folder, summary["run"]).store_url, read_only=True)
    trajectory = store.read_rollout(summary["rollout"]).trajectory
    return HarnessRun(summary=summary, inspected=inspected, trajectory=trajectory, workspace=Path(summary["workspace"]))


def assert_recorded(run: HarnessRun, roles: dict[str, int], substitutions: dict[str, int]) -> None:
    """All calls are there with their roles, nothing was refused, every sampled token is in the tree once."""
    trajectory, tree, summary = run.trajectory, run.trajectory.tree, run.summary
    tree.validate()
    assert (summary["outcome"], summary["reward"]) == ("finished", 1.0), summary["reason"]  # else all below differs too
    assert Counter(call.role.value for call in trajectory.calls) == roles
    assert Counter(call.substitution.value for call in trajectory.calls) == substitutions
    assert not {name for name in trajectory.counters if name.startswith("refused_")}
    assert summary["exact"]  # each call of the engine is one path of the tree, and no path is more
    assert len(trajectory.calls) == summary["engine_calls"] == sum(roles.values())
    assert tree.sampled_tokens == summary["engine_sampled_tokens"] == sum(c.output_tokens for c in trajectory.calls)
    for call in trajectory.calls:
        own = [node for node in tree.nodes if node.call_id == call.call_id]
        assert sum(len(node.token_ids) for node in own) == call.output_tokens
        assert all(node.sampled.all() and node.role is call.role for node in own)
    assert all(not node.sampled.any() for node in tree.nodes if not node.call_id)
    head = f"{summary['rollout']}: {len(trajectory.calls)} calls"
    assert head in run.inspected


def assert_steps(run: HarnessRun, role: Role, thread: str, num_steps: int) -> None:
    """The thread's steps were sampled in calls of this role, in order, each once."""
    texts = [text for kind, text in run.outputs() if kind is role and f"[{thread} " in text]
    marks = [text[text.index(f"[{thread} ") :].partition("]")[0] for text in texts]
    assert marks == [f"[{thread} {number}" for number in range(1, num_steps + 1)]


def assert_survived_silence(run: HarnessRun, *, stall_s: float, keepalive_s: float) -> None:
    """The silent call was answered once, after keep-alives, and its tool was carried out."""
    assert_recorded(run, {"main": 3}, {"clean": 3})
    assert_steps(run, Role.MAIN, "main", 3)
    silent = run.trajectory.calls[1]
    assert silent.finished_s - silent.started_s >= stall_s
    counters = run.trajectory.counters
    assert counters["keepalives"] >= stall_s / keepalive_s / 2 - 1  # a busy machine sends fewer, never none
    assert counters["replies_opened_early"] == run.summary["stalls"] == 1
    assert (run.workspace / "notes.txt").read_text() == "after the silence\n"


def assert_survived_crash(run: HarnessRun) -> None:
    """The proxy was killed once in the silent call; the harness asked again, and nothing is there twice."""
    assert_recorded(run, {"main": 3}, {"clean": 3})
    assert_steps(run, Role.MAIN, "main", 3)
    assert run.summary["proxy_restarts"] == run.summary["stalls"] == 1
    assert (run.workspace / "notes.txt").read_text() == "after the silence\n"
