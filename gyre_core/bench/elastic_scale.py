"""A cluster's scenario made small enough to be emulated in real time on one machine, and said in the emulation's words.

Enters: a scenario of the simulator. Leaves: the same scenario with fewer groups, and its `[emulate]` section. Two
things shrink, nothing else:

- *Rollouts*: `share` of the batch's groups, on cells with the same share of slots, serving and training speed. A call
  slows the others down by 1 / share more, so that a token takes as long as in the whole cluster at the same fill.
- *Tokens*: one emulated token stands for `tokens_per_token`; its costs are as many tokens'.

What this changes: the longest of fewer rollouts is shorter, so the tail binds less; batches of fewer groups are
coarser for streaming. The simulator runs the shrunk scenario too, so that both are compared on the same work.
"""

from dataclasses import dataclass, replace

from gyre_core.config.emulation import EmulationConfig, EngineCosts, SwitchCosts, TrainCosts, Workload
from gyre_core.sim.model import INFINITE, Scenario

MAX_TOKENS_FACTOR = 8.0  # for lengths without a limit: beyond it a log-normal with sigma 0.7 has 0.2 % of its draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A scenario to emulate.

    Example: scaled = scale(PRESETS["terminal"].scenario, groups=8, steps=6, compression=200.0)
    """

    scenario: Scenario  # for the simulator
    emulation: EmulationConfig
    share: float  # of the cluster's groups, slots and speed
    tokens_per_token: float
    context_tokens: int  # emulated ones of the longest rollout


def scale(
    scenario: Scenario, *, groups: int, steps: int, compression: float, seed: int = 0, mean_tokens: float = 240.0
) -> Scaled:
    """`groups` of the batch's, `steps` steps; `mean_tokens` are the emulated ones of a rollout, all counted."""
    w, c, cluster = scenario.workload, scenario.costs, scenario.cluster
    share = groups / w.groups
    engines = c.cell_engines(cluster.nodes_per_cell)
    slots = max(1, round(cluster.slots * share))
    one_engine = cluster.nodes_per_cell * share
    beta_s, gamma_s = c.beta_s / share / engines, c.gamma_s / share / engines
    small = replace(
        scenario,
        steps=steps,
        workload=replace(w, groups=groups),
        cluster=replace(cluster, nodes_per_cell=one_engine, slots=slots),
        costs=replace(
            c,
            nodes_per_engine=one_engine,
            beta_s=beta_s,
            gamma_s=gamma_s,
            kv_tokens=INFINITE if c.kv_tokens == INFINITE else c.kv_tokens * share * engines,
            prefill_tokens_per_s=c.prefill_tokens_per_s * share * engines,
            kv_fetch_tokens_per_s=c.kv_fetch_tokens_per_s * share * engines,
        ),
    )
    ratio = max(1.0, w.unique_ratio)
    unit = (w.sampled_tokens * ratio + w.prompt_tokens) / mean_tokens
    longest = min(w.max_tokens, MAX_TOKENS_FACTOR * w.sampled_tokens)
    costs = small.costs
    rate = costs.train_tokens_per_node_s * small.cluster.nodes_per_cell
    emulation = EmulationConfig(
        compression=compression,
        engine=EngineCosts(
            alpha_s=unit * costs.alpha_s,
            beta_s=unit * costs.beta_s,
            gamma_s=unit * costs.gamma_s / 1e6 * unit,
            prefill_s=unit / costs.prefill_tokens_per_s,
            move_s=unit / costs.kv_fetch_tokens_per_s,
            kv="move" if costs.migrate_kv else "recompute",
        ),
        train=TrainCosts(token_s=unit / rate, micro_step_s=costs.micro_overhead_s, optimizer_s=costs.optimizer_s),
        switch=SwitchCosts(to_train_s=costs.to_train_s, to_rollout_s=costs.to_rollout_s, publish_s=costs.sync_s),
        workload=Workload(
            seed=seed,
            sampled_tokens=w.sampled_tokens / unit,
            max_tokens=longest / unit,
            sigma_group=w.sigma_group,
            sigma_rollout=w.sigma_rollout,
            segments=w.segments,
            unique_ratio=ratio,
            prompt_tokens=max(1, round(w.prompt_tokens / unit)),
            tool_s=w.tool_s,
            tool_sigma=w.tool_sigma,
            failing_share=w.failing_share,
            signal_share=w.signal_share,
            grade_s=costs.grade_s,
        ),
    )
    return Scaled(
        scenario=small,
        emulation=emulation,
        share=share,
        tokens_per_token=unit,
        context_tokens=round(longest * ratio / unit) + 12 * w.segments + emulation.workload.prompt_tokens,
    )
