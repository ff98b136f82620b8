"""A world built from a stored run: its calls, tools, training and publication as they were measured.

Enters: a run's store, read only. Leaves: a Trace: batches with the measured work of each rollout, an engine and trainer
whose speed is fitted to the measured times, the run's own cells and staleness, and the measured duration of each step.

A call took c + tokens * (alpha + beta * calls at the same time); alpha and beta are fitted by least squares over all
calls of the run, and c counts as tool time, which no policy changes. What a call took beyond or below that (prompts, a
busy machine) counts as more or fewer tokens: beside as many calls as then it takes as long as it did. Calls of cells
with hosts of their own slow down those of their cell, calls of cells that one machine runs slow down all. Between calls
a rollout is in its tools.

What a run itself takes is measured too, and counts for every policy alike: the time from a free slot to the rollout
that takes it (`start_delays`), from a batch's last rollout to its last complete group, and from there, training apart,
to the next dispatch: publication, checkpoint, returns and commit are one after the other.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.config import RunConfig
from gyre_core.errors import StoreError
from gyre_core.run_folder import RunFolder
from gyre_core.sim.draw import GroupDraw, RolloutDraw
from gyre_core.sim.model import Cluster, Costs, Scenario, Workload
from gyre_core.store import StepRecord, Store
from gyre_core.store.run_store import open_run_store

LEAST_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call as it was measured.

    Example: Call(start_s=3.0, end_s=4.5, prompt_tokens=900, output_tokens=40)
    """

    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRollout:
    """One rollout as it was measured.

    Example: TracedRollout(rollout_id="s0000-p07-00", group_id="s0000-p07", problem_id="p07", step=0, ...)
    """

    rollout_id: str
    group_id: str
    problem_id: str
    step: int
    start_s: float
    end_s: float
    calls: tuple[Call, ...]
    verifier_s: float = 0.0
    selected_tokens: float = 0.0  # of its trained branches
    reward: float | None = None

    @property
    def excluded(self) -> bool:
        """Nobody graded it: it trains nothing."""
        return self.reward is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A stored run as a world.

    Example: trace = read_trace(Path("runs"), "r1"); simulate(trace.scenario, trace.policy, source=trace.source)
    """

    run: str
    policy: str
    scenario: Scenario
    batches: list[list[GroupDraw]]
    step_s: tuple[float, ...]  # measured

    def source(self, step: int) -> list[GroupDraw]:
        """The step's batch; a longer simulation begins the trace again."""
        return self.batches[step % len(self.batches)]

    def as_workload(self) -> Scenario:
        """The run's scenario with lengths drawn from its measured mean and spread, for worlds of other sizes."""
        draws = [draw for batch in self.batches for group in batch for draw in group.rollouts]
        tokens = np.array([max(1.0, sum(draw.tokens)) for draw in draws])
        groups = [
            np.log([max(1.0, sum(draw.tokens)) for draw in group.rollouts]).mean() for b in self.batches for group in b
        ]
        within = float(np.log(tokens).var()) - float(np.var(groups))
        workload = replace(
            self.scenario.workload,
            sampled_tokens=float(tokens.mean()),
            max_tokens=float(tokens.max()),
            sigma_group=float(np.std(groups)),
            sigma_rollout=max(0.0, within) ** 0.5,
            unique_ratio=sum(g.train_tokens for b in self.batches for g in b) / float(tokens.sum()),
            prompt_tokens=0.0,
            tool_s=_mean([sum(draw.tools_s) for draw in draws]),
        )
        return replace(self.scenario, workload=workload)


def read_trace(runs_dir: Path, run: str) -> Trace:
    """The trace of a stored run. Raises ConfigError and StoreError when there is none or it has no whole step."""
    folder = RunFolder.open(runs_dir, run)
    config, store = open_run_store(folder)
    records = store.read_steps()
    if not records:
        raise StoreError(f"run {run} has no committed step yet: there is nothing to simulate from")
    return build_trace(run, config, records, read_rollouts(store))


def read_rollouts(store: Store) -> list[TracedRollout]:
    """Every training rollout of a store, in the order of its commits."""
    found = []
    for commit in store.commits("group"):
        tables = {name: store.read_table(commit, name).to_pylist() for name in _TABLES if name in commit.tables}
        calls: dict[str, list[Call]] = {}
        for row in tables.get("calls", ()):
            calls.setdefault(row["rollout_id"], []).append(
                Call(
                    start_s=row["started_s"],
                    end_s=row["finished_s"],
                    prompt_tokens=row["prompt_tokens"],
                    output_tokens=row["output_tokens"],
                )
            )
        grades = {row["rollout_id"]: row for row in tables.get("grades", ())}
        selected: dict[str, float] = {}
        for row in tables.get("selections", ()):
            selected[row["rollout_id"]] = selected.get(row["rollout_id"], 0.0) + row["num_tokens"]
        for row in tables.get("rollouts", ()):
            grade = grades.get(row["rollout_id"], {"reward": None, "verifier_s": 0.0})
            found.append(
                TracedRollout(
                    rollout_id=row["rollout_id"],
                    group_id=row["group_id"],
                    problem_id=row["problem_id"],
                    step=row["step"],
                    start_s=row["started_s"],
                    end_s=row["finished_s"],
                    calls=tuple(sorted(calls.get(row["rollout_id"], ()), key=lambda call: call.start_s)),
                    verifier_s=grade["verifier_s"] or 0.0,
                    selected_tokens=selected.get(row["rollout_id"], 0.0),
                    reward=grade["reward"],
                )
            )
    return [rollout for rollout in found if rollout.step >= 0]


_TABLES = ("rollouts", "calls", "grades", "selections")


def build_trace(run: str, config: RunConfig, records: Sequence[StepRecord], rollouts: Sequence[TracedRollout]) -> Trace:
    """The world of a run's records. StoreError when a step's rollouts are missing."""
    cells = config.scheduler.cells
    one_machine = cells > 1 and not config.scheduler.hosts
    engine = EngineFit.of([call for one in rollouts for call in one.calls], cells=1 if one_machine else cells)
    by_step: dict[int, dict[str, list[TracedRollout]]] = {}
    for rollout in sorted(rollouts, key=lambda one: one.start_s):  # in the order in which they were admitted
        by_step.setdefault(rollout.step, {}).setdefault(rollout.group_id, []).append(rollout)
    batches, earlier = [], _Earlier()
    delays: dict[str, float] = {}
    for step in by_step.values():
        delays |= start_delays([one for group in step.values() for one in group], slots=config.rollout.slots)
    for record in records:
        if not by_step.get(record.step):
            raise StoreError(f"step {record.step} of run {run} has no stored rollouts")
        groups = list(by_step[record.step].values())
        batches.append([_group(members, engine, earlier, delays) for members in groups])
        earlier.add(groups)
    stats = [dict(record.stats) for record in records]
    tokens = sum(group.train_tokens for batch in batches for group in batch)
    trained_s = sum(float(row.get("forward_backward_s", 0.0)) + float(row.get("packing_s", 0.0)) for row in stats)
    micro_steps = sum(len(record.micro_steps) for record in records)
    graded = max(1, sum(len(batch) for batch in batches))
    spans_s = [_span_s([one for group in by_step[record.step].values() for one in group]) for record in records]
    tails_s = [
        float(row["rollout_s"]) - span_s for row, span_s in zip(stats, spans_s, strict=True) if "rollout_s" in row
    ]
    # From the end of training to the step's end.
    closing_s = [
        max(0.0, float(row["step_s"]) - float(row["rollout_s"]) - float(row["train_tail_s"]))
        for row in stats
        if {"step_s", "rollout_s", "train_tail_s"} <= row.keys()
    ]
    moves_s = [
        float(outcome["seconds"])
        for record in records
        for decision in record.extra.get("decisions", ())
        for move, outcome in zip(decision["moves"], decision["outcomes"], strict=False)
        if move["to"] == "train" and not outcome.get("failed")
    ]
    costs = Costs(
        nodes_per_engine=1.0,
        alpha_s=engine.alpha_s,
        beta_s=engine.beta_s,
        prefill_tokens_per_s=1e5,
        train_tokens_per_node_s=max(1.0, tokens / max(trained_s, LEAST_S)),
        micro_steps=max(1, round(micro_steps / graded)),
        micro_overhead_s=0.0,
        optimizer_s=max(
            LEAST_S,
            _mean([float(row.get("optimizer_s", 0)) + float(row.get("gradients_s", 0)) for row in stats])
            + _mean(closing_s),
        ),
        sync_s=0.0,  # a publication is part of the step's close
        to_train_s=max(LEAST_S, _mean(moves_s)),
        to_rollout_s=0.0 if closing_s else max(LEAST_S, _mean(moves_s)),  # returns are part of the step's close
        grade_s=max(_mean([one.verifier_s for one in rollouts]), _mean(tails_s)),
    )
    workload = Workload(
        groups=max(len(batch) for batch in batches),
        group_size=config.rollout.group_size,
        sampled_tokens=max(1.0, _mean([sum(draw.tokens) for batch in batches for g in batch for draw in g.rollouts])),
    )
    cluster = Cluster(
        cells=cells,
        slots=config.slots_per_cell,
        train_cells=min(config.scheduler.train_cells, cells),
        one_machine=one_machine,
    )
    scenario = Scenario(
        workload=workload, costs=costs, cluster=cluster, steps=len(batches), phi=config.scheduler.staleness
    )
    return Trace(
        run=run,
        policy=config.scheduler.policy,
        scenario=scenario,
        batches=batches,
        step_s=tuple(float(row.get("step_s", 0.0)) for row in stats),
    )


def start_delays(rollouts: Sequence[TracedRollout], *, slots: int) -> dict[str, float]:
    """By rollout, how long the slot that it took had been free: what starting it took. `slots` at once, of one batch.

    The first ones count from the first start of all.
    """
    free = [min(one.start_s for one in rollouts)] * slots
    heapq.heapify(free)
    delays = {}
    for one in sorted(rollouts, key=lambda one: one.start_s):
        delays[one.rollout_id] = max(0.0, one.start_s - heapq.heappop(free))
        heapq.heappush(free, one.end_s)
    return delays


def _span_s(rollouts: Sequence[TracedRollout]) -> float:
    return max(one.end_s for one in rollouts) - min(one.start_s for one in rollouts)


def fit_engine(calls: Sequence[Call], *, cells: int = 1) -> tuple[float, float, float]:
    """(constant, alpha, beta) of a call's seconds = constant + tokens * (alpha + beta * calls at once in a cell).

    Values that come out negative are set to 0 and the rest is fitted again. Without calls: the smallest times.
    """
    calls = [call for call in calls if call.output_tokens > 0 and call.end_s > call.start_s]
    if not calls:
        return 0.0, LEAST_S, 0.0
    tokens = np.array([call.output_tokens for call in calls], float)
    seconds = np.array([call.end_s - call.start_s for call in calls])
    columns = {0: np.ones(len(calls)), 1: tokens, 2: tokens * _at_once(calls) / cells}
    while True:
        names = sorted(columns)
        found = np.linalg.lstsq(np.stack([columns[name] for name in names], axis=1), seconds, rcond=None)[0]
        values = dict(zip(names, found.tolist(), strict=True))
        worst = min(values, key=lambda name: values[name])
        if values[worst] >= 0 or len(values) == 1:
            return max(0.0, values.get(0, 0.0)), max(LEAST_S, values.get(1, 0.0)), max(0.0, values.get(2, 0.0))
        del columns[worst]


def _at_once(calls: Sequence[Call]) -> np.ndarray:
    """Mean number of calls that ran while each one did, itself included."""
    edges = sorted({edge for call in calls for edge in (call.start_s, call.end_s)})
    place = {edge: index for index, edge in enumerate(edges)}
    steps = np.zeros(len(edges))
    for call in calls:
        steps[place[call.start_s]] += 1
        steps[place[call.end_s]] -= 1
    running = np.cumsum(steps)[:-1]
    area = np.concatenate([[0.0], np.cumsum(running * np.diff(edges))])
    return np.array([(area[place[c.end_s]] - area[place[c.start_s]]) / (c.end_s - c.start_s) for c in calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """How fast a run's engines were, and what each of its calls was for them.

    Example: fit = EngineFit.of(calls, cells=1); tokens, constant_s = fit.work(calls[0])
    """

    constant_s: float
    alpha_s: float
    beta_s: float
    at_once: dict[Call, float]  # calls of its cell while each ran, itself included

    @classmethod
    def of(cls, calls: Sequence[Call], *, cells: int) -> "EngineFit":
        """`cells`: how many engines share the calls evenly."""
        constant_s, alpha_s, beta_s = fit_engine(calls, cells=cells)
        timed = [call for call in calls if call.end_s > call.start_s]
        beside = dict(zip(timed, (_at_once(timed) / cells).tolist(), strict=True)) if timed else {}
        return cls(constant_s=constant_s, alpha_s=alpha_s, beta_s=beta_s, at_once=beside)

    def work(self, call: Call) -> tuple[float, float]:
        """Tokens that take as long as the call did beside as many others, and seconds beside them."""
        seconds = max(0.0, call.end_s - call.start_s)
        if call not in self.at_once or seconds <= self.constant_s:
            return 0.0, seconds
        return (seconds - self.constant_s) / (self.alpha_s + self.beta_s * self.at_once[call]), self.constant_s


class _Earlier:
    """What a problem's rollouts took in earlier steps: the prediction for the next one."""

    def __init__(self) -> None:
        self._of: dict[str, list[float]] = {}

    def add(self, groups: Sequence[Sequence[TracedRollout]]) -> None:
        for members in groups:
            for one in members:
                self._of.setdefault(one.problem_id, []).append(one.end_s - one.start_s)

    def predicted(self, problem_id: str) -> float:
        """In means over all problems; 1 for a new one."""
        if problem_id not in self._of:
            return 1.0
        everything = _mean([value for values in self._of.values() for value in values])
        return _mean(self._of[problem_id]) / max(everything, LEAST_S)


def _group(
    members: Sequence[TracedRollout], engine: EngineFit, earlier: _Earlier, delays: Mapping[str, float]
) -> GroupDraw:
    return GroupDraw(
        rollouts=[_rollout(one, engine, delays[one.rollout_id]) for one in members],
        train_tokens=sum(one.selected_tokens for one in members),
        predicted=earlier.predicted(members[0].problem_id),
    )


def _rollout(one: TracedRollout, engine: EngineFit, delay_s: float) -> RolloutDraw:
    """Its calls and the gaps between them; what runs before the first call is a segment without tokens."""
    first_s = one.calls[0].start_s if one.calls else one.end_s
    tokens, tools_s, contexts = [0.0], [delay_s + max(0.0, first_s - one.start_s)], [0.0]
    for index, call in enumerate(one.calls):
        next_s = one.calls[index + 1].start_s if index + 1 < len(one.calls) else one.end_s
        work, constant_s = engine.work(call)
        tokens.append(work)
        tools_s.append(max(0.0, next_s - call.end_s) + constant_s)
        contexts.append(float(call.prompt_tokens))
    return RolloutDraw(tokens=tokens, tools_s=tools_s, contexts=contexts, failed=one.excluded)


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def trace_json(trace: Trace, simulated: Any) -> dict[str, Any]:
    """Measured beside simulated steps an hour under the run's own policy."""
    measured_h = sum(trace.step_s) / 3600
    measured = len(trace.step_s) / measured_h if measured_h else 0.0
    costs = trace.scenario.costs
    return {
        "run": trace.run,
        "policy": trace.policy,
        "steps": len(trace.step_s),
        "measured_steps_per_hour": round(measured, 2),
        "simulated_steps_per_hour": round(simulated.steps_per_hour, 2),
        "ratio": round(simulated.steps_per_hour / measured, 4) if measured else None,
        "engine": {"alpha_s": round(costs.alpha_s, 6), "beta_s": round(costs.beta_s, 6)},
        "train_tokens_per_s": round(costs.train_tokens_per_node_s, 1),
    }
