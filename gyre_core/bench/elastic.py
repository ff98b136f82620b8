"""`gyre bench elastic`: the same emulated work under every scheduling policy, through the real control plane.

Enters: names of presets (gyre_core/sim/presets.py). Leaves: for each policy steps an hour of the cluster, what its
cells did, and how near that is to the bound max(work / devices, critical path / (k + 1)); for each preset the ratios
that the goals are about, and the simulator's answer to the same scenario; over all presets the worst.

Every policy runs the same rollouts (drawn from their ids), with the same staleness bound, on the same cells. The fixed
splits run with the split that the simulator finds best for them. How the clock is compressed: a first run in which
nothing takes time measures what the control plane itself needs for a step; the others are compressed so that this is
`control_share` of a step at most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.bench.elastic_run import (
    FREE,
    HEADER,
    EmulatedRun,
    cpu_share,
    run_config,
    run_training,
    shares_line,
    write_inputs,
)
from gyre_core.bench.elastic_scale import Scaled, scale
from gyre_core.rollout.dispatch import plan_groups, problems_of_step
from gyre_core.rollout.workload import plan_rollout
from gyre_core.sim.bound import Bound
from gyre_core.sim.compare import MOVING, Variant
from gyre_core.sim.draw import GroupDraw, RolloutDraw, Source
from gyre_core.sim.model import Scenario
from gyre_core.sim.presets import PRESETS
from gyre_core.sim.world import simulate

# As in `gyre simulate`: fixed splits with their best split, `_half` with the half; `colocate` one batch at a time,
# `colocate_ahead` with later batches beside, within the staleness.
POLICIES = (
    "elastic",
    "elastic_predictive",
    "async_off1",
    "async_off1_half",
    "async_stream",
    "colocate",
    "colocate_ahead",
)
PROBLEMS = 64
_SPREAD_SIGMA = 0.3  # of what is foreseen of a problem's length, as in the simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is emulated.

    Example: Effort(groups=4, steps=5)
    """

    groups: int  # of a batch
    steps: int
    control_share: float = 0.1  # of a step's time, at most
    policies: tuple[str, ...] = POLICIES
    timeout_s: float = 3600.0  # of one run


QUICK = Effort(groups=2, steps=4, control_share=0.3)
FULL = Effort(groups=4, steps=8, control_share=0.15)
CASES = ("terminal", "nl2repo-122b", "nl2repo-2.4t")  # with published numbers


def default_cases() -> list[str]:
    """The published cases that have a preset."""
    return [name for name in CASES if name in PRESETS]


def effort_of(
    *,
    quick: bool = False,
    groups: int | None = None,
    steps: int | None = None,
    control_share: float | None = None,
    policies: Sequence[str] | None = None,
) -> Effort:
    """The quick or the full effort with changes; raises ValueError for an unknown policy."""
    effort = QUICK if quick else FULL
    unknown = [name for name in policies or () if name not in POLICIES]
    if unknown:
        raise ValueError(f"unknown policies {', '.join(unknown)}: use {', '.join(POLICIES)}")
    return replace(
        effort,
        groups=groups or effort.groups,
        steps=steps or effort.steps,
        control_share=control_share or effort.control_share,
        policies=tuple(policies) if policies else effort.policies,
    )


def bench_elastic(
    presets: Sequence[str],
    effort: Effort,
    *,
    folder: Path,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run everything below `folder`; the runs share the Prefect server that PREFECT_API_URL names.

    Raises ValueError for an unknown preset, GyreError for a failed run.
    """
    unknown = [name for name in presets if name not in PRESETS]
    if unknown or not presets:
        raise ValueError(f"unknown presets {', '.join(unknown) or '(none given)'}: use {', '.join(PRESETS)}")
    write_inputs(folder, problems=PROBLEMS)
    results = {name: _bench_preset(name, effort, seed, folder, report) for name in presets}
    return {**worst(list(results.values())), "presets": results}


def worst(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each headline number the smallest over the presets; None where one was not measured."""
    values: dict[str, Any] = {}
    for name in HEADLINES:
        found = [result[name] for result in results]
        values[name] = min(found) if all(value is not None for value in found) else None
    return values


_OTHERS = {
    "colocate": "colocate",
    "colocate_ahead": "colocate_ahead",
    "async": "async_off1",
    "async_half": "async_off1_half",
    "async_stream": "async_stream",
}
HEADLINES = (
    *(f"{ours}_over_{suffix}" for ours in ("elastic", "predictive") for suffix in _OTHERS),
    "predictive_over_elastic",
    "fraction_of_bound",
)


def headlines(steps_per_hour: Mapping[str, float], fractions: Mapping[str, float]) -> dict[str, float | None]:
    """The ratios of one preset. Example: headlines({"elastic": 2.0, "colocate": 1.0}, {})["elastic_over_colocate"]"""

    def ratio(over: str, under: str) -> float | None:
        if over not in steps_per_hour or under not in steps_per_hour:
            return None
        return round(steps_per_hour[over] / steps_per_hour[under], 4)

    best = max((fractions[name] for name in ("elastic", "elastic_predictive") if name in fractions), default=None)
    return {
        **{f"elastic_over_{suffix}": ratio("elastic", other) for suffix, other in _OTHERS.items()},
        **{f"predictive_over_{suffix}": ratio("elastic_predictive", other) for suffix, other in _OTHERS.items()},
        "predictive_over_elastic": ratio("elastic_predictive", "elastic"),
        "fraction_of_bound": None if best is None else round(best, 4),
    }


def _bench_preset(name: str, effort: Effort, seed: int, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    scaled = scale(PRESETS[name].scenario, groups=effort.groups, steps=effort.steps, compression=1.0, seed=seed)
    source = source_of_emulation(scaled)
    bound_hours = bound_of(scaled.scenario, source)
    simulated = {policy: _simulated(scaled.scenario, policy, source) for policy in effort.policies}
    step_s = (simulated["elastic"][1] if "elastic" in simulated else bound_hours) * 3600 / effort.steps
    control_s = measure_control(folder, name, scaled, effort)
    compression = max(1.0, step_s * effort.control_share / control_s)
    report(
        f"{name}: {scaled.share:.1%} of the rollouts, {scaled.tokens_per_token:.0f} tokens a token, clock x "
        f"{compression:.0f}; the control plane alone needs {control_s:.1f} s a step, a step takes about "
        f"{step_s / compression:.0f} s"
    )
    report(HEADER)
    rows: dict[str, Any] = {}
    for policy in effort.policies:
        variant, simulated_hours = simulated[policy]
        config = run_config(
            folder,
            replace(scaled, scenario=variant.of(scaled.scenario)),
            name=f"{name}-{policy}".replace("_", "-"),
            policy=variant.policy,
            train_cells=variant.train_cells,
            steps=effort.steps,
            compression=compression,
        )
        run = run_training(folder, config, timeout_s=effort.timeout_s)
        report(shares_line(run, policy))
        rows[policy] = row(run, bound_hours=bound_hours, simulated_hours=simulated_hours)
    rates = {policy: value["steps_per_hour"] for policy, value in rows.items()}
    return {
        **headlines(rates, {policy: value["fraction_of_bound"] for policy, value in rows.items()}),
        "bound_hours": round(bound_hours, 4),
        "published": asdict(PRESETS[name].published),
        "scaled": {
            "share_of_rollouts": round(scaled.share, 4),
            "tokens_per_token": round(scaled.tokens_per_token, 1),
            "groups_per_step": scaled.scenario.workload.groups,
            "slots_per_cell": scaled.scenario.cluster.slots,
            "cells": scaled.scenario.cluster.cells,
            "staleness": scaled.scenario.staleness,
            "steps": effort.steps,
            "compression": round(compression, 1),
        },
        "control_s_per_step": round(control_s, 2),
        "control_share_of_step": round(control_s * compression / step_s, 4),
        "policies": rows,
    }


def row(run: EmulatedRun, *, bound_hours: float, simulated_hours: float) -> dict[str, Any]:
    """One policy's line of the result."""
    return {
        "split": run.train_cells if run.policy.startswith("async") else None,
        "hours": round(run.hours, 4),
        "steps_per_hour": round(run.steps_per_hour, 4),
        "fraction_of_bound": round(bound_hours / run.hours, 4),
        "simulated_hours": round(simulated_hours, 4),
        "emulated_over_simulated": round(run.hours / simulated_hours, 4),
        "utilisation": round(run.serving_share + run.training_share, 4),
        "shares": {
            "serving": round(run.serving_share, 4),
            "training": round(run.training_share, 4),
            "switch": round(run.switch_share, 4),
            "idle": round(run.idle_share, 4),
            "idle_training_role": round(run.idle_training_share, 4),
            "idle_without_calls": round(max(0.0, run.idle_share - run.idle_training_share), 4),
        },
        "moves_per_step": round(run.moves / run.steps, 2),
        "calls_moved": run.calls_moved,
        "rollouts": run.rollouts,
        "calls": run.calls,
        "staleness_max": run.staleness_max,
        "wall_s": round(run.wall_s, 1),
        "cpu_s": run.cpu_s,
        "cpu_share": round(cpu_share(run), 4),
        "memory_mb": run.memory_mb,
    }


def measure_control(folder: Path, name: str, scaled: Scaled, effort: Effort) -> float:
    """Wall seconds of a step in which rollouts, training and moves take no time: what the control plane needs."""
    config = run_config(folder, scaled, name=f"{name}-free", policy="elastic", train_cells=1, steps=3, compression=FREE)
    run = run_training(folder, config, timeout_s=effort.timeout_s)
    return run.wall_s / run.steps


def source_of_emulation(scaled: Scaled, *, run_seed: int = 0) -> Source:
    """The batches that an emulated run dispatches, as the simulator takes them."""
    workload, emulation, unit = scaled.scenario.workload, scaled.emulation.workload, scaled.tokens_per_token
    problems = [f"p{number:03d}" for number in range(PROBLEMS)]

    def batch(step: int) -> list[GroupDraw]:
        names = problems_of_step(problems, seed=run_seed, step=step, groups_per_step=workload.groups)
        groups = plan_groups(
            names, prefix=f"s{step:04d}", step=step, group_size=workload.group_size, seed=run_seed, policy_version=0
        )
        return [_group_draw([plan_rollout(emulation, spec.rollout_id) for spec in group]) for group in groups]

    def _group_draw(plans: list[Any]) -> GroupDraw:
        draws, tokens = [], 0.0
        for plan in plans:
            own = np.array(plan.call_tokens, float)
            others = np.array(plan.tool_tokens, float) + 9.0
            contexts = emulation.prompt_tokens + np.cumsum(own + others) - own / 2 - others
            draws.append(
                RolloutDraw(
                    tokens=(own * unit).tolist(),
                    tools_s=list(plan.tools_s),
                    contexts=np.minimum(contexts * unit, workload.context_tokens).tolist(),
                    failed=plan.failed,
                )
            )
            if not plan.failed:
                tokens += float(own.sum() + others[:-1].sum() + emulation.prompt_tokens)
        signal = len({plan.reward for plan in plans if not plan.failed}) > 1
        mean = float(np.mean([plan.sampled_tokens for plan in plans])) / emulation.sampled_tokens
        return GroupDraw(rollouts=draws, train_tokens=tokens * unit if signal else 0.0, predicted=max(mean, 1e-3))

    return batch


def bound_of(scenario: Scenario, source: Source) -> float:
    """Hours that no policy can beat on these batches."""
    bound = Bound(scenario)
    for step in range(scenario.steps):
        bound.add(source(step))
    return max(bound.work_hours, bound.path_hours)


def _simulated(scenario: Scenario, name: str, source: Source) -> tuple[Variant, float]:
    """What a row's name stands for, and the simulator's hours: of a fixed split the best one, or the half."""
    cells = scenario.cluster.cells
    if name in MOVING:
        variants = [MOVING[name]]
    elif name.endswith("_half"):
        variants = [Variant(policy=name.removesuffix("_half"), train_cells=max(1, cells // 2))]
    else:
        variants = [Variant(policy=name, train_cells=split) for split in range(1, cells)]
    hours = [simulate(one.of(scenario), one.policy, source=source).hours for one in variants]
    best = hours.index(min(hours))
    return variants[best], hours[best]


def elastic_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    lines = []
    for name, preset in result["presets"].items():
        lines.append(f"{name}: bound {preset['bound_hours']:.2f} h, {preset['scaled']}")
        lines.append("policy               split    hours  steps/h  of bound  simulated  serving training   idle")
        for policy, values in preset["policies"].items():
            shares = values["shares"]
            lines.append(
                f"{policy:20s} {values['split'] or '-':>5} {values['hours']:8.2f} {values['steps_per_hour']:8.3f} "
                f"{values['fraction_of_bound']:9.3f} {values['simulated_hours']:10.2f} {shares['serving']:8.1%} "
                f"{shares['training']:8.1%} {shares['idle']:6.1%}"
            )
        lines += [f"  {headline:32s} {preset[headline]}" for headline in HEADLINES]
    lines.append("worst over the presets:")
    lines += [f"  {headline:32s} {result[headline]}" for headline in HEADLINES]
    return lines
