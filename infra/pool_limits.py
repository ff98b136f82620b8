"""The limits of the work pools of a run, from the event log of its Prefect server: `python infra/pool_limits.py [RUN]`.

Reads the events `gyre.pool.resized` (each is a limit that the server has taken) and `gyre.cell.*` (a role change) of
the run's time, and the limits that the API tells now. Draws both pools' limits with the role changes as marks, and
prints one JSON object: how many role changes, how many limits, the longest time from a change to its limit.
"""

import argparse
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter
from prefect.events.schemas.events import Event

from gyre_core.config import PrefectConfig
from gyre_core.errors import SetupError
from gyre_core.store.run_store import newest_run
from tasks.prefect_server import ensure_server
from tasks.work_pools import ROLLOUT_POOL, TRAIN_POOL

ROOT = Path(__file__).resolve().parents[1]
MOVES = ("gyre.cell.train", "gyre.cell.rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHistory:
    """What the event log says of one run.

    Example: PoolHistory(limits={"gyre-rollout": [(0.0, 18), (9.1, 12)], "gyre-train": [(0.0, 0), (9.1, 1)]}, moves=...)
    """

    limits: dict[str, list[tuple[float, int]]]  # (seconds since the run's start, limit), by pool
    moves: list[tuple[float, str, str]]  # (seconds, cell, role)

    def longest_delay_s(self) -> float:
        """From a role change to the limit that follows it, at most."""
        delays = []
        for at_s, _, to in self.moves:
            pool = TRAIN_POOL if to == "train" else ROLLOUT_POOL
            later = [limit_s - at_s for limit_s, _ in self.limits[pool] if limit_s >= at_s]
            delays += later[:1]
        return max(delays, default=0.0)


def read_history(client: SyncPrefectClient, run_id: str) -> PoolHistory:
    """The events of a run's newest flow run. Raises SetupError when the server knows no such run."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run_id])), sort=FlowRunSort.START_TIME_DESC, limit=1
    )
    if not found or found[0].start_time is None:
        raise SetupError(f"the server has no flow run {run_id}; give --runs-dir of the run, or PREFECT_API_URL")
    start, end = found[0].start_time, found[0].end_time
    chosen = EventFilter(
        event=EventNameFilter(name=["gyre.pool.resized", *MOVES]),
        occurred=EventOccurredFilter(since=start, until=end or datetime.now(start.tzinfo)),
    )
    events = sorted(_all_events(client, chosen), key=lambda event: event.occurred)
    limits: dict[str, list[tuple[float, int]]] = {ROLLOUT_POOL: [], TRAIN_POOL: []}
    moves = []
    for event in events:
        at_s = (event.occurred - start).total_seconds()
        name = event.resource.get("prefect.resource.name", "")
        if event.event == "gyre.pool.resized":
            limits[name].append((at_s, int(event.payload["limit"])))
        elif event.payload.get("run") == run_id:
            moves.append((at_s, name, str(event.payload["to"])))
    return PoolHistory(limits=limits, moves=moves)


def _all_events(client: SyncPrefectClient, chosen: EventFilter) -> list[Event]:
    body: dict[str, Any] = {"filter": chosen.model_dump(mode="json"), "limit": 50}
    page = client.request("POST", "/events/filter", json=body).json()
    events = list(page["events"])
    while page.get("next_page"):
        page = client.request("GET", page["next_page"]).json()
        events += page["events"]
    return [Event.model_validate(event) for event in events]


def draw(history: PoolHistory, *, title: str) -> Figure:
    """Both limits as steps; a mark for each role change."""
    figure = Figure(figsize=(8.4, 3.8), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for axes, pool, colour, unit in (
        (upper, ROLLOUT_POOL, "#3b7dd8", "rollouts at once"),
        (lower, TRAIN_POOL, "#e07b39", "cells that train"),
    ):
        times, limits = zip(*history.limits[pool], strict=True)
        axes.step(times, limits, where="post", lw=1.4, color=colour)
        axes.set(ylabel=unit, ylim=(0, None))
        axes.set_title(f"limit of the work pool {pool}", fontsize=9, loc="left")
    for at_s, _, to in history.moves:
        axes = lower if to == "train" else upper
        axes.axvline(at_s, lw=0.5, color="#8a8f98", alpha=0.6)
    lower.set_xlabel("seconds since the run's start")
    figure.suptitle(title, fontsize=10)
    return figure


def main() -> int:
    """Print the history and write its picture; exit code 1 with a message when there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="a run under --runs-dir (default: the newest)")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "pool-limits.png")
    arguments = parser.parse_args()
    run_id = newest_run(arguments.runs_dir, arguments.run).run_id
    server = ensure_server(PrefectConfig(port=0), arguments.runs_dir)
    try:
        with get_client(sync_client=True) as client:
            history = read_history(client, run_id)
            now = {name: client.read_work_pool(name).concurrency_limit for name in (ROLLOUT_POOL, TRAIN_POOL)}
    except SetupError as error:
        print(f"error: {error}")
        return 1
    finally:
        server.stop()
    draw(history, title=f"{run_id}: work-pool limits follow the cells").savefig(arguments.out)
    print(
        json.dumps(
            {
                "run": run_id,
                "role_changes": len(history.moves),
                "limits": {name: len(values) for name, values in history.limits.items()},
                "longest_delay_s": round(history.longest_delay_s(), 3),
                "limits_now": now,
                "picture": str(arguments.out),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
