"""The capacity planner: which cells, split, phi, mu and slots make a workload fast on a given number of GPUs.

Enters: a scenario (workload and costs), GPUs. Leaves: ranked rows with their spread over seeds and what limits each.
The search is in two rounds: every candidate for a few steps on one seed, the best of them for longer on several seeds.

What limits a row is found by asking: it is simulated again with half the tail, with faster engines, with a faster
trainer, with moves and publication for nothing, with one more version of staleness; what helps most is named.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gyre_core.sim.model import Scenario
from gyre_core.sim.world import simulate
from gyre_core.types import Json

GPUS_PER_NODE = 8
CELL_COUNTS = (2, 3, 4, 6, 8, 12, 16)
SCREEN_STEPS, STEPS = 6, 16
ENOUGH = 1.02  # a change that gains less limits nothing
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to use the GPUs.

    Example: Candidate(policy="async_stream", cells=4, train_cells=1, slots=256, phi=1, mu=1)
    """

    policy: str
    cells: int
    train_cells: int  # of fixed splits
    slots: int
    phi: int
    mu: int

    def of(self, scenario: Scenario, *, nodes: float, steps: int) -> Scenario:
        """The scenario arranged so."""
        cluster = replace(
            scenario.cluster,
            cells=self.cells,
            nodes_per_cell=nodes / self.cells,
            slots=self.slots,
            train_cells=self.train_cells,
        )
        return replace(scenario, cluster=cluster, phi=self.phi, mu=self.mu, steps=steps)


def plan(
    scenario: Scenario,
    *,
    gpus: int,
    policies: Sequence[str] = ("elastic_predictive", "elastic", "async_stream", "colocate"),
    max_staleness: int = 1,
    seeds: Sequence[int] = (0, 1, 2),
    rows: int = 8,
    report: Report = lambda _: None,
) -> Json:
    """The best `rows` candidates, fastest first. Raises ValueError when the GPUs hold fewer than two engines."""
    nodes = gpus / GPUS_PER_NODE
    scenario = _light(scenario)
    found = candidates(scenario, nodes=nodes, policies=policies, max_staleness=max_staleness)
    screened = []
    for candidate in found:
        result = simulate(candidate.of(scenario, nodes=nodes, steps=SCREEN_STEPS), candidate.policy, seed=seeds[0])
        screened.append((result.hours, candidate))
    screened.sort(key=lambda pair: pair[0])
    report(f"{len(found)} candidates screened with {SCREEN_STEPS} steps each")
    table = []
    for _, candidate in _best_of_each(screened, rows):
        world = candidate.of(scenario, nodes=nodes, steps=STEPS)
        results = [simulate(world, candidate.policy, seed=seed) for seed in seeds]
        speeds = [one.steps_per_hour for one in results]
        mean = statistics.fmean(speeds)
        limit, gain = limited_by(candidate.of(scenario, nodes=nodes, steps=SCREEN_STEPS), candidate.policy, seeds[0])
        table.append(
            {
                "policy": candidate.policy,
                "cells": candidate.cells,
                "train_cells": candidate.train_cells if candidate.policy.startswith("async") else None,
                "slots": candidate.slots,
                "phi": candidate.phi,
                "mu": candidate.mu,
                "staleness": world.staleness,
                "steps_per_hour": round(mean, 4),
                "plus_minus": round(confidence(speeds), 4),
                "utilisation": round(statistics.fmean(one.utilisation for one in results), 4),
                "fraction_of_bound": round(statistics.fmean(one.fraction_of_bound for one in results), 4),
                "clipped_share": round(statistics.fmean(one.clipped_share for one in results), 4),
                "limited_by": limit,
                "its_removal_gains": round(gain, 3),
            }
        )
        report(f"{candidate.policy}, {candidate.cells} cells: {mean:.3f} steps/h, limited by {limit}")
    table.sort(key=lambda row: -row["steps_per_hour"])
    return {"gpus": gpus, "nodes": nodes, "candidates": len(found), "seeds": list(seeds), "rows": table}


def candidates(scenario: Scenario, *, nodes: float, policies: Sequence[str], max_staleness: int) -> list[Candidate]:
    """Everything that is worth a look. ValueError when no two cells of one engine each fit."""
    live = scenario.workload.groups * scenario.workload.group_size
    counts = [cells for cells in CELL_COUNTS if nodes / cells >= scenario.costs.nodes_per_engine]
    if not counts:
        needed = 2 * scenario.costs.nodes_per_engine * GPUS_PER_NODE
        raise ValueError(
            f"{nodes * GPUS_PER_NODE:.0f} GPUs do not make two cells: an engine of this workload takes "
            f"{scenario.costs.nodes_per_engine:g} nodes, so at least {needed:.0f} GPUs are needed"
        )
    found = []
    for phi, mu in ((phi, mu) for phi in range(max_staleness + 1) for mu in (1, 2) if phi + mu - 1 <= max_staleness):
        depth = (phi + mu) * live
        for cells in counts:
            # Just enough slots for all that may be dispatched, and half of that.
            for slots in sorted({max(1, math.ceil(depth / cells)), max(1, math.ceil(depth / cells / 2))}):
                for policy in policies:
                    splits = _splits(cells) if policy.startswith("async") else (1,)
                    found += [
                        Candidate(policy=policy, cells=cells, train_cells=split, slots=slots, phi=phi, mu=mu)
                        for split in splits
                    ]
    return found


def limited_by(scenario: Scenario, policy: str, seed: int) -> tuple[str, float]:
    """(what limits, how many times faster the steps are without it)."""
    base_s = simulate(scenario, policy, seed=seed).hours
    costs, workload = scenario.costs, scenario.workload
    sizes = {"sigma_group": workload.sigma_group / 2, "sigma_rollout": workload.sigma_rollout / 2}
    changes = {
        "tail": replace(scenario, workload=replace(workload, **sizes)),
        "engines": replace(scenario, costs=replace(costs, alpha_s=costs.alpha_s / 1.25, beta_s=costs.beta_s / 1.25)),
        "train": replace(scenario, costs=replace(costs, train_tokens_per_node_s=costs.train_tokens_per_node_s * 1.25)),
        "switch": replace(scenario, costs=replace(costs, to_train_s=0.1, to_rollout_s=0.1, sync_s=0.1)),
        "staleness": replace(scenario, phi=scenario.phi + 1),
    }
    gains = {name: base_s / simulate(changed, policy, seed=seed).hours for name, changed in changes.items()}
    best = max(gains, key=lambda name: gains[name])
    return (best, gains[best]) if gains[best] >= ENOUGH else ("nothing alone", gains[best])


def confidence(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of a few values (Student's t); infinite for one."""
    if len(values) < 2:
        return math.inf
    t = _T95[min(len(values) - 2, len(_T95) - 1)]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def _splits(cells: int) -> tuple[int, ...]:
    return tuple(sorted({1, cells // 4, cells // 3, cells // 2, 2 * cells // 3} & set(range(1, cells))))


def _best_of_each(screened: Sequence[tuple[float, Candidate]], rows: int) -> list[tuple[float, Candidate]]:
    """The fastest ones, among them at least one of each policy."""
    best = [next(pair for pair in screened if pair[1].policy == policy) for policy in _policies(screened)]
    rest = [pair for pair in screened if pair not in best]
    return sorted([*best, *rest[: max(0, rows - len(best))]], key=lambda pair: pair[0])


def _policies(screened: Sequence[tuple[float, Candidate]]) -> list[str]:
    return list(dict.fromkeys(candidate.policy for _, candidate in screened))


def _light(scenario: Scenario) -> Scenario:
    """Fewer, longer lumps of calls: the planner looks at many worlds."""
    return replace(scenario, workload=replace(scenario.workload, segments=min(3, scenario.workload.segments)))
