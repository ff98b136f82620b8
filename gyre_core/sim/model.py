"""What a simulated world is made of: the workload, the costs, the cluster. Plain data; units in the names.

Enters: nothing. Leaves: frozen records that one simulation takes. A policy is a name beside them: no cost knows it.
"""

import math
from dataclasses import dataclass, fields

INFINITE = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rollouts as they come: groups of one problem, lengths alike within a group and heavy-tailed between groups.

    A rollout alternates between model calls and tools. Its many calls are lumped into `segments` pairs of a stretch of
    sampling and a stretch of tools, so that the share of time in each, and its spread, are kept.
    Lengths are lognormal: mean * exp(sigma_group * z_group + sigma_rollout * z_rollout) / E[...], capped at max_tokens.

    Example: Workload(groups=64, group_size=16, sampled_tokens=140_000.0, unique_ratio=5.0)
    """

    groups: int  # of one optimizer step
    group_size: int
    sampled_tokens: float  # mean of a rollout
    max_tokens: float = INFINITE  # sampled tokens at which a harness stops
    sigma_group: float = 0.5
    sigma_rollout: float = 0.5
    segments: int = 6
    unique_ratio: float = 1.0  # unique tokens (prompts and tool results too) for each sampled one
    branch_ratio: float = 1.0  # tokens of all branches for each unique one; counts when prefixes are not shared
    prompt_tokens: float = 8_000.0
    context_tokens: float = 200_000.0  # limit of one call's context
    tool_s: float = 0.0  # mean of all tools of a rollout; in proportion to its length
    tool_sigma: float = 0.8  # lognormal spread of a rollout's tool time
    limit_s: float = INFINITE  # wall-clock limit of a rollout, from its admission
    failing_share: float = 0.0  # of rollouts that end early for reasons outside; excluded from training
    signal_share: float = 1.0  # of groups whose rewards differ; the others are trained in no time
    prediction_sigma: float = 0.3  # lognormal error of the length that is predicted for a problem

    def __post_init__(self) -> None:
        if min(self.groups, self.group_size, self.segments) < 1 or self.sampled_tokens <= 0:
            raise ValueError("groups, group_size, segments and sampled_tokens must be positive")
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"workload.{field.name} must not be negative, it is {getattr(self, field.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What everything costs. An engine's token takes alpha + beta * calls + gamma * (context tokens / 1e6) seconds.

    Example: Costs(alpha_s=0.015, beta_s=2e-4, train_tokens_per_node_s=1500.0)
    """

    nodes_per_engine: float = 1.0
    alpha_s: float = 0.015  # of one token of each call, whatever the load
    beta_s: float = 1e-4  # more for each call that the engine runs
    gamma_s: float = 0.0  # more for each million tokens of context that it reads
    kv_tokens: float = INFINITE  # context that fits into one engine's memory; beyond it calls take turns
    prefill_tokens_per_s: float = 40_000.0  # of one engine
    kv_fetch_tokens_per_s: float = 400_000.0  # of one engine, from the shared store
    migrate_kv: bool = True  # a moved call's prefix comes from the store; False: it is computed again
    rebalance: bool = True  # a call may start on another cell when that has far fewer rollouts
    train_tokens_per_node_s: float = 1_000.0
    micro_steps: int = 4  # of one group
    micro_overhead_s: float = 1.0  # of one micro-step: claim, load, launch
    share_prefixes: bool = True  # training cost by unique tokens, not by branch tokens
    optimizer_s: float = 30.0  # gradients pulled, added, clipped, stepped
    sync_s: float = 15.0  # a serving engine takes new weights; its calls wait
    to_train_s: float = 8.52  # published mean of a role change
    to_rollout_s: float = 3.46  # published mean
    grade_s: float = 60.0  # of a rollout's workspace
    mtbf_node_s: float = INFINITE  # mean time between failures of one node; a failing node takes its cell along
    restart_s: float = 600.0

    def __post_init__(self) -> None:
        positive = ("nodes_per_engine", "alpha_s", "kv_tokens", "prefill_tokens_per_s", "kv_fetch_tokens_per_s")
        positive += ("train_tokens_per_node_s", "micro_steps", "mtbf_node_s")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in positive and not value > 0:
                raise ValueError(f"costs.{field.name} must be positive, it is {value}")
            if not value >= 0:
                raise ValueError(f"costs.{field.name} must not be negative, it is {value}")

    def cell_engines(self, nodes: float) -> float:
        """Engines of a cell of so many nodes."""
        return max(1.0, nodes / self.nodes_per_engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Cells of equal size; the first is the core.

    Example: Cluster(cells=4, nodes_per_cell=48, slots=768)
    """

    cells: int
    nodes_per_cell: float = 1.0
    slots: int = 64  # rollouts a cell serves at once
    train_cells: int = 1  # fixed splits: the first so many only train
    one_machine: bool = False  # the cells' engines share one machine: a call slows down all others, of every cell

    def __post_init__(self) -> None:
        if self.cells < 1 or self.slots < 1 or not 0 < self.train_cells <= self.cells:
            raise ValueError(f"a cluster needs cells, slots and train_cells within them: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One world: everything but the policy and the seed.

    Example: Scenario(workload=w, costs=c, cluster=Cluster(cells=4), steps=48, phi=1)
    """

    workload: Workload
    costs: Costs
    cluster: Cluster
    steps: int = 48
    phi: int = 1  # batches dispatched ahead
    mu: int = 1  # optimizer steps between two publications

    def __post_init__(self) -> None:
        if self.steps < 1 or self.phi < 0 or self.mu < 1:
            raise ValueError(
                f"steps {self.steps}, phi {self.phi}, mu {self.mu}: phi >= 0 and the others >= 1 are needed"
            )

    @property
    def staleness(self) -> int:
        """k: versions that may lie between dispatch and training."""
        return self.phi + self.mu - 1
