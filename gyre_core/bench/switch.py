"""`gyre bench switch`: what role changes of a cell cost while calls run, phase by phase.

Enters: a number of live calls and of rounds. Leaves: seconds of both directions and of their phases, calls that did not
end as they would have without a move (none may), tokens that a moved call computed anew with the KV store and without,
and what the store costs an engine.

A round, on two cells of a tiny random model:
1. calls run on both cells; the satellite moves to training: its calls go on at the core;
2. other calls run on the core; it moves to training too, so that they wait; both train one step with learning rate 0
   (new version, same weights); the satellite returns with the new version, then the core: the calls go on there.
Calls are greedy, so each must end with the tokens of the same call unmoved, which is made at the end.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from gyre_core.bench.switch_cells import (
    BOOT_TIMEOUT_S,
    Cells,
    LiveCall,
    cpu_seconds,
    memory_mb,
    prompts,
    running_cells,
    training_batch,
    write_model,
)
from gyre_core.cells.fleet_records import MoveReport
from gyre_core.config.models import EngineConfig
from gyre_core.errors import GyreError
from gyre_core.proxy.pool import ProxyPool
from gyre_core.scheduler.policy import Move

PUBLISHED = {"rollout_to_train_s": 8.52, "train_to_rollout_s": 3.46}  # means, of cells of eight devices
DIRECTIONS = {"train": "rollout_to_train", "rollout": "train_to_rollout"}
PROMPT_CHARS = 2000

Report = Callable[[str], None]


def bench_switch(*, calls: int, rounds: int, max_tokens: int, report: Report = lambda line: None) -> dict[str, Any]:
    """Measure, with a KV store and without; raises GyreError when cells do not start or a move fails."""
    if calls < 2 or rounds < 1 or max_tokens < 32:
        raise ValueError("at least two calls, one round and 32 tokens a call")
    started = time.monotonic()
    scenarios = {}
    with tempfile.TemporaryDirectory(prefix="gyre-switch-") as name:
        folder = Path(name)
        model = write_model(folder / "model")
        for kv_store in ("mooncake", "none"):
            engine = EngineConfig(
                max_total_tokens=32768,
                boot_timeout_s=BOOT_TIMEOUT_S,
                kv_store=kv_store,
                kv_store_bytes=256 * 2**20,
            )
            report(f"starting two cells, kv_store = {kv_store}")
            with running_cells(folder / kv_store, model, engine, slots=2 * calls) as cells:
                run = _Scenario(cells, calls=calls, max_tokens=max_tokens, report=report)
                asyncio.run(run.rounds(rounds))
            scenarios[kv_store] = run
    with_store = scenarios["mooncake"]
    result: dict[str, Any] = {
        **{f"{direction}_s": _mean(with_store.seconds[direction]) for direction in DIRECTIONS.values()},
        "phases": {
            direction: {phase: _mean(values) for phase, values in with_store.phases[direction].items()}
            for direction in DIRECTIONS.values()
        },
        "calls": sum(run.num_calls for run in scenarios.values()),
        "calls_lost": sum(run.calls_lost for run in scenarios.values()),
        "calls_moved": sum(run.calls_moved for run in scenarios.values()),
        "tokens_recomputed": {
            "with_kv_store": _mean(with_store.recomputed),
            "without_kv_store": _mean(scenarios["none"].recomputed),
        },
        "page_tokens": EngineConfig().kv_page_tokens,
        "moved_context_tokens": _mean(with_store.moved_context),
        "switches": len(with_store.seconds["rollout_to_train"]) + len(with_store.seconds["train_to_rollout"]),
        "without_kv_store": {
            f"{direction}_s": _mean(scenarios["none"].seconds[direction]) for direction in DIRECTIONS.values()
        },
        "engine_cost": {
            name: {
                "cpu_s_per_1k_tokens": scenarios[kv_store].cpu_s_per_1k_tokens,
                "memory_mb": scenarios[kv_store].engine_memory_mb,
            }
            for name, kv_store in (("with_kv_store", "mooncake"), ("without_kv_store", "none"))
        },
        "published": PUBLISHED,
    }
    result["goal_met"] = bool(
        result["calls_lost"] == 0
        and all(result[name] < value for name, value in PUBLISHED.items())
        and result["tokens_recomputed"]["with_kv_store"] <= result["page_tokens"]
    )
    return {**result, "machine": machine(), "wall_s": round(time.monotonic() - started, 1)}


class _Scenario:
    """Rounds on one pair of cells, and what was measured."""

    def __init__(self, cells: Cells, *, calls: int, max_tokens: int, report: Report) -> None:
        self._cells = cells
        self._calls = calls
        self._max_tokens = max_tokens
        self._report = report
        self._made: list[tuple[str, LiveCall | BaseException]] = []  # text and what became of it
        self.seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS.values()}
        self.phases: dict[str, dict[str, list[float]]] = {direction: {} for direction in DIRECTIONS.values()}
        self.recomputed: list[float] = []  # tokens a moved call, one value a round
        self.moved_context: list[float] = []  # tokens of a moved call when it moved, likewise
        self.calls_moved = 0
        self.calls_lost = 0
        self.num_calls = 0
        self.cpu_s_per_1k_tokens = 0.0  # of both engines, prompts included
        self.engine_memory_mb = 0  # of one engine

    async def rounds(self, count: int) -> None:
        """Measure, then compare every call with itself unmoved."""
        async with ProxyPool(self._cells.shards) as pool:
            await self._measure_engines(pool)
            for index in range(count):
                await self._leave_with_calls(pool, index)
                await self._train_and_return(pool, index)
            await self._compare(pool)

    async def _measure_engines(self, pool: ProxyPool) -> None:
        """What calls that do not move cost; the first ones warm the engines up."""
        for tag in ("warm", "cost"):
            processes = self._cells.engine_processes()
            before = cpu_seconds(processes)
            texts = prompts(tag, self._calls, PROMPT_CHARS)
            made = await asyncio.gather(*(self._cells.call(pool, text, max_tokens=self._max_tokens) for text in texts))
            tokens = sum(len(call.output_ids) for call in made)
            self.cpu_s_per_1k_tokens = round(1000 * (cpu_seconds(processes) - before) / tokens, 3)
            self.engine_memory_mb = round(memory_mb(processes) / 2)

    async def _leave_with_calls(self, pool: ProxyPool, index: int) -> None:
        texts = prompts(f"move-{index}", self._calls, PROMPT_CHARS)
        before = (await pool.status())["counters"]["tokens_recomputed"]
        async with self._cells.live_calls(pool, texts, max_tokens=self._max_tokens) as ends:
            moved = await self._move("cell-1", "train")
            self._keep(texts, await ends)
        after = (await pool.status())["counters"]["tokens_recomputed"]
        if moved.calls_moved:
            prompt_tokens = statistics.fmean(c.prompt_tokens for _, c in self._made if isinstance(c, LiveCall))
            self.recomputed.append((after - before) / moved.calls_moved)
            self.moved_context.append(prompt_tokens + moved.partial_tokens / moved.calls_moved)
        self._report(
            f"round {index}: {moved.calls_moved} calls moved with {moved.partial_tokens} tokens, "
            f"{after - before} tokens computed anew"
        )

    async def _train_and_return(self, pool: ProxyPool, index: int) -> None:
        texts = prompts(f"wait-{index}", self._calls, PROMPT_CHARS)
        core = self._cells.fleet.core
        async with self._cells.live_calls(pool, texts, max_tokens=self._max_tokens) as ends:
            await asyncio.to_thread(self._open_step, index)
            await self._move("cell-0", "train")
            while await asyncio.to_thread(core.train_finish, wait_s=10.0) is None:
                pass
            await self._move("cell-1", "rollout")
            await self._move("cell-0", "rollout")
            self._keep(texts, await ends)

    def _open_step(self, index: int) -> None:
        core, batch = self._cells.fleet.core, training_batch(index)
        core.train_open(step=index, policy_version=index, learning_rate=0.0)
        core.train_group(batch[0].group_id, batch)
        core.train_seal(num_rollouts=len({branch.rollout_id for branch in batch}))

    async def _move(self, cell_id: str, to: str) -> MoveReport:
        move = Move(cell_id=cell_id, to="train" if to == "train" else "rollout", reason="bench")
        report = await asyncio.to_thread(self._cells.fleet.move, move)
        if report.failed:
            raise GyreError(f"{cell_id} did not move to {to}: {report.failed}")
        direction = DIRECTIONS[to]
        self.seconds[direction].append(report.seconds)
        for phase, seconds in report.phases.items():
            self.phases[direction].setdefault(phase, []).append(seconds)
        self.calls_moved += report.calls_moved
        self._report(f"  {cell_id} to {to}: {report.seconds:.3f} s")
        return report

    def _keep(self, texts: Sequence[str], ends: Iterable[LiveCall | BaseException]) -> None:
        self._made += zip(texts, ends, strict=True)

    async def _compare(self, pool: ProxyPool) -> None:
        """Each call again, unmoved, in groups as large as the live ones."""
        for start in range(0, len(self._made), self._calls):
            group = self._made[start : start + self._calls]
            unmoved = await asyncio.gather(
                *(self._cells.call(pool, text, max_tokens=self._max_tokens) for text, _ in group)
            )
            for (text, call), reference in zip(group, unmoved, strict=True):
                self.num_calls += 1
                if not isinstance(call, LiveCall) or call.output_ids != reference.output_ids:
                    self.calls_lost += 1
                    what = "other tokens" if isinstance(call, LiveCall) else repr(call)
                    self._report(f"lost: {text.partition(':')[0]}: {what}")


def machine() -> dict[str, Any]:
    """Where it was measured."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else "unknown",
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_1m": round(os.getloadavg()[0], 1),
    }


def switch_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    lines = [f"{result['calls']} live calls, {result['calls_moved']} moved, {result['calls_lost']} lost", ""]
    for direction in DIRECTIONS.values():
        name = f"{direction}_s"
        lines.append(f"{direction:18s} {result[name]:8.3f} s   (published {PUBLISHED[name]:.2f} s)")
        lines += [f"  {phase:16s} {seconds:8.3f} s" for phase, seconds in result["phases"][direction].items()]
    recomputed = result["tokens_recomputed"]
    lines += [
        "",
        f"computed anew by a moved call, of {result['moved_context_tokens']:.0f} tokens: "
        f"{recomputed['with_kv_store']:.1f} with the KV store (a page has {result['page_tokens']}), "
        f"{recomputed['without_kv_store']:.1f} without",
        *(
            f"engine {name.replace('_', ' ')}: {cost['cpu_s_per_1k_tokens']:.2f} processor seconds for 1,000 sampled "
            f"tokens, {cost['memory_mb']} MB"
            for name, cost in result["engine_cost"].items()
        ),
    ]
    return lines


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return round(statistics.fmean(values), 4) if values else 0.0
