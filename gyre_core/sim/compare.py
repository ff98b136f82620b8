"""One workload under every policy, beside what is published.

Enters: a preset, seeds. Leaves: hours, ratios and residuals as plain data. The workload, the costs and the batches are
the same for all; fixed splits are searched (the best one counts) and the half split is shown beside it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_core.sim.model import Scenario
from gyre_core.sim.presets import FIT_SEEDS, HELD_OUT_SEEDS, Preset
from gyre_core.sim.result import Result
from gyre_core.sim.world import simulate

FIXED = ("async_off1", "async_stream")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy, for fixed splits how many cells train, and whether it dispatches ahead.

    Example: Variant(policy="async_off1", train_cells=2)
    """

    policy: str
    train_cells: int = 1
    ahead: bool = True  # False: one batch at a time, the classic alternation

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with this split."""
        scenario = scenario if self.ahead else replace(scenario, phi=0)
        return replace(scenario, cluster=replace(scenario.cluster, train_cells=self.train_cells))


# `colocate` is the classic alternation: a batch is dispatched when the one before it is trained. `colocate_ahead` uses
# the staleness too: later batches run beside, and their calls are parked while all cells train.
MOVING = {
    "elastic": Variant(policy="elastic"),
    "elastic_predictive": Variant(policy="elastic_predictive"),
    "colocate": Variant(policy="colocate", ahead=False),
    "colocate_ahead": Variant(policy="colocate"),
}


def best_split(
    scenario: Scenario, policy: str, *, seed: int, report: Report = lambda _: None
) -> tuple[Variant, dict[int, float]]:
    """The fixed split with the fewest hours, and the hours of each one looked at.

    Splits are tried from few training cells to many; the search ends when two in a row are worse than the best.
    """
    hours: dict[int, float] = {}
    for train_cells in range(1, scenario.cluster.cells):
        variant = Variant(policy=policy, train_cells=train_cells)
        hours[train_cells] = simulate(variant.of(scenario), policy, seed=seed).hours
        report(f"{policy} with {train_cells} training cells: {hours[train_cells]:.2f} h")
        best = min(hours, key=lambda count: hours[count])
        if train_cells - best >= 2:
            break
    return Variant(policy=policy, train_cells=min(hours, key=lambda count: hours[count])), hours


def compare(
    preset: Preset,
    *,
    steps: int | None = None,
    seeds: Sequence[int] = (HELD_OUT_SEEDS[0],),
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Every policy on every seed. The best split is chosen on the fit's first seed, which is not evaluated."""
    start_s = time.perf_counter()
    scenario = preset.scenario if steps is None else replace(preset.scenario, steps=steps)
    half = max(1, scenario.cluster.cells // 2)
    variants = dict(MOVING)
    splits: dict[str, Any] = {}
    if scenario.cluster.cells > 1:
        for policy in FIXED:
            variants[policy], hours = best_split(scenario, policy, seed=FIT_SEEDS[0], report=report)
            splits[policy] = {"train_cells": variants[policy].train_cells, "hours": _rounded(hours)}
            variants[f"{policy}_half"] = Variant(policy=policy, train_cells=half)
    results: dict[str, list[Result]] = {}
    run: dict[Variant, list[Result]] = {}  # the half split may be the best one: simulated once
    for name, variant in variants.items():
        if variant not in run:
            run[variant] = [simulate(variant.of(scenario), variant.policy, seed=seed) for seed in seeds]
        results[name] = run[variant]
        report(f"{name}: {_mean_hours(results[name]):.2f} h")
    means = {name: _mean_hours(found) for name, found in results.items()}
    return {
        "preset": preset.name,
        "title": preset.title,
        "steps": scenario.steps,
        "staleness": scenario.staleness,
        "seeds": list(seeds),
        "fit_seeds": list(FIT_SEEDS),
        "fitted": [name for name, source in preset.sources.items() if source.startswith("fitted")],
        "hours": _rounded(means),
        "hours_plus_minus": {name: _spread([one.hours for one in found]) for name, found in results.items()},
        **_ratios(means),
        "ratios_by_seed": _ratios_by_seed(results),
        **_against_published(preset, means, scenario.steps),
        "splits": splits,
        "fraction_of_bound": {
            name: round(statistics.fmean(one.fraction_of_bound for one in found), 4) for name, found in results.items()
        },
        "policies": {name: found[0].as_json() for name, found in results.items()},
        "wall_s": round(max(one.wall_s for found in results.values() for one in found), 2),
        "total_wall_s": round(time.perf_counter() - start_s, 2),
    }


def _mean_hours(results: Sequence[Result]) -> float:
    return statistics.fmean(one.hours for one in results)


def _spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for one."""
    return round(statistics.stdev(values), 3) if len(values) > 1 else 0.0


def _ratios_by_seed(results: dict[str, list[Result]]) -> dict[str, list[float]]:
    """Each ratio on each seed: policies are compared on the same batches."""
    seeds = range(len(next(iter(results.values()))))
    rows = [_ratios({name: found[index].hours for name, found in results.items()}) for index in seeds]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _ratios(hours: dict[str, float]) -> dict[str, float]:
    """How many times longer the others take than elastic and than elastic_predictive."""
    found: dict[str, float] = {"predictive_over_elastic": hours["elastic"] / hours["elastic_predictive"]}
    names = {
        "colocate": "colocate",
        "colocate_ahead": "colocate_ahead",
        "async": "async_off1",
        "async_half": "async_off1_half",
        "async_stream": "async_stream",
        "async_stream_half": "async_stream_half",
    }
    for ours in ("elastic", "elastic_predictive"):
        for suffix, other in names.items():
            if other in hours:
                found[f"{ours}_over_{suffix}"] = hours[other] / hours[ours]
    return {name: round(value, 4) for name, value in found.items()}


def _against_published(preset: Preset, hours: dict[str, float], steps: int) -> dict[str, Any]:
    """Published numbers, and how far ours are: residual = simulated / published - 1."""
    published = preset.published
    scale = preset.scenario.steps / steps
    residuals = {
        name: round(hours[name] * scale / value - 1, 4) for name, value in published.hours.items() if name in hours
    }
    return {
        "published": {
            "hours": published.hours,
            "elastic_over_async": published.over_async,
            "elastic_over_colocate": published.over_colocate,
        },
        "residuals": residuals,
    }


def _rounded(values: dict[Any, float]) -> dict[str, float]:
    return {str(name): round(value, 2) for name, value in values.items()}
