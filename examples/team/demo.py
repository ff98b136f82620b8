"""`make demo-team`: a scheduled training of a team's server is killed with its worker, and the next schedule goes on.

PostgreSQL, SeaweedFS, Prefect's server on that PostgreSQL and two process workers, all on this machine and all children
of this process. The quickstart is deployed with a schedule, two steps and its store in SeaweedFS. When the first step
is committed and the second has begun, the worker that runs it and its flow run are killed with SIGKILL. Prefect learns
of it by missed heartbeats; a later schedule resumes the run on any worker. The last line of standard output is JSON:
resumed, groups_lost, groups_twice and what else was seen. Exit code 1 when the run was not resumed or a group was lost
or trained twice.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from gyre_core.team.supervisor import Supervisor
from tasks.team import DATABASE, TeamPlan, plan_team, running_team

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN = "demo"
POOL = "gyre-runs"
STEPS = 2
GROUPS_PER_STEP = 2
SETTINGS = {
    "train.steps": STEPS,
    "rollout.groups_per_step": GROUPS_PER_STEP,
    "rollout.group_size": 3,
    "rollout.slots": 4,
    "evaluate.samples": 1,
    "scheduler.cells": 1,  # one engine: four programs of the team share the machine with it
    "engine.boot_timeout_s": 900.0,  # seconds on an idle machine
}
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs-dir", type=Path, help="folder of runs (default: a new one under the temporary folder)")
    parser.add_argument("--interval-s", type=float, default=60.0, help="between two schedules")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="give up after so many seconds")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    runs = options.runs_dir or Path(tempfile.mkdtemp(prefix="gyre-demo-"))
    runs.mkdir(parents=True, exist_ok=True)
    if options.runs_dir is None:
        runs.chmod(0o755)  # PostgreSQL's user must pass through it when we are root
    plan = plan_team(runs)
    os.environ.update(plan.client_environment())  # before Prefect is imported
    say("starting PostgreSQL, SeaweedFS, Prefect's server and two workers")
    stopping = threading.Event()
    with running_team(plan, pool=POOL, workers=2) as team:
        say(f"Prefect UI: {plan.api_url.removesuffix('/api')} on {plan.postgres.programs.version}")
        keeper = threading.Thread(target=team.watch, args=(stopping,), daemon=True)
        keeper.start()
        try:
            result = Demo(plan, team, runs, deadline_s=STARTED + options.limit_s).show(options.interval_s)
        finally:
            stopping.set()
            keeper.join()
    result["seconds"] = round(time.monotonic() - STARTED, 1)
    print(json.dumps(result), flush=True)
    return 0 if result["resumed"] and not result["groups_lost"] and not result["groups_twice"] else 1


class Demo:
    """The demonstration on a team that is up."""

    def __init__(self, plan: TeamPlan, team: Supervisor, runs: Path, *, deadline_s: float) -> None:
        self._plan, self._team, self._runs, self._deadline_s = plan, team, runs, deadline_s

    def show(self, interval_s: float) -> dict[str, Any]:
        self._deploy(interval_s)
        self._wait("the first step and a group of the second", self._second_step_has_begun)
        killed = self._kill()
        self._wait("the dead flow run to be noticed", lambda: bool(self._flow_runs("CRASHED")), every_s=2.0)
        say("Prefect has marked the killed flow run as crashed; a later schedule goes on")
        self._wait("the run to finish", lambda: bool(self._flow_runs("COMPLETED")), every_s=2.0)
        return {**self._account(), **killed}

    def _deploy(self, interval_s: float) -> None:
        overrides = {**SETTINGS, "runs_dir": str(self._runs), "store.url": self._plan.store_url(RUN)}
        overrides["data.heldout"] = str(_few_heldout(self._runs))
        chosen = [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "gyre_core.cli", "deploy", str(QUICKSTART / "run.toml"), "--run", RUN]
        command += ["--interval-s", f"{interval_s:g}", "--only", "train", "--no-restart", "--pool", POOL]
        command += ["--files", str(ROOT / "infra"), "--runs-dir", str(self._runs), *chosen]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"gyre deploy failed:\n{done.stderr}")
        say(f"deployed train/{RUN}: every {interval_s:g} s, {STEPS} steps of {GROUPS_PER_STEP} groups, store on S3")

    def _second_step_has_begun(self) -> bool:
        if self._commits("evaluation") and not getattr(self, "_told", False):
            self._told = True
            say("the first held-out evaluation is stored; training goes on")
        return self._commits("step") >= 1 and self._commits("group") >= GROUPS_PER_STEP + 1

    def _kill(self) -> dict[str, Any]:
        """SIGKILL the worker that runs the training, and the flow run's process."""
        for name, pid in self._team.pids().items():
            children = psutil.Process(pid).children() if name.startswith("worker") else []
            if children:
                os.kill(pid, signal.SIGKILL)
                for child in children:
                    child.kill()
                say(f"killed {name} (pid {pid}) and its flow run (pid {children[0].pid}) in step 2")
                return {"killed": [name, "flow run"], "steps_at_kill": self._commits("step")}
        raise SystemExit("no worker runs anything: the run ended before it could be killed; try again")

    def _account(self) -> dict[str, Any]:
        """What the store and Prefect's server say in the end."""
        from gyre_core.store import Store
        from gyre_core.store.verify import verify

        store = Store.open(self._plan.store_url(RUN), read_only=True)
        records = store.read_steps()
        trained = Counter(group for record in records for group in record.groups_trained)
        dropped = {group for record in records for group in record.groups_dropped}
        flow_runs = self._flow_runs()
        states = Counter(run["state_name"] for run in flow_runs)
        owners = [run for run in flow_runs if run["state_name"] in ("Crashed", "Completed")]
        return {
            "resumed": [run["state_name"] for run in owners[:2]] == ["Crashed", "Completed"] and len(records) == STEPS,
            "groups_lost": STEPS * GROUPS_PER_STEP - len(set(trained) | dropped),
            "groups_twice": sum(count > 1 for count in trained.values()) + len(set(trained) & dropped),
            "groups_trained": len(trained),
            "groups_dropped": len(dropped),
            "store_problems": len(verify(store).problems),
            "flow_runs": dict(sorted(states.items())),
            "workers_restarted": sum(self._team.restarts.values()),
            "database_bytes": self._plan.postgres.size_bytes(DATABASE),
        }

    def _flow_runs(self, state_type: str | None = None) -> list[dict[str, Any]]:
        """This run's flow runs that have begun or were refused, oldest first."""
        import httpx

        wanted = {"any_": [state_type]} if state_type else {"not_any_": ["SCHEDULED"]}
        body = {"flow_runs": {"state": {"type": wanted}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 200}
        reply = httpx.post(f"{self._plan.api_url}/flow_runs/filter", json=body, timeout=30.0)
        return reply.raise_for_status().json()

    def _commits(self, kind: str) -> int:
        from gyre_core.errors import StoreError
        from gyre_core.store import Store

        try:
            return len(Store.open(self._plan.store_url(RUN), read_only=True).commits(kind))
        except StoreError:
            return 0  # the run has not made its store yet

    def _wait(self, what: str, done: Callable[[], bool], *, every_s: float = 1.0) -> None:
        say(f"waiting for {what}")
        logs = f"logs: {self._plan.folder}/logs and {self._runs}/{RUN}/logs"
        while not done():
            failed = self._flow_runs("FAILED")
            if failed:
                raise SystemExit(f"the flow run failed: {failed[0]['state']['message']}; {logs}")
            if time.monotonic() > self._deadline_s:
                raise SystemExit(f"gave up waiting for {what}; {logs}")
            time.sleep(every_s)


def _few_heldout(runs: Path) -> Path:
    """Three held-out problems, so that evaluations take seconds."""
    import shutil

    folder = runs / "heldout"
    for problem in sorted((QUICKSTART / "problems" / "heldout").iterdir())[:3]:
        shutil.copytree(problem, folder / problem.name, dirs_exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
