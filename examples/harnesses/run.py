"""Runs a real harness against the proxy: `python examples/harnesses/run.py claude-code`.

Enters: a harness's TOML file beside this one (how it is installed and started, what the scripted policy does). Leaves:
a run in the runs folder that `gyre inspect` reads as any other, the rollout's tree, and one line of JSON. All but the
policy is what a training run uses: the proxy as a process of its own, SGLang's HTTP interface, the sandbox, the
verifier, the store. The engine alone is scripted (script.py): it "samples" real token ids of the quickstart policy.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from install import (
    DEFAULT_FOLDER,
    Installed,
    InstallError,
    UnavailableError,
    harness_names,
    install,
    machine,
    read_harness,
)
from plain import PlainRunner
from script import Script, ScriptedEngine

from gyre_core.cli.inspect import inspect_rollout
from gyre_core.config.load import parse_run_config
from gyre_core.config.models import RunConfig
from gyre_core.engine.fake import FakeEngineServer
from gyre_core.errors import GyreError, SandboxError
from gyre_core.grading.problems import load_problem
from gyre_core.process import new_secret
from gyre_core.proxy.pool import ProxyPool
from gyre_core.proxy.render import PromptRenderer
from gyre_core.proxy.settings import EngineEntry, ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
from gyre_core.proxy.tokenizer import FastTokenizer
from gyre_core.rollout.runner import FinishedRollout, run_rollout, workspace_of
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.rollout.view import WORKSPACE_DIR
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import RolloutSpec

HERE = Path(__file__).resolve().parent
POLICY = HERE.parent / "quickstart" / "policy"
PROBLEMS = HERE / "problems"
RUNS = HERE.parents[1] / "runs"
CONTEXT_LENGTH = 2_000_000  # the script does not care, and this small vocabulary makes real system prompts long
STALL_S = 360.0  # of the "silence" scenario: Claude Code and Codex give up after 300 s without keep-alives
KEEPALIVE_S = 15.0  # the proxy's default
POLICY_VERSION = 1


def run_config(name: str, installed: Installed, runs_dir: Path, keepalive_s: float) -> RunConfig:
    """The configuration of such a run, as a training run would have it."""
    harness = read_harness(name)["harness"]
    places = {"{install}": installed.path, "{node}": installed.node, "{here}": HERE, "{machine}": machine()}
    tree = {
        "name": f"harness-{name}",
        "runs_dir": str(runs_dir),
        "model": {"path": str(POLICY), "context_length": CONTEXT_LENGTH},
        "data": {"train": str(PROBLEMS)},
        "rollout": {"harness": filled(harness, places), "group_size": 1, "time_limit_s": 900, "overall_limit_s": 1000},
        "selection": {"min_group": 1},
        "train": {"micro_step_tokens": CONTEXT_LENGTH},
        "engine": {"max_total_tokens": CONTEXT_LENGTH},
        "proxy": {"keepalive_s": keepalive_s},
    }
    return parse_run_config(tree, base_dir=HERE, source=f"{name}.toml")


def filled(value: Any, places: Mapping[str, Any]) -> Any:
    """A TOML value with the places in its texts filled in."""
    if isinstance(value, dict):
        return {key: filled(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, places) for item in value]
    for place, content in places.items() if isinstance(value, str) else ():
        value = value.replace(place, str(content))
    return value


def proxy_settings(folder: RunFolder, config: RunConfig) -> ProxySettings:
    """What the proxy process is told."""
    return ProxySettings(
        admin_secret=new_secret(),
        model_path=config.model.path,
        context_length=config.model.context_length,
        journal_dir=folder.journal,
        keepalive_s=config.proxy.keepalive_s,
    )


async def run_harness(
    name: str,
    scenario: str,
    *,
    installed: Installed,
    runs_dir: Path,
    stall_s: float = STALL_S,
    keepalive_s: float = KEEPALIVE_S,
    crash: bool = False,
    sandboxed: bool = True,
    keep: bool = False,
) -> dict[str, Any]:
    """Run one scenario and commit it; returns the summary."""
    data = read_harness(name)
    config = run_config(name, installed, runs_dir, keepalive_s)
    folder = RunFolder.create(config, f"harness-{name}-{scenario}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}")
    workdir = folder.work / f"{scenario}-{name}"
    sandbox, sandbox_name = _sandbox(sandboxed)
    workspace = workspace_of(workdir) if sandbox_name == "none" else WORKSPACE_DIR
    steps = filled(data["scripts"][scenario], {"{workspace}": workspace})
    script = Script.read(data.get("summary", {}), steps)
    tokenizer = FastTokenizer.load(POLICY)
    vocab_size = PromptRenderer.load(POLICY).vocab_size
    engine = ScriptedEngine(
        script, encode=tokenizer.encode, decode=tokenizer.decode, vocab_size=vocab_size, stall_s=stall_s
    )
    engine.set_version(POLICY_VERSION)
    spec = RolloutSpec(
        rollout_id=f"{scenario}-{name}",
        group_id=f"{scenario}-{name}",
        problem_id=scenario,
        step=0,
        member=0,
        dispatch_version=POLICY_VERSION,
        seed=1,
    )
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(FakeEngineServer(engine))
        settings = proxy_settings(folder, config)
        supervisor = stack.enter_context(ProxySupervisor([settings], work=folder.work, logs=folder.logs))
        supervisor.wait_ready()
        if crash:
            engine.crash_once(lambda: os.kill(supervisor.pids[0], signal.SIGKILL))
        async with ProxyPool(supervisor.shards) as proxy:
            await proxy.set_engines([EngineEntry(url=server.url, slots=16)], POLICY_VERSION)
            finished = await run_rollout(
                spec,
                load_problem(PROBLEMS / scenario),
                rollout=config.rollout,
                grading=config.grading,
                proxy=proxy,
                sandbox=sandbox,
                workdir=workdir,
                keep_workspaces=keep,
            )
    wall_s = time.monotonic() - started
    store = Store.open(folder.store_url)
    record = {"group_id": spec.group_id, "rewards_by_rollout": {spec.rollout_id: finished.grade.reward}}
    store.commit_rollouts("group", [finished], [], record, token=spec.group_id)
    summary = {
        "harness": name,
        "version": config.rollout.harness.version,
        "scenario": scenario,
        "run": folder.run_id,
        "rollout": spec.rollout_id,
        "sandbox": sandbox_name,
        **_told(finished),
        **_exactness(finished.trajectory, engine),
        "stalls": engine.num_stalls,
        "proxy_restarts": sum(supervisor.shards.restarts),
        "wall_s": round(wall_s, 1),
    }
    if keep:
        summary["workspace"] = str(workspace_of(workdir))
    return summary


def _told(finished: FinishedRollout) -> dict[str, Any]:
    trajectory, tree = finished.trajectory, finished.trajectory.tree
    leaves = Counter(tree.nodes[leaf].role.value for leaf in tree.leaves())
    return {
        "exit_code": finished.harness.exit_code,
        "outcome": finished.grade.outcome.value,
        "reward": finished.grade.reward,
        "reason": finished.grade.reason,
        "calls": len(trajectory.calls),
        "roles": dict(Counter(call.role.value for call in trajectory.calls)),
        "branches": dict(leaves),
        "substitutions": dict(Counter(call.substitution.value for call in trajectory.calls)),
        "counters": dict(trajectory.counters),
        "sampled_tokens": tree.sampled_tokens,
        "unique_tokens": tree.unique_tokens,
        "longest_prompt": max((call.prompt_tokens for call in trajectory.calls), default=0),
    }


def _exactness(trajectory: Trajectory, engine: ScriptedEngine) -> dict[str, Any]:
    """Whether every call of the engine is one path of the tree, and every token it sampled is there once."""
    tree = trajectory.tree
    seen = Counter(tuple(call.input_ids + call.output_ids) for call in engine.calls)
    kept = Counter(tuple(tree.path_tokens(call.node_id).tolist()) for call in trajectory.calls)
    sampled = sum(len(call.output_ids) for call in engine.calls)
    return {
        "engine_calls": len(engine.calls),
        "engine_sampled_tokens": sampled,
        "exact": seen == kept and tree.sampled_tokens == sampled,
    }


def _sandbox(wanted: bool) -> tuple[Any, str]:
    if not wanted:
        return PlainRunner(), "none"
    try:
        sandbox = Sandbox("auto")
    except SandboxError as error:
        print(f"no sandbox works here, so the harness runs without walls ({error})", file=sys.stderr)
        return PlainRunner(), "none"
    return sandbox, sandbox.backend


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: the harness ran, its work got full marks and the record is exact. 3: it cannot be had here (no
    registry, no Node, no build for this platform). 4: its installation failed."""
    parser = argparse.ArgumentParser(description="Run a real harness against the proxy and a scripted engine.")
    parser.add_argument("harness", choices=harness_names())
    parser.add_argument("--scenario", default="tour", choices=sorted(path.name for path in PROBLEMS.iterdir()))
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    parser.add_argument("--install-dir", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--stall-s", type=float, help=f"length of the silence: {STALL_S:g}, or 0 with --crash")
    parser.add_argument("--keepalive-s", type=float, default=KEEPALIVE_S, help="the proxy's longest silence")
    parser.add_argument("--crash", action="store_true", help="kill the proxy (-9) at the end of the silence")
    parser.add_argument("--no-sandbox", action="store_true", help="run the harness without walls")
    parser.add_argument("--keep", action="store_true", help="keep the workspace and the harness's log")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stall_s = (0.0 if arguments.crash else STALL_S) if arguments.stall_s is None else arguments.stall_s
    try:
        installed = install(arguments.harness, arguments.install_dir)
    except InstallError as error:
        print(f"{arguments.harness} cannot be installed: {error}", file=sys.stderr)
        return 3 if isinstance(error, UnavailableError) else 4
    try:
        summary = asyncio.run(
            run_harness(
                arguments.harness,
                arguments.scenario,
                installed=installed,
                runs_dir=arguments.runs_dir.absolute(),
                stall_s=stall_s,
                keepalive_s=arguments.keepalive_s,
                crash=arguments.crash,
                sandboxed=not arguments.no_sandbox,
                keep=arguments.keep,
            )
        )
        _, text = inspect_rollout(arguments.runs_dir, summary["run"], summary["rollout"])
    except GyreError as error:
        print(f"{arguments.harness} could not be run: {error}", file=sys.stderr)
        return 1
    print(f"gyre inspect {summary['run']} {summary['rollout']} --runs-dir {arguments.runs_dir}\n")
    print(f"{text}\n")
    print(json.dumps(summary))
    return 0 if summary["exact"] and summary["reward"] == 1.0 else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # nothing is left to do, and Arrow's threads may abort an interpreter that ends (seen once in 40 runs)
