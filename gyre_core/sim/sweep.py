"""Sensitivity: one parameter of a scenario moved, every policy simulated at each value.

Enters: a scenario, a parameter's path ("workload.sigma_rollout"), values. Leaves: hours by policy and value. "cells"
splits the same nodes into more or fewer cells, with the same slots in all; "tail" scales both spreads of the lengths.
"""

from collections.abc import Sequence
from dataclasses import replace

from gyre_core.sim.compare import FIXED, MOVING, Report, best_split
from gyre_core.sim.model import INFINITE, Scenario
from gyre_core.sim.world import simulate
from gyre_core.types import Json


def changed(scenario: Scenario, name: str, value: float) -> Scenario:
    """The scenario with one parameter set. ValueError for an unknown one."""
    if name == "cells":
        cluster, cells = scenario.cluster, int(value)
        nodes, slots = cluster.cells * cluster.nodes_per_cell, cluster.cells * cluster.slots
        return replace(
            scenario,
            cluster=replace(
                cluster, cells=cells, nodes_per_cell=nodes / cells, slots=max(1, slots // cells), train_cells=1
            ),
        )
    if name == "tail":
        workload = scenario.workload
        # The cap on a rollout's length would hide the tail: it moves along.
        cap = INFINITE if value > 1 else workload.max_tokens
        spread = {"sigma_group": workload.sigma_group * value, "sigma_rollout": workload.sigma_rollout * value}
        return replace(scenario, workload=replace(workload, max_tokens=cap, **spread))
    if name == "phi":
        return replace(scenario, phi=int(value))
    part, _, field = name.partition(".")
    section = getattr(scenario, part, None) if part in {"workload", "costs", "cluster"} else None
    if section is None or field not in type(section).__dataclass_fields__:
        raise ValueError(f"there is no parameter {name!r}; name cells, tail, phi, or a field like costs.beta_s")
    old = getattr(section, field)
    return replace(scenario, **{part: replace(section, **{field: type(old)(value)})})


def sweep(
    scenario: Scenario,
    name: str,
    values: Sequence[float],
    *,
    seed: int = 0,
    steps: int = 12,
    report: Report = lambda _: None,
) -> Json:
    """Hours of each policy at each value, and how many times longer the others take than elastic_predictive."""
    rows = []
    for value in values:
        rows.append(sweep_point(scenario, name, value, seed=seed, steps=steps))
        report(f"{name} = {value:g}: " + ", ".join(f"{k} {v:.2f}" for k, v in rows[-1]["hours"].items()))
    return {"parameter": name, "values": list(values), "steps": steps, "seed": seed, "rows": rows}


def sweep_point(scenario: Scenario, name: str, value: float, *, seed: int, steps: int) -> Json:
    """One value of a sweep."""
    world = replace(changed(scenario, name, value), steps=steps)
    hours = {name: simulate(variant.of(world), variant.policy, seed=seed).hours for name, variant in MOVING.items()}
    for policy in FIXED:
        variant, found = best_split(world, policy, seed=seed)
        hours[policy] = found[variant.train_cells]
    ours = hours["elastic_predictive"]
    return {
        "value": value,
        "hours": {policy: round(one, 4) for policy, one in hours.items()},
        "over_predictive": {policy: round(one / ours, 4) for policy, one in hours.items()},
    }


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """`tail=0.5,1,2` as a name and values. ValueError when it is no such thing."""
    name, _, values = text.partition("=")
    try:
        return name.strip(), [float(value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"--sweep {text!r}: write a name and numbers, e.g. tail=0.5,1,2") from error
