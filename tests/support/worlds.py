"""Small scenarios for the simulator's tests: fixed batches whose times can be worked by hand."""

from collections.abc import Sequence
from dataclasses import replace

from gyre_core.sim.draw import GroupDraw, RolloutDraw
from gyre_core.sim.model import Cluster, Costs, Scenario, Workload

# A token takes one second whatever the load; training takes one second a token on one cell; nothing else costs.
FREE = Costs(
    alpha_s=1.0,
    beta_s=0.0,
    train_tokens_per_node_s=1.0,
    micro_steps=1,
    micro_overhead_s=0.0,
    optimizer_s=0.0,
    sync_s=0.0,
    to_train_s=0.0,
    to_rollout_s=0.0,
    grade_s=0.0,
    kv_fetch_tokens_per_s=1e12,
)


def rollout(tokens: float, tool_s: float = 0.0, context: float = 0.0) -> RolloutDraw:
    """One call and one tool."""
    return RolloutDraw(tokens=[tokens], tools_s=[tool_s], contexts=[context])


def group(*tokens: float, train: float, predicted: float = 1.0) -> GroupDraw:
    """A group whose rollouts sample so many tokens each."""
    return GroupDraw(rollouts=[rollout(one) for one in tokens], train_tokens=train, predicted=predicted)


def scenario(
    batch: Sequence[GroupDraw], *, cells: int, slots: int, steps: int, phi: int, train_cells: int = 1, **costs: float
) -> Scenario:
    """A scenario for batches like this one."""
    size = max(len(one.rollouts) for one in batch)
    return Scenario(
        workload=Workload(groups=len(batch), group_size=size, sampled_tokens=1.0),
        costs=replace(FREE, **costs),
        cluster=Cluster(cells=cells, slots=slots, train_cells=train_cells),
        steps=steps,
        phi=phi,
    )


def small(*, cells: int = 4, slots: int = 48, phi: int = 1, steps: int = 3, **costs: float) -> Scenario:
    """A drawn workload in which everything happens: queues, moves, failures when asked for."""
    return Scenario(
        workload=Workload(
            groups=8, group_size=8, sampled_tokens=20_000.0, segments=3, unique_ratio=4.0, tool_s=200.0, sigma_group=0.4
        ),
        costs=replace(
            Costs(alpha_s=0.01, beta_s=1e-3, train_tokens_per_node_s=4_000.0, optimizer_s=20.0, sync_s=5.0), **costs
        ),
        cluster=Cluster(cells=cells, slots=slots),
        steps=steps,
        phi=phi,
    )
