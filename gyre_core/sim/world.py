"""The discrete-event world: rollouts, engines, trainers and failures under a real policy and the real mechanism.

Enters: a scenario, a policy's name, a seed (or a source of batches). Leaves: a Result. Nothing here decides where a
cell goes: every move comes from `scheduler.policy` through `scheduler.mechanism.enforce`.

Time: a heap of timers, and for each cell the moment at which its next call ends. After each event the policy is asked
when something that it sees has changed. Invariants: a rollout is never restarted; residents never exceed slots; one
optimizer step holds each group once; with work left, something is due (else RuntimeError).
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gyre_core.scheduler.admission import admission_of
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.mechanism import enforce, stale_reason
from gyre_core.scheduler.policy import POLICIES, Move, Plan, Policy, Snapshot
from gyre_core.sim.account import Accounts
from gyre_core.sim.bound import Bound
from gyre_core.sim.draw import Source, source_of
from gyre_core.sim.engine import Server
from gyre_core.sim.failures import plan_failure
from gyre_core.sim.model import INFINITE, Scenario
from gyre_core.sim.parts import Cell, Group, MicroStep, Queue, Rollout
from gyre_core.sim.result import Result
from gyre_core.sim.view import Estimates, make_result, make_snapshot

SMALLEST_PIECE = 8  # a micro-step is cut into no more pieces than about this
ROLLOUT, DRAINING, TRAINING = CellState.ROLLOUT, CellState.DRAINING, CellState.TRAINING
RETURNING, DEAD = CellState.RETURNING, CellState.DEAD


def simulate(
    scenario: Scenario,
    policy: str,
    *,
    seed: int = 0,
    source: Source | None = None,
    record: bool = False,
    rule: Policy | None = None,
) -> Result:
    """Run a scenario to its last step. `rule` replaces the policy's own function (for experiments and tests)."""
    start_s = time.perf_counter()
    world = World(scenario, policy, seed=seed, source=source, record=record, rule=rule)
    world.run()
    return make_result(world, wall_s=time.perf_counter() - start_s)


class World:
    """State and events of one simulation."""

    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        *,
        seed: int,
        source: Source | None = None,
        record: bool = False,
        rule: Policy | None = None,
    ) -> None:
        self.scenario, self.policy, self.seed = scenario, policy, seed
        self.rule = rule or POLICIES[policy]
        self.costs, cluster = scenario.costs, scenario.cluster
        self.source = source or source_of(scenario.workload, seed=seed, share_prefixes=self.costs.share_prefixes)
        self.rng = np.random.default_rng([seed, 10**9])  # of failures alone
        servers = [
            Server(self.costs, cluster.nodes_per_cell) for _ in range(1 if cluster.one_machine else cluster.cells)
        ]
        self.cells = [Cell(i, cluster.slots, servers[i % len(servers)]) for i in range(cluster.cells)]
        self.train_rate = self.costs.train_tokens_per_node_s * cluster.nodes_per_cell
        self.admission = admission_of(policy)
        self.accounts = Accounts(cells=cluster.cells, record=record)
        self.bound = Bound(scenario)
        self.estimates = Estimates(scenario)
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.seq = 0
        self.now_s = 0.0
        self.queue = Queue()
        self.step, self.version = 0, 0  # the open step; the published version
        self.next_batch = 0
        self.versions: dict[int, int] = {}  # step -> version that its batch was dispatched with
        self.dispatched = self.finished = 0
        self.groups: dict[int, dict[Group, None]] = {}  # step -> groups with rollouts that run
        self.due = 0
        self.graded: dict[int, list[Group]] = {}  # of later steps
        self.sizes: dict[int, int] = {}  # groups of later steps
        self.ready: list[Group] = []
        self.micro: deque[MicroStep] = deque()
        self.left = 0  # groups of the open step that are not trained
        self.untrained = 0  # the same, but 0 only when the optimizer has stepped
        self.optimizing = False
        self.boundary = False
        self.claim = False
        self.changed = False

    # -- the loop

    def run(self) -> None:
        """All steps."""
        self._dispatch(self.scenario.phi + self.scenario.mu)
        self._open_step()
        if self.costs.mtbf_node_s < INFINITE:
            for cell in self.cells:
                plan_failure(self, cell)
        heap, cells = self.heap, self.cells
        while self.step < self.scenario.steps:
            first = cells[0]
            for cell in cells:
                if cell.server.next_s < first.server.next_s:
                    first = cell
            until_s = first.server.next_s
            if heap and heap[0][0] <= until_s:
                self.now_s, _, handler, arguments = heapq.heappop(heap)
                handler(*arguments)
            elif until_s < INFINITE:
                self.now_s = until_s
                self._sampled(first.server.ended(until_s), first)
            else:
                raise RuntimeError(f"nothing is due at {self.now_s:.0f} s: {make_snapshot(self)}")
            if self.changed:
                self.changed = False
                self._decide()
        for cell in cells:
            self.mark(cell, cell.kind)

    def at(self, delay_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Call `handler` later."""
        self.seq += 1
        heapq.heappush(self.heap, (self.now_s + delay_s, self.seq, handler, arguments))

    def mark(self, cell: Cell, kind: str) -> None:
        """The cell does `kind` from now on."""
        self.accounts.spent(cell.index, cell.kind, cell.kind_since_s, self.now_s)
        cell.kind, cell.kind_since_s = kind, self.now_s

    # -- rollouts

    def _dispatch(self, until: int) -> None:
        while self.next_batch < min(until, self.scenario.steps):
            batch = self.source(self.next_batch)
            self.bound.add(batch)
            self.estimates.dispatched(self.bound.last_work_s)
            groups = [Group(draw, self.next_batch, self.version) for draw in batch]
            self.versions[self.next_batch] = self.version
            self.groups[self.next_batch] = dict.fromkeys(groups)
            self.graded[self.next_batch] = []
            self.sizes[self.next_batch] = len(groups)
            for group in groups:
                key = self.admission(group.step, group.draw.predicted)
                for draw in group.draw.rollouts:
                    self.seq += 1
                    heapq.heappush(self.queue.fresh, (key, self.seq, Rollout(group, draw)))
                    self.dispatched += 1
            self.next_batch += 1
        self.admit()

    def _free_cell(self) -> Cell | None:
        best, room = None, 0
        for cell in self.cells:
            if cell.state is ROLLOUT and cell.slots - len(cell.residents) > room:
                best, room = cell, cell.slots - len(cell.residents)
        return best

    def admit(self) -> None:
        """Rollouts that wait take the free slots, those that were moved first."""
        queue = self.queue
        while queue.resumed or queue.fresh:
            cell = self._free_cell()
            if cell is None:
                return
            if queue.resumed:
                rollout = queue.resumed.popleft()
                self._settle(rollout, cell)
                if rollout.phase == "waiting":
                    self._call(rollout)
                continue
            rollout = heapq.heappop(queue.fresh)[2]
            rollout.started_s = self.now_s
            if rollout.group.started_s < 0:
                rollout.group.started_s = self.now_s
            self._settle(rollout, cell)
            rollout.cold = False  # its first prompt is short: prefilled within the first call
            if self.scenario.workload.limit_s < INFINITE:
                self.at(self.scenario.workload.limit_s, self._out_of_time, rollout)
            self._call(rollout)

    def _settle(self, rollout: Rollout, cell: Cell) -> None:
        cell.residents[rollout] = None
        rollout.cell, rollout.cold = cell, True
        rollout.epoch += 1
        if len(cell.residents) == 1 and cell.kind == "no rollouts":
            self.mark(cell, "serving")

    def _call(self, rollout: Rollout) -> None:
        """The next stretch of sampling begins, on the rollout's cell or a far less loaded one."""
        home = rollout.cell
        if home is None:
            rollout.phase = "waiting"
            return
        if self.costs.rebalance and rollout.segment > 0:
            other = self._free_cell()
            if other is not None and len(home.residents) - len(other.residents) > 2 + len(home.residents) // 8:
                self._unsettle(rollout, home)
                self._settle(rollout, other)
                self.accounts.relocated_calls += 1
                home = other
        if not rollout.cold:
            rollout.phase = "sampling"
            home.server.start(rollout, rollout.left, rollout.context, self.now_s)
            return
        rollout.phase, rollout.cold = "loading", False
        costs = self.costs
        rate = costs.kv_fetch_tokens_per_s if costs.migrate_kv else costs.prefill_tokens_per_s
        rate *= costs.cell_engines(self.scenario.cluster.nodes_per_cell)
        self.accounts.loaded_tokens += rollout.context
        home.load_free_s = max(self.now_s, home.load_free_s) + rollout.context / rate
        self.at(home.load_free_s - self.now_s, self._loaded, rollout, rollout.epoch)

    def _loaded(self, rollout: Rollout, epoch: int) -> None:
        if epoch == rollout.epoch and rollout.phase == "loading" and rollout.cell is not None:
            rollout.phase = "sampling"
            rollout.cell.server.start(rollout, rollout.left, rollout.context, self.now_s)

    def _sampled(self, rollout: Rollout, cell: Cell) -> None:
        rollout.phase = "tool"
        self.accounts.sampled_tokens += rollout.draw.tokens[rollout.segment]
        self.at(rollout.draw.tools_s[rollout.segment], self._tool_ended, rollout)

    def _tool_ended(self, rollout: Rollout) -> None:
        if rollout.phase == "done":
            return
        rollout.segment += 1
        if rollout.segment == len(rollout.draw.tokens):
            self._end(rollout)
        else:
            rollout.left = rollout.draw.tokens[rollout.segment]
            self._call(rollout)

    def _out_of_time(self, rollout: Rollout) -> None:
        if rollout.phase == "done":
            return
        if rollout.phase == "sampling" and rollout.cell is not None:
            rollout.left = rollout.cell.server.stop(rollout, self.now_s)
        if rollout.phase != "tool":
            self.accounts.sampled_tokens += rollout.draw.tokens[rollout.segment] - rollout.left
        self.accounts.clipped += 1
        self._end(rollout)

    def _unsettle(self, rollout: Rollout, cell: Cell) -> None:
        del cell.residents[rollout]
        rollout.cell = None
        if not cell.residents and cell.kind == "serving":
            self.mark(cell, "no rollouts")

    def _end(self, rollout: Rollout) -> None:
        rollout.phase = "done"
        if rollout.cell is not None:
            self._unsettle(rollout, rollout.cell)
        else:
            self.queue.resumed.remove(rollout)
        group, accounts = rollout.group, self.accounts
        accounts.rollouts += 1
        accounts.failed += rollout.draw.failed
        accounts.executions.add(self.now_s - rollout.started_s)
        self.estimates.ended(self.now_s - rollout.started_s)
        self.finished += 1
        if group.step == self.step:
            self.due -= 1
        group.open -= 1
        if group.open == 0:
            del self.groups[group.step][group]
            accounts.queries.add(self.now_s - group.started_s)
            self.estimates.group_ended(self.now_s - group.started_s, group.draw.predicted)
            self.at(self.costs.grade_s, self._grade, group)
        self.admit()
        self.changed = True

    def _grade(self, group: Group) -> None:
        (self.ready if group.step == self.step and not self.boundary else self.graded[group.step]).append(group)
        self.changed = True

    # -- training

    def _open_step(self) -> None:
        self.boundary = False
        if self.step >= self.scenario.steps:
            return
        self.ready = self.graded.pop(self.step)
        self.left = self.untrained = self.sizes.pop(self.step)
        self.due = sum(group.open for group in self.groups[self.step])
        self.changed = True

    def _hand_over(self) -> None:
        """Graded groups become micro-steps."""
        for group in self.ready:
            group.micro_left = self.costs.micro_steps
            seconds = group.draw.train_tokens / self.train_rate / group.micro_left
            if group.draw.train_tokens <= 0:
                group.micro_left = 0
                self._group_trained(group)
                continue
            self.micro.extend(MicroStep(group, seconds + self.costs.micro_overhead_s) for _ in range(group.micro_left))
        self.ready = []

    def _feed(self) -> None:
        trainers = [cell for cell in self.cells if cell.state is TRAINING]
        if not trainers or self.cells[0].state is DRAINING:  # the core opens the step
            return
        if self.claim and self.ready:
            self._hand_over()
        for cell in trainers:
            if cell.task is None and self.micro:
                cell.task = self._claimed(len(trainers))
                self.at(cell.task.seconds, self._trained, cell, cell.epoch)
                self.mark(cell, "training")
        if self.left == 0 and not self.optimizing and self.untrained and not any(cell.task for cell in self.cells):
            core = self.cells[0]
            if core.state is TRAINING:
                self.optimizing = True
                self.at(self.costs.optimizer_s, self._stepped, core.epoch)
        for cell in trainers:
            if cell.task is None:
                self._mark_waiting(cell)

    def _mark_waiting(self, cell: Cell) -> None:
        if self.optimizing:
            kind = "optimizer" if cell.index == 0 else "waits for the optimizer"
        else:
            kind = "waits for the barrier" if self.ready and not self.claim else "waits for groups"
        if cell.kind != kind:
            self.mark(cell, kind)

    def _claimed(self, trainers: int) -> MicroStep:
        """The next micro-step; the last ones of a step are made small, so that all trainers end together."""
        item = self.micro.popleft()
        if trainers > 1 and len(self.micro) < 2 * trainers and self.due == 0:
            total = item.seconds + sum(other.seconds for other in self.micro)
            whole_s = item.group.draw.train_tokens / self.train_rate / self.costs.micro_steps
            target = max(total / (2 * trainers), 4 * self.costs.micro_overhead_s, whole_s / SMALLEST_PIECE)
            if item.seconds > 2 * target:
                rest = MicroStep(item.group, item.seconds - target + self.costs.micro_overhead_s)
                self.micro.appendleft(rest)
                item.group.micro_left += 1
                item = MicroStep(item.group, target)
        return item

    def _trained(self, cell: Cell, epoch: int) -> None:
        if epoch != cell.epoch or cell.task is None:
            return
        item, cell.task = cell.task, None
        cell.done.append(item)
        self.estimates.trained(item.seconds)
        item.group.micro_left -= 1
        if item.group.micro_left == 0:
            self._group_trained(item.group)
        if cell.leaves:
            self._begin_return(cell)
        self.changed = True

    def _group_trained(self, group: Group) -> None:
        self.left -= 1
        assert (
            stale_reason(
                dispatched_version=group.version, training_version=self.step, staleness=self.scenario.staleness
            )
            is None
        ), "a group is older than the bound"

    def _stepped(self, epoch: int) -> None:
        """The optimizer has stepped."""
        if not self.optimizing or epoch != self.cells[0].epoch:
            return
        self.optimizing = False
        age = self.step - self.versions.pop(self.step)
        self.accounts.staleness[age] = self.accounts.staleness.get(age, 0) + self.untrained
        self.untrained = 0
        for cell in self.cells:
            cell.done.clear()
        self.step += 1
        self.groups.pop(self.step - 1)
        self.estimates.stepped()
        if self.accounts.record:
            self.accounts.published_s.append(self.now_s)
        if self.step >= self.scenario.steps:
            return
        if self.step % self.scenario.mu:
            self._open_step()
            return
        self.version = self.step
        for cell in self.cells:
            if cell.state is ROLLOUT:
                cell.server.pause(self.now_s, True)
                self.mark(cell, "weights")
                self.at(self.costs.sync_s, self._synced, cell, cell.epoch)
        self.boundary = True
        self._dispatch(self.step + self.scenario.phi + self.scenario.mu)
        self.changed = True

    def _synced(self, cell: Cell, epoch: int) -> None:
        if epoch == cell.epoch and cell.state is ROLLOUT:
            cell.server.pause(self.now_s, False)
            self.mark(cell, "serving" if cell.residents else "no rollouts")

    # -- moves

    def _decide(self) -> None:
        while True:
            snapshot = make_snapshot(self)
            plan = enforce(snapshot, self.rule(snapshot))
            self.claim = plan.claim
            if self.accounts.record:
                self.accounts.levels.append((self.now_s, snapshot.water_level, snapshot.capacity))
            self._apply(snapshot, plan)
            if self.boundary and not plan.moves and not self._switching():
                self._open_step()
                continue
            break
        self.changed = False
        self._feed()

    def _switching(self) -> bool:
        return any(cell.state in (DRAINING, RETURNING) for cell in self.cells)

    def _apply(self, snapshot: Snapshot, plan: Plan) -> None:
        moved = [(self.cells[int(move.cell_id.removeprefix("cell-"))], move) for move in plan.moves]
        for cell, move in moved:
            if move.to == "train":
                cell.state = DRAINING
        for cell, move in moved:
            self._move(cell, move)
        if plan.wake_after_s is not None:
            self.at(plan.wake_after_s, self._wake)

    def _wake(self) -> None:
        self.changed = True

    def _move(self, cell: Cell, move: Move) -> None:
        self.accounts.moves += 1
        cell.epoch += move.to == "train"
        if move.to == "train":
            cell.server.pause(self.now_s, False)
            self.mark(cell, "switch")
            self.relocate(cell)
            self.at(self.costs.to_train_s, self._switched, cell, cell.epoch)
        else:
            cell.state = RETURNING
            if cell.task is None:
                self._begin_return(cell)
            else:
                cell.leaves = True

    def _begin_return(self, cell: Cell) -> None:
        cell.leaves = False
        self.mark(cell, "switch")
        self.at(self.costs.to_rollout_s, self._switched, cell, cell.epoch)

    def _switched(self, cell: Cell, epoch: int) -> None:
        if epoch != cell.epoch:
            return
        cell.moved_s = self.now_s
        if cell.state is DRAINING:
            cell.state = TRAINING
            self._mark_waiting(cell)
        else:
            cell.state = ROLLOUT
            self.mark(cell, "no rollouts")
            self.admit()
        self.changed = True

    def relocate(self, cell: Cell) -> None:
        """Every rollout of the cell goes to another one, with what it has sampled; without room its calls wait."""
        for rollout in list(cell.residents):
            if rollout.phase == "sampling":
                rollout.left = cell.server.stop(rollout, self.now_s)
            if rollout.phase in ("sampling", "loading"):
                rollout.phase = "waiting"
            self._unsettle(rollout, cell)
            self.accounts.relocated_calls += 1
            rollout.epoch += 1
            self.queue.resumed.append(rollout)
        self.admit()
