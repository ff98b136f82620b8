"""Scenarios with names: workloads and clusters of published runs, each number with its source or the word "fitted".

Enters: a name. Leaves: a Preset. What is published is in `published`; what no publication says was fitted to it, on the
seeds in FIT_SEEDS, with one cost model for all policies; results are evaluated on HELD_OUT_SEEDS.
"""

from dataclasses import dataclass, field

from gyre_core.sim.model import Cluster, Costs, Scenario, Workload

FIT_SEEDS = (100, 101)
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


_ROLES = {"costs.to_train_s": "published mean, 8.52 s", "costs.to_rollout_s": "published mean, 3.46 s"}

NL2REPO_2400B = Preset(
    name="nl2repo-2.4t",
    title="2.4T parameters, NL2Repo, 192 nodes",
    scenario=Scenario(
        workload=Workload(
            groups=64,
            group_size=16,
            sampled_tokens=140_000.0,
            max_tokens=230_000.0,
            sigma_group=0.2,
            sigma_rollout=0.25,
            segments=5,
            unique_ratio=5.0,
            context_tokens=200_000.0,
            tool_s=1_200.0,
        ),
        costs=Costs(
            nodes_per_engine=8.0,
            alpha_s=1 / 60,
            beta_s=4.5e-4,
            train_tokens_per_node_s=3_190.0,
            optimizer_s=60.0,
            sync_s=30.0,
        ),
        cluster=Cluster(cells=4, nodes_per_cell=48.0, slots=768, train_cells=2),
        steps=48,
        phi=1,
    ),
    published=Published(
        hours={"elastic": 75.42, "async_off1": 134.55, "colocate": 91.47},
        over_async=(1.78, 1.78),
        over_colocate=(1.21, 1.21),
    ),
    sources={},
)
PRESETS = {preset.name: preset for preset in (NL2REPO_2400B,)}


def find_preset(name: str) -> Preset:
    """ValueError for a name that is none."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
