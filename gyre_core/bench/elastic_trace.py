"""`gyre bench elastic --trace RUN`: a stored run done once more by emulated cells, at its own speed.

Enters: a run's store, with its configuration and problems. Leaves: steps an hour three times, for the same work under
the same policy: as the real run measured them, as the real control plane reaches them with emulated cells, and as the
simulator says. Each rollout of the emulated run does what that rollout did: the same calls with the same work, the same
pauses between them, the same reward; micro-steps, optimizer, publication and role changes take what they took on
average. Other policies on the same trace have no real run beside them.

Starting a rollout took what it took too: on a machine that harnesses, engines and trainers keep busy that is more than
the control plane alone needs, which a first emulated run of two steps measures; the difference is waited for.

Engines are emulated cell by cell: where cells shared one machine, calls of other cells count as if evenly spread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_core.bench.elastic_inputs import save_emulated_model
from gyre_core.bench.elastic_run import EmulatedRun, run_config, run_training
from gyre_core.bench.elastic_scale import Scaled
from gyre_core.config import RunConfig
from gyre_core.config.emulation import EmulationConfig, EngineCosts, SwitchCosts, TrainCosts, Workload
from gyre_core.errors import ConfigError
from gyre_core.rollout.workload import TURN_TOKENS, RolloutPlan, write_plans
from gyre_core.run_folder import RunFolder
from gyre_core.sim.trace import EngineFit, Trace, TracedRollout, build_trace, read_rollouts, start_delays
from gyre_core.sim.world import simulate
from gyre_core.store import StepRecord, Store
from gyre_core.store.run_store import open_run_store

_TEMPLATE_TOKENS = TURN_TOKENS + 1  # around two messages, as the emulated tokenizer counts them
_START_STEPS = 2  # of the run that measures what the control plane itself takes to start a rollout
_FIXED = ("async_off1", "async_stream")


def bench_trace(
    runs_dir: Path,
    run: str,
    *,
    policies: Sequence[str],
    folder: Path,
    timeout_s: float = 3600.0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Emulate a stored run below `folder`; without policies, under its own.

    Raises ConfigError when its problems are gone or a policy does not fit it, StoreError without a whole step.
    """
    run_folder = RunFolder.open(runs_dir, run)
    config, store = open_run_store(run_folder)
    records, rollouts = store.read_steps(), read_rollouts(store)
    trace = build_trace(run, config, records, rollouts)
    if not config.data.train.exists():
        raise ConfigError(f"the problems of {run} are not at {config.data.train} any more: the trace needs their names")
    chosen = list(policies) or [trace.policy]
    impossible = [name for name in chosen if name in _FIXED and trace.scenario.cluster.cells == 1]
    if impossible:
        raise ConfigError(f"{', '.join(impossible)}: a run of one cell has none to keep apart")
    folder.mkdir(parents=True, exist_ok=True)
    save_emulated_model(folder / "model")
    engine = EngineFit.of([call for one in rollouts for call in one.calls], cells=trace.scenario.cluster.cells)
    plans = {one.rollout_id: plan_of(one, engine) for one in rollouts}
    emulation = emulation_of(trace, records, rollouts, engine, folder / "plans.json")
    write_plans(folder / "plans.json", plans)
    first = config_of(folder, config, trace, emulation, plans, trace.policy)
    first["name"] = "trace-start"
    first["train"]["steps"] = min(_START_STEPS, len(records))
    run_training(folder, first, timeout_s=timeout_s)
    own_s = _mean(list(delays_of(folder / "runs" / "trace-start", config.rollout.slots).values()))
    delays = delays_of(run_folder.path, config.rollout.slots, rollouts)
    plans = {name: replace(plan, start_s=plan.start_s + max(0.0, delays[name] - own_s)) for name, plan in plans.items()}
    write_plans(folder / "plans.json", plans)
    report(f"a rollout's start took {_mean(list(delays.values())):.2f} s, the control plane alone needs {own_s:.2f} s")
    rows = {}
    for policy in chosen:
        tree = config_of(folder, config, trace, emulation, plans, policy)
        emulated = run_training(folder, tree, timeout_s=timeout_s)
        simulated = simulate(trace.scenario, policy, source=trace.source)
        rows[policy] = row(trace, policy, emulated, simulated.steps_per_hour)
        report(trace_line(policy, rows[policy]))
    return {"run": run, "policy": trace.policy, "steps": len(records), "policies": rows}


def row(trace: Trace, policy: str, emulated: EmulatedRun, simulated: float) -> dict[str, Any]:
    """One policy's steps an hour; `measured` for the run's own alone."""
    own_s = sum(emulated.step_s)
    rate = emulated.steps / own_s * 3600
    measured = len(trace.step_s) / sum(trace.step_s) * 3600 if policy == trace.policy else None
    return {
        "measured_steps_per_hour": round(measured, 2) if measured else None,
        "emulated_steps_per_hour": round(rate, 2),
        "simulated_steps_per_hour": round(simulated, 2),
        "emulated_over_measured": round(rate / measured, 4) if measured else None,
        "simulated_over_measured": round(simulated / measured, 4) if measured else None,
        "simulated_over_emulated": round(simulated / rate, 4),
        "moves_per_step": round(emulated.moves / emulated.steps, 2),
        "wall_s": round(emulated.wall_s, 1),
    }


def delays_of(run_folder: Path, slots: int, rollouts: Sequence[TracedRollout] | None = None) -> dict[str, float]:
    """By rollout, how long its slot had been free when it started."""
    if rollouts is None:
        rollouts = read_rollouts(Store.open(f"{run_folder}/store", read_only=True))
    steps: dict[int, list[TracedRollout]] = {}
    for one in rollouts:
        steps.setdefault(one.step, []).append(one)
    return {name: delay for step in steps.values() for name, delay in start_delays(step, slots=slots).items()}


def plan_of(one: TracedRollout, engine: EngineFit) -> RolloutPlan:
    """What a rollout did, for an emulated harness: a call's tokens are its work, a tool's its new context."""
    first_s = one.calls[0].start_s if one.calls else one.end_s
    call_tokens, tool_tokens, tools_s = [], [], []
    for index, call in enumerate(one.calls):
        following = one.calls[index + 1] if index + 1 < len(one.calls) else None
        work, constant_s = engine.work(call)
        tokens = max(1, round(work))
        context = following.prompt_tokens - call.prompt_tokens if following is not None else 1
        pause_s = max(0.0, (following.start_s if following is not None else one.end_s) - call.end_s)
        call_tokens.append(tokens)
        tool_tokens.append(max(1, context - tokens - _TEMPLATE_TOKENS))
        tools_s.append(pause_s + constant_s)
    return RolloutPlan(
        call_tokens=tuple(call_tokens),
        tool_tokens=tuple(tool_tokens),
        tools_s=tuple(tools_s),
        reward=one.reward or 0.0,
        failed=one.excluded,
        start_s=max(0.0, first_s - one.start_s),
        prompt_tokens=max(1, one.calls[0].prompt_tokens - _TEMPLATE_TOKENS) if one.calls else 1,
        grade_s=one.verifier_s,
    )


def emulation_of(
    trace: Trace, records: Sequence[StepRecord], rollouts: Sequence[TracedRollout], engine: EngineFit, plans: Path
) -> EmulationConfig:
    """The run's measured costs in the emulation's words; its clock is the wall's."""
    stats = [record.stats for record in records]
    trained_s = sum(float(row.get("forward_backward_s", 0.0)) for row in stats)
    tokens = sum(emulated_tokens(plan_of(one, engine)) for one in rollouts if one.selected_tokens > 0)
    outcomes = [
        outcome
        for record in records
        for decision in record.extra.get("decisions", ())
        for outcome in decision["outcomes"]
        if not outcome.get("failed")
    ]
    phases = [outcome.get("phases", {}) for outcome in outcomes]
    publish_s = _mean([float(phase["rollout/publish"]) for phase in phases if "rollout/publish" in phase])
    return EmulationConfig(
        compression=1.0,
        engine=EngineCosts(alpha_s=engine.alpha_s, beta_s=engine.beta_s, prefill_s=0.0, move_s=0.0),
        train=TrainCosts(
            token_s=trained_s / max(1, tokens),
            optimizer_s=_mean([float(row.get("optimizer_s", 0)) + float(row.get("gradients_s", 0)) for row in stats]),
        ),
        switch=SwitchCosts(
            to_train_s=_mean([float(one["seconds"]) for one in outcomes if one.get("to") == "train"]),
            to_rollout_s=0.0,
            publish_s=publish_s,
            checkpoint_s=_mean([float(row.get("checkpoint_s", 0.0)) for row in stats]),
        ),
        workload=Workload(plans=plans.absolute(), sampled_tokens=trace.scenario.workload.sampled_tokens),
    )


def emulated_tokens(plan: RolloutPlan) -> int:
    """Tokens of an emulated rollout's tree: what training it takes time for."""
    turns = sum(plan.tool_tokens[:-1]) + _TEMPLATE_TOKENS * len(plan.call_tokens)
    return (plan.prompt_tokens or 0) + sum(plan.call_tokens) + turns


def config_of(
    folder: Path,
    config: RunConfig,
    trace: Trace,
    emulation: EmulationConfig,
    plans: Mapping[str, RolloutPlan],
    policy: str,
) -> dict[str, Any]:
    """The emulated run's configuration: the run's own where it says what is done and in which order."""
    longest = max(emulated_tokens(plan) for plan in plans.values()) + 64
    scaled = Scaled(
        scenario=trace.scenario, emulation=emulation, share=1.0, tokens_per_token=1.0, context_tokens=2 * longest
    )
    tree = run_config(
        folder,
        scaled,
        name=f"trace-{policy}".replace("_", "-"),
        policy=policy,
        train_cells=min(config.scheduler.train_cells, max(1, config.scheduler.cells - 1)),
        steps=trace.scenario.steps,
        compression=1.0,
    )
    tree["seed"] = config.seed
    tree["data"] = {"train": str(config.data.train.absolute())}
    tree["selection"] = config.selection.model_dump(mode="json", exclude={"role_order"})
    tree["rollout"] |= {"slots": config.rollout.slots, "max_calls": config.rollout.max_calls}
    tree["train"]["micro_step_tokens"] = max(config.train.micro_step_tokens, tree["model"]["context_length"])
    tree["proxy"]["processes"] = config.proxy.processes
    return tree


def trace_line(policy: str, values: Mapping[str, Any]) -> str:
    """One policy for people."""
    measured = values["measured_steps_per_hour"]
    shown = f"{measured:9.1f}" if measured else f"{'-':>9s}"
    return (
        f"{policy:20s} {shown} {values['emulated_steps_per_hour']:9.1f} {values['simulated_steps_per_hour']:10.1f} "
        f"{values['emulated_over_measured'] or '-':>9} {values['simulated_over_measured'] or '-':>9} "
        f"{values['simulated_over_emulated']:9.3f}"
    )


def trace_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    head = "policy                measured  emulated  simulated   emu/meas  sim/meas   sim/emu   (steps an hour)"
    about = f"{result['run']}: {result['steps']} steps under {result['policy']}"
    return [about, head, *(trace_line(policy, values) for policy, values in result["policies"].items())]


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
