"""What a policy sees of a world, and what is reported of it.

Enters: a world. Leaves: snapshots and results. Estimates use only what a real run knows at that moment: measured
durations, lengths foreseen for a problem (with their error), the engine's and trainer's measured speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView, Snapshot
from gyre_core.sim.account import Histogram
from gyre_core.sim.model import Scenario
from gyre_core.sim.result import Result

if TYPE_CHECKING:
    from gyre_core.sim.world import World

LOOK_S = 60.0  # between two looks at slow measures
_LONGEST = 0.998  # quantile of a rollout's time that stands for the longest (a prototype's choice)


class Estimates:
    """What the controller has measured so far."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._times = Histogram()
        self.longest_s = 0.0
        self._group_ratio, self._group_count = 0.0, 0
        self._micro_s, self._micro_count = 0.0, 0
        self._works: list[float] = []
        self.tail_ratio = 1.0  # (longest rollout + optimizer step + a group's training) / ((k + 1) * work / cells)
        # Looked up at most every LOOK_S seconds.
        self.looked_s, self.looked_step = -1e9, -1
        self.token_load_s = self.tail_s = 0.0

    def dispatched(self, work_s: float) -> None:
        """A batch's work in cell-seconds. Only its mean over batches is used, as a run would learn it."""
        self._works = [*self._works[-3:], work_s]

    def ended(self, seconds: float) -> None:
        """A rollout has ended."""
        self._times.add(seconds)

    def group_ended(self, seconds: float, predicted: float) -> None:
        """A group's last rollout has ended."""
        self._group_ratio += seconds / predicted
        self._group_count += 1

    def trained(self, seconds: float) -> None:
        """A micro-step has ended."""
        self._micro_s += seconds
        self._micro_count += 1

    def stepped(self) -> None:
        """An optimizer step has ended: the longest rollout of the last steps is looked up again."""
        if self._times.count >= 200:
            self.longest_s = self._times.quantile(_LONGEST)
            self._times = Histogram()
        self.tail_ratio = self._tail_ratio()

    @property
    def microstep_s(self) -> float:
        """Mean of a micro-step; 0 before the first."""
        return self._micro_s / self._micro_count if self._micro_count else 0.0

    @property
    def group_s(self) -> float:
        """Time of a group of mean length; 0 before the first."""
        return self._group_ratio / self._group_count if self._group_count else 0.0

    def _tail_ratio(self) -> float:
        if not self.longest_s or not self._works:
            return 1.0
        scenario = self._scenario
        work_s = sum(self._works) / len(self._works) / scenario.cluster.cells
        path = self.longest_s + scenario.costs.optimizer_s + self.microstep_s * scenario.costs.micro_steps
        return path / ((scenario.staleness + 1) * work_s)


def make_snapshot(world: World) -> Snapshot:
    """The counters and cells now."""
    estimates, costs = world.estimates, world.costs
    if world.now_s - estimates.looked_s >= LOOK_S or estimates.looked_step != world.step:
        _look(world)
    busy = 0
    views = []
    for cell in world.cells:
        busy += cell.task is not None
        view = cell.view
        if view is None or view.residents != len(cell.residents) or view.state is not cell.state:
            view = cell.view = CellView(
                cell_id=cell.name,
                state=cell.state,
                slots=cell.slots,
                residents=len(cell.residents),
                moved_s=cell.moved_s,
            )
        views.append(view)
    opened = not world.boundary
    unfinished_optimizer = opened and world.left == 0 and world.untrained > 0
    return Snapshot(
        cells=tuple(views),
        dispatched=world.dispatched,
        finished=world.finished,
        ready_groups=len(world.ready) if opened else 0,
        untrained_groups=world.untrained,
        pending_microsteps=len(world.micro) + busy + unfinished_optimizer,
        next_ready_groups=len(world.graded.get(world.step + opened, ())),
        train_cells=world.scenario.cluster.train_cells,
        staleness=world.scenario.staleness,
        tail_ratio=estimates.tail_ratio,
        due_rollouts=world.due if opened else 0,
        group_microsteps=costs.micro_steps,
        ungraded_groups=len(world.groups.get(world.step, ())) if opened else 0,
        now_s=world.now_s,
        token_s=costs.alpha_s,
        token_load_s=estimates.token_load_s,
        microstep_s=estimates.microstep_s,
        tail_s=max(0.0, estimates.tail_s - world.now_s + estimates.looked_s) if opened else 0.0,
    )


def _look(world: World) -> None:
    """Measure again what changes slowly."""
    estimates, costs = world.estimates, world.costs
    estimates.looked_s, estimates.looked_step = world.now_s, world.step
    active = serving = 0
    context = 0.0
    for cell in world.cells:
        if cell.state is CellState.ROLLOUT:
            active += len(cell.server.active)
            serving += len(cell.residents)
            context += cell.server.context
    duty = active / serving if serving else 1.0
    engines = costs.cell_engines(world.scenario.cluster.nodes_per_cell)
    read = costs.gamma_s / 1e6 * (context / active if active else 0.0)
    estimates.token_load_s = duty * (costs.beta_s + read) / engines
    estimates.tail_s = _tail_s(world)


def _tail_s(world: World) -> float:
    """Until the last due rollout has ended: the time foreseen for its group, or a twentieth of what it has taken."""
    mean_s = world.estimates.group_s
    if not mean_s:
        return 0.0
    tail_s = 0.0
    for group in world.groups.get(world.step, ()):
        if group.started_s < 0:
            tail_s = max(tail_s, group.draw.predicted * mean_s)
        else:
            age_s = world.now_s - group.started_s
            tail_s = max(tail_s, group.draw.predicted * mean_s - age_s, 0.05 * age_s)
    return tail_s


def make_result(world: World, *, wall_s: float) -> Result:
    """The sums of a finished simulation."""
    accounts, scenario, bound = world.accounts, world.scenario, world.bound
    hours = world.now_s / 3600
    total_s = world.now_s * scenario.cluster.cells
    shares = {kind: seconds / total_s for kind, seconds in sorted(accounts.seconds.items())}
    trained = sum(accounts.staleness.values())
    return Result(
        policy=world.policy,
        seed=world.seed,
        steps=scenario.steps,
        hours=hours,
        steps_per_hour=scenario.steps / hours,
        bound_hours=max(bound.work_hours, bound.path_hours),
        work_hours=bound.work_hours,
        path_hours=bound.path_hours,
        utilisation=sum(shares.get(kind, 0.0) for kind in ("serving", "training", "optimizer")),
        useful_share=bound.work_s / total_s,
        shares=shares,
        rollouts=accounts.rollouts,
        clipped_share=accounts.clipped / max(1, accounts.rollouts),
        tokens_per_step=accounts.sampled_tokens / scenario.steps,
        mean_execution_h=accounts.executions.mean / 3600,
        mean_query_h=accounts.queries.mean / 3600,
        queries_4h_share=accounts.queries.share_above(4 * 3600.0),
        staleness_mean=sum(age * n for age, n in accounts.staleness.items()) / max(1, trained),
        staleness_max=max(accounts.staleness, default=0),
        moves_per_step=accounts.moves / scenario.steps,
        relocated_calls=accounts.relocated_calls,
        wall_s=wall_s,
        spans=accounts.spans,
        levels=accounts.levels,
        published_s=accounts.published_s,
    )
