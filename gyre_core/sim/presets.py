"""Scenarios with names: workloads and clusters of published runs, each number with its source or the word "fitted".

Enters: a name. Leaves: a Preset. What is published is in `published`; what no publication says was fitted to it, on the
seeds in FIT_SEEDS, with one cost model for all policies; results are evaluated on HELD_OUT_SEEDS.
"""

from dataclasses import dataclass, field

from gyre_core.sim.model import Cluster, Costs, Scenario, Workload

FIT_SEEDS = (100,)
HELD_OUT_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publication says of a case; None or empty where it says nothing.

    Example: Published(hours={"elastic": 75.42}, over_async=(1.78, 1.78))
    """

    hours: dict[str, float] = field(default_factory=dict)  # policy -> hours of all steps
    over_async: tuple[float, float] | None = None
    over_colocate: tuple[float, float] | None = None
    mean_execution_h: float | None = None
    mean_query_h: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A scenario, what is published of it, and where its numbers come from.

    Example: PRESETS["nl2repo-2.4t"].scenario
    """

    name: str
    title: str
    scenario: Scenario
    published: Published
    sources: dict[str, str]  # parameter -> its source, or "fitted"


def _fitted(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "fitted")


_SHARED = {
    "costs.to_train_s": "published mean of a role change, 8.52 s",
    "costs.to_rollout_s": "published mean, 3.46 s",
    "workload.unique_ratio": "fitted together with sampled_tokens",
    "workload.group_size": "published default of a group, 16",
    "workload.groups": "assumed, 64",
    "cluster.cells": "published for 2.4T: 4; assumed for the others",
    "phi": "assumed, 1: one batch ahead",
    "costs.sync_s": "assumed, 30 s",
    "costs.grade_s": "assumed, 60 s",
    **_fitted(
        "workload.sampled_tokens",
        "workload.max_tokens",
        "workload.sigma_group",
        "workload.sigma_rollout",
        "workload.tool_s",
        "costs.alpha_s",
        "costs.beta_s",
        "costs.train_tokens_per_node_s",
        "costs.optimizer_s",
        "cluster.slots",
    ),
}

NL2REPO_2400B = Preset(
    name="nl2repo-2.4t",
    title="2.4T parameters, NL2Repo, 192 nodes",
    scenario=Scenario(
        workload=Workload(
            groups=64,
            group_size=16,
            sampled_tokens=28_000.0,
            max_tokens=50_400.0,
            sigma_group=0.1,
            sigma_rollout=0.2,
            segments=5,
            unique_ratio=5.0,
            tool_s=205.0,
        ),
        costs=Costs(
            nodes_per_engine=8.0,
            alpha_s=0.0026,
            beta_s=2e-4,
            train_tokens_per_node_s=158.5,
            optimizer_s=70.0,
            sync_s=30.0,
        ),
        cluster=Cluster(cells=4, nodes_per_cell=48.0, slots=880, train_cells=2),
        steps=48,
        phi=1,
    ),
    published=Published(
        hours={"elastic": 75.42, "async_off1_half": 134.55, "colocate": 91.47},
        over_async=(1.78, 1.78),
        over_colocate=(1.21, 1.21),
    ),
    sources={**_SHARED, "cluster.nodes_per_cell": "published: 192 nodes as 4 cells of 48", "steps": "published: 48"},
)

NL2REPO_122B = Preset(
    name="nl2repo-122b",
    title="122B parameters, NL2Repo, 32 nodes",
    scenario=Scenario(
        workload=Workload(
            groups=64,
            group_size=16,
            sampled_tokens=60_000.0,
            max_tokens=108_000.0,
            sigma_group=0.1,
            sigma_rollout=0.25,
            segments=5,
            unique_ratio=5.0,
            tool_s=150.0,
        ),
        costs=Costs(
            nodes_per_engine=1.0,
            alpha_s=0.004,
            beta_s=2.5e-4,
            train_tokens_per_node_s=4_800.0,
            optimizer_s=40.0,
            sync_s=30.0,
        ),
        cluster=Cluster(cells=4, nodes_per_cell=8.0, slots=640, train_cells=2),
        steps=48,
        phi=1,
    ),
    published=Published(over_async=(1.42, 1.53), over_colocate=(1.36, 1.47), mean_execution_h=1.93, mean_query_h=2.96),
    sources={**_SHARED, "cluster.nodes_per_cell": "published: 24 to 32 nodes", "steps": "published: 48"},
)


def _agent_preset(name: str, title: str, *, sampled_tokens: float, tool_s: float, sigma_rollout: float) -> Preset:
    return Preset(
        name=name,
        title=title,
        scenario=Scenario(
            workload=Workload(
                groups=64,
                group_size=16,
                sampled_tokens=sampled_tokens,
                max_tokens=4.54 * sampled_tokens,
                sigma_group=0.24,
                sigma_rollout=sigma_rollout,
                segments=5,
                unique_ratio=5.0,
                tool_s=tool_s,
            ),
            costs=Costs(
                nodes_per_engine=2.0,
                alpha_s=0.007,
                beta_s=1e-4,
                train_tokens_per_node_s=533.0,
                optimizer_s=57.0,
                sync_s=30.0,
            ),
            cluster=Cluster(cells=4, nodes_per_cell=12.0, slots=264, train_cells=2),
            steps=24,
            phi=1,
        ),
        published=Published(over_async=(1.38, 1.57), over_colocate=(1.61, 1.85)),
        sources={**_SHARED, "cluster.nodes_per_cell": "assumed", "steps": "published: 24"},
    )


TERMINAL = _agent_preset(
    "terminal", "TerminalBench, 48 nodes", sampled_tokens=39_600.0, tool_s=990.0, sigma_rollout=0.40
)
DEEPSWE = _agent_preset("deepswe", "DeepSWE, 48 nodes", sampled_tokens=40_000.0, tool_s=940.0, sigma_rollout=0.42)

PRESETS = {preset.name: preset for preset in (TERMINAL, DEEPSWE, NL2REPO_122B, NL2REPO_2400B)}


def find_preset(name: str) -> Preset:
    """ValueError for a name that is none."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
