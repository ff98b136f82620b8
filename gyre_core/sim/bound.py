"""What no policy can beat: max(work / devices, critical path / (k + 1)), summed over the steps as they are.

Enters: batches as they are dispatched. Leaves: hours. Work counts every token at the engine's best throughput (all
slots in use) and every micro-step on one cell. The path runs each rollout alone on an engine and trains its group on
all cells at once; step s + k + 1 cannot be published earlier than its longest rollout after step s. Of a rollout that
its time limit ends even alone, the part within the limit counts.
"""

from gyre_core.sim.draw import GroupDraw
from gyre_core.sim.model import Scenario


class Bound:
    """Lower bounds of a scenario's time, batch by batch."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        costs, cluster = scenario.costs, scenario.cluster
        engines = costs.cell_engines(cluster.nodes_per_cell)
        self._engines, self._load = engines, max(1.0, cluster.slots / engines)
        self._train_rate = costs.train_tokens_per_node_s * cluster.nodes_per_cell
        self._published = [0.0] * (scenario.staleness + 1)  # the last k + 1 publications, oldest first
        self.work_s = 0.0  # cell-seconds
        self.last_work_s = 0.0
        self.last_longest_s = 0.0

    def add(self, batch: list[GroupDraw]) -> None:
        """The next step's batch."""
        costs, cells = self._scenario.costs, self._scenario.cluster.cells
        limit_s = self._scenario.workload.limit_s
        loaded = (costs.alpha_s / self._load + costs.beta_s) / self._engines
        read, kv = costs.gamma_s / 1e6, costs.kv_tokens
        work, path, longest = costs.optimizer_s, 0.0, 0.0
        for group in batch:
            train_s = group.train_tokens / self._train_rate
            work += train_s
            alone = 0.0
            for rollout in group.rollouts:
                total, full = 0.0, 0.0
                for tokens, tool_s, context in zip(rollout.tokens, rollout.tools_s, rollout.contexts, strict=True):
                    total += tokens * (costs.alpha_s + costs.beta_s + read * min(context, kv)) + tool_s
                    full += tokens * (loaded + read * context / self._engines)
                work += full * min(1.0, limit_s / total)
                alone = max(alone, min(total, limit_s))
            longest = max(longest, alone)
            path = max(path, alone + costs.grade_s + train_s / costs.micro_steps / cells)
        path += costs.optimizer_s
        earliest = max(self._published[-1] + costs.optimizer_s, self._published[0] + path)
        self._published = [*self._published[1:], earliest]
        self.work_s += work
        self.last_work_s, self.last_longest_s = work, longest

    @property
    def work_hours(self) -> float:
        """All devices busy all the time."""
        return self.work_s / self._scenario.cluster.cells / 3600

    @property
    def path_hours(self) -> float:
        """Steps as close as their longest rollouts and the staleness allow."""
        return self._published[-1] / 3600
