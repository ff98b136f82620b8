"""The run's scheduler: the counters of the open burst, the controller that moves cells, and the task that runs it.

    flow counts -> Burst -> Snapshot -> policy -> move -> fleet (cells, proxies) -> work pools, events, timeline

`rebalance_cells` is one task run a step: it ticks until the step's burst has ended and every cell that should return
has. Waits for: a change of the counters, of the micro-step queue, or of a cell. Woken by: the counters at once, the
rest within a second.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.cells.fleet import CellFleet
from gyre_core.cells.fleet_proxies import EngineLoad
from gyre_core.config import RunConfig
from gyre_core.errors import GyreError
from gyre_core.scheduler.burst import Burst, QueueView
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.controller import Controller, Decision
from gyre_core.scheduler.estimates import Estimates
from gyre_core.scheduler.policy import POLICIES, CellView, Move, Snapshot
from tasks.context import Box, RunContext
from tasks.reporting import RunReporter
from tasks.timeline import CellTimeline
from tasks.work_pools import WorkPools

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # longest sleep between two looks while a step is open, on the cluster's clock
_SHORTEST_LOOK_S = 0.2  # what a look costs is not compressed
_SHOWN = {CellState.ROLLOUT: "rollout", CellState.TRAINING: "training", CellState.DEAD: "dead"}


class Scheduling:
    """One run's scheduler. The flow counts through `burst`; `rebalance_cells` ticks; others look.

    Example: scheduling = Scheduling(config, fleet, reporter, pools=pools); scheduling.open()
    """

    def __init__(self, config: RunConfig, fleet: CellFleet, reporter: RunReporter, *, pools: WorkPools | None) -> None:
        self.burst = Burst()
        self.estimates = Estimates()
        self.timeline = CellTimeline()
        self.decisions: list[dict[str, Any]] = []  # of the open step
        self.moves = 0  # of the open step
        self._config = config
        self._fleet = fleet
        self._reporter = reporter
        self._pools = pools
        self._claim = True
        self._moved_s: dict[str, float] = {}
        self._listeners: list[Callable[[], None]] = []
        self._capacity = 0
        self._returned = threading.Event()
        self._broken: BaseException | None = None
        self._stopping = False
        self._controller = Controller(
            POLICIES[config.scheduler.policy], observe=self.observe, move=self._move, record=self._record
        )
        fleet.on_event(self._on_event)

    def open(self) -> None:
        """All cells serve from now on, but those that a fixed split trains with."""
        self._fleet.open()
        for cell in self._fleet.views(ask=False):
            self.timeline.mark(cell.cell_id, _SHOWN.get(cell.state, "switch"))
        while self.tick().moved:  # a fixed split takes its places before the first rollout
            continue

    def begin_step(self, step: int, *, groups: int, next_ready: int, pending_dispatch: int) -> None:
        """A step is open; its batch is dispatched. Groups are held back until the policy has been asked."""
        self._claim = False
        self._returned.clear()
        self.burst.begin(step=step, groups=groups, next_ready=next_ready, pending_dispatch=pending_dispatch)

    def capacity(self) -> int:
        """Rollouts that may run at once: the serving cells' slots, `rollout.slots` at most."""
        return min(self._capacity, self._config.rollout.slots)

    def on_capacity(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the capacity has changed."""
        self._listeners.append(listener)

    def may_hand_over(self) -> bool:
        """Whether the policy lets trainers have groups now (a batch barrier holds them back)."""
        return self._claim

    def observe(self) -> Snapshot:
        """The snapshot a policy decides from."""
        cells = self._fleet.views()
        scheduler, rollout = self._config.scheduler, self._config.rollout
        now_s, scale = time.monotonic(), self._config.clock_scale
        token_s, token_load_s = token_speed(self._fleet.load)
        return self.burst.snapshot(
            tuple(replace(cell, moved_s=self._moved_s.get(cell.cell_id, cell.moved_s)) for cell in cells),
            self._queue(cells),
            train_cells=scheduler.train_cells,
            staleness=scheduler.staleness,
            now_s=now_s * scale,
            token_s=token_s * scale,
            token_load_s=token_load_s * scale,
            microstep_s=self.estimates.microstep_s * scale,
            group_microsteps=self.estimates.group_microsteps,
            tail_s=self.estimates.tail_s(self.burst.step, now_s) * scale,
            tail_ratio=self.estimates.tail_ratio(
                staleness=scheduler.staleness,
                cells=scheduler.cells,
                slots=self._config.slots_per_cell,
                rollouts=rollout.group_size * rollout.groups_per_step,
                groups=rollout.groups_per_step,
            ),
        )

    def tick(self) -> Decision:
        """Decide once; returns when the move, if any, is over."""
        decision = self._controller.tick()
        if decision.plan.claim and not self._claim:
            self._claim = True  # until the step's end: a batch that was whole stays so
            self.burst.poke()
        self._count_capacity()
        return decision

    def run_step(self) -> int:
        """Tick until the open step has ended and no move is left to make; returns the number of moves."""
        self.moves = 0
        try:
            while not self._stopping:
                stamp, ended = self.burst.stamp, self.burst.ended
                decision = self.tick()
                if decision.moved and not decision.failed:
                    continue
                if not decision.moved and decision.snapshot.untrained_groups == 0:
                    self._returned.set()
                    if ended:
                        return self.moves
                self.burst.wait(stamp, max(_LOOK_S / self._config.clock_scale, _SHORTEST_LOOK_S))
            return self.moves
        except BaseException as error:
            self._broken = error
            self._returned.set()
            raise

    def stop(self) -> None:
        """The run ends early: the controller's loop and who waits for cells return at once."""
        self._stopping = True
        self._returned.set()
        self.burst.poke()

    def check(self) -> None:
        """Raise GyreError when the controller has failed or the run ends early."""
        if self._broken is not None:
            raise GyreError(f"the scheduler has failed: {self._broken!r}") from self._broken
        if self._stopping:
            raise GyreError("the run ends")

    def wait_returned(self) -> None:
        """Wait, after the optimizer step, until every cell that should serve again does, with verified weights.

        Raises GyreError as `check` does.
        """
        self._returned.wait()
        self.check()

    def take_decisions(self) -> list[dict[str, Any]]:
        """What was decided since this was asked last."""
        taken, self.decisions = self.decisions, []
        return taken

    def _queue(self, cells: tuple[CellView, ...]) -> QueueView:
        if len(cells) == 1 and cells[0].state is CellState.ROLLOUT:
            return QueueView()  # nothing can have been claimed
        try:
            step = self._fleet.core.status().get("step")
        except GyreError:
            return QueueView()  # the core is being started again
        if not step or step.get("finished"):
            return QueueView()
        return QueueView(pending=int(step["pending"]), leased=int(step["leased"]))

    def _move(self, move: Move) -> Mapping[str, Any]:
        logger.info("%s to %s: %s", move.cell_id, move.to, move.reason)
        self.timeline.mark(move.cell_id, "switch")
        if move.to == "train":
            self._count_capacity(without=move.cell_id)
        report = asdict(self._fleet.move(move))
        self._moved_s[move.cell_id] = time.monotonic() * self._config.clock_scale
        if report.get("failed"):
            logger.warning("%s did not move to %s: %s", move.cell_id, move.to, report["failed"])
        else:
            self.moves += 1
            self._reporter.role_change(move.cell_id, move.to, move.reason, epoch=int(report.get("epoch", 0)))
        for cell in self._fleet.views(ask=False):
            if cell.cell_id == move.cell_id:
                self.timeline.mark(cell.cell_id, _SHOWN.get(cell.state, "switch"))
        return report

    def _record(self, decision: Decision) -> None:
        for refusal in decision.plan.refusals:
            logger.info("%s stays, not to %s: %s", refusal.cell_id, refusal.to, refusal.reason)
        self.decisions.append({"step": self.burst.step, **decision.as_json()})

    def _count_capacity(self, *, without: str = "") -> None:
        cells = self._fleet.views(ask=False)
        serving = [cell for cell in cells if cell.state is CellState.ROLLOUT and cell.cell_id != without]
        slots = sum(cell.slots for cell in serving)
        training = sum(cell.state in {CellState.TRAINING, CellState.DRAINING} for cell in cells)
        self.timeline.level(self.burst.outstanding, slots)
        if self._pools is not None:
            self._pools.resize(rollout=slots, train=training)
        if slots != self._capacity:
            self._capacity = slots
            for listener in self._listeners:
                listener()

    def _on_event(self, event: Mapping[str, Any]) -> None:
        """From the fleet's own thread."""
        kind, cell = str(event.get("event", "")), str(event.get("cell", ""))
        if kind == "cell_dead":
            self.timeline.mark(cell, "dead")
            self._reporter.cell_event(cell, "dead", str(event.get("reason", "")))
        elif kind == "cell_restarted":
            self.timeline.mark(cell, "rollout")
            self._reporter.cell_event(cell, "restarted", str(event.get("reason", "")))
        if kind in {"cell_dead", "cell_restarted"}:
            self._count_capacity()
            self.burst.poke()


def token_speed(load: EngineLoad) -> tuple[float, float]:
    """(seconds of a token on an engine that serves nothing else, what each further resident of an engine adds).

    A resident is in its tools part of the time: the share of residents whose calls run now is taken for all. While
    nothing is known a token takes a second and no resident matters, as a snapshot's defaults say.
    """
    if load.speed is None:
        return 1.0, 0.0
    residents = sum(load.residents.values())
    calling = min(1.0, sum(load.busy.values()) / residents) if residents else 1.0
    return load.speed.token_s, load.speed.load_s * calling


@task(name="rebalance_cells", task_run_name="step {step_label} / rebalance", cache_policy=NO_CACHE)
def rebalance_cells(run: RunContext, step_label: int) -> Box[int]:
    """The controller's ticks during one step; every move is an event with its reason. Returns the number of moves."""
    return Box(run.scheduling.run_step())
