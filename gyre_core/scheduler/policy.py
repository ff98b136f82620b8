"""Scheduling policies: pure functions from a snapshot to a plan.

Enters: counters of the burst, the cells, and what waits for training. Leaves: moves with their reasons, and refusals
with theirs, as data that the run records. No I/O, clock or randomness: a decision can be replayed from its snapshot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gyre_core.scheduler.cell import CellState

Target = Literal["train", "rollout"]

TRAINING_FIRST_BELOW = 0.65  # tail_ratio under which training goes first when k >= 1 (a prototype's finding)
SERVE_GAIN = 0.03  # relative change of a token's time that is worth a move (8 % and 3 % measured: docs/simulator.md)
DWELL_S = 30.0  # between a cell's last move and its return for speed alone
_LEAST_S = 1e-12  # a fit may say that a token without others beside it takes no time
MIN_BACKLOG_S = 60.0  # training that pays for a move of some 12 s in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class CellView:
    """A cell as the policy sees it.

    Example: CellView(cell_id="cell-0", state=CellState.ROLLOUT, slots=8)
    """

    cell_id: str
    state: CellState
    slots: int  # rollouts it serves at once
    residents: int = 0  # rollouts it serves now
    moved_s: float = -1e9  # when its last role change ended, on the clock of Snapshot.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a decision is made from. Counters are rollouts of the current burst.

    Example: Snapshot(cells=(cell,), dispatched=64, finished=10, ready_groups=1, untrained_groups=8)
    """

    cells: tuple[CellView, ...]  # the core first, satellites in their fixed order
    dispatched: int
    finished: int  # graded, excluded and dropped ones included
    ready_groups: int  # graded groups that no trainer has yet
    untrained_groups: int  # groups of the open step that no optimizer step holds yet
    engine_slots: int = 0  # of standalone engines, which only serve
    engine_residents: int = 0
    pending_microsteps: int = 0  # handed to training and not finished, claimed or not
    next_ready_groups: int = 0  # at a burst's end: groups of the next batch that may train at once
    pending_dispatch: int = 0  # at a burst's end: rollouts about to be dispatched
    train_cells: int = 1  # fixed-split policies: cells that train
    staleness: int = 0  # k: versions that may lie between dispatch and training
    tail_ratio: float = (
        1.0  # (longest rollout + optimizer step + a group's training) / ((k + 1) * work per step / cells)
    )

    due_rollouts: int | None = None  # unfinished ones of the open step alone; None: not told apart from later steps
    # What elastic_predictive foresees from; with the defaults it decides by the counters alone.
    queued_groups: int = 0  # of the ready groups: those whose micro-steps are pending already
    ungraded_groups: int = 0  # of the open step: their training is still to come
    now_s: float = 0.0
    token_s: float = 1.0  # a token's time on a cell that serves nothing else; with token_load_s, as measured
    token_load_s: float = 0.0  # what each further rollout of the same cell adds to it
    microstep_s: float = 0.0  # mean time of a micro-step on one cell; 0: not known
    group_microsteps: float = 1.0  # micro-steps that a group is cut into, on average
    tail_s: float = 0.0  # predicted time until the last due rollout has finished; 0: not known

    @property
    def work(self) -> int:
        """Micro-steps to train, those of graded groups included."""
        return self.pending_microsteps + int((self.ready_groups - self.queued_groups) * self.group_microsteps)

    def token_time_s(self, cells: int) -> float:
        """A token's time when so many cells serve the present rollouts, as far as it is known."""
        return max(_LEAST_S, self.token_s + self.token_load_s * self.residents / max(1, cells))

    @property
    def due(self) -> int:
        """Rollouts that the open step still waits for, as far as they are told apart."""
        return self.water_level if self.due_rollouts is None else self.due_rollouts

    @property
    def water_level(self) -> int:
        """Dispatched minus finished: rollouts that still need an engine."""
        return self.dispatched - self.finished

    @property
    def serving(self) -> tuple[CellView, ...]:
        """Cells now in rollout."""
        return tuple(cell for cell in self.cells if cell.state is CellState.ROLLOUT)

    @property
    def training(self) -> tuple[CellView, ...]:
        """Cells now in training."""
        return tuple(cell for cell in self.cells if cell.state is CellState.TRAINING)

    @property
    def capacity(self) -> int:
        """C_R: slots of the cells now in rollout and of the standalone engines."""
        return self.engine_slots + sum(cell.slots for cell in self.serving)

    @property
    def residents(self) -> int:
        """Rollouts that some engine serves now, those of cells being drained included."""
        return self.engine_residents + sum(cell.residents for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A role change to make now.

    Example: Move(cell_id="cell-0", to="train", reason="all 64 rollouts finished; 8 groups ready")
    """

    cell_id: str
    to: Target
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and why the rest is not done.

    Example: Plan(moves=(), refusals=(Move(cell_id="cell-0", to="train", reason="water level 3 > 0"),))
    """

    moves: tuple[Move, ...] = ()
    refusals: tuple[Move, ...] = ()
    claim: bool = True  # trainers may claim ready groups now; False: a batch barrier holds them back
    wake_after_s: float | None = None  # ask again after this time at the latest: a dwell ends then
    together: bool = False  # all cells of a role move at once; calls of live rollouts wait, with what they sampled


Policy = Callable[[Snapshot], Plan]


def colocate(snapshot: Snapshot) -> Plan:
    """All cells serve until every rollout of the step has finished, all train, all serve again.

    The classic alternation, kept as a baseline and for a single cell; the tail of the slowest rollout is idle time.
    With staleness, rollouts of later steps are live when the step's own have finished: their calls are parked.
    """
    later = snapshot.water_level - snapshot.due
    moves: list[Move] = []
    refusals: list[Move] = []
    for cell in snapshot.cells:
        if cell.state is CellState.ROLLOUT:
            if snapshot.due > 0:
                reason = f"water level {snapshot.due} > 0: rollouts still need the engine"
                refusals.append(Move(cell_id=cell.cell_id, to="train", reason=reason))
            elif snapshot.untrained_groups == 0 or snapshot.ready_groups + snapshot.pending_microsteps == 0:
                refusals.append(Move(cell_id=cell.cell_id, to="train", reason="no graded group waits for training"))
            else:
                what = f"all rollouts of the step finished, {later} later ones wait" if later else ""
                what = what or f"all {snapshot.dispatched} rollouts finished"
                reason = f"{what}; {snapshot.ready_groups} groups ready"
                moves.append(Move(cell_id=cell.cell_id, to="train", reason=reason))
        elif cell.state is CellState.TRAINING:
            if snapshot.untrained_groups > 0 and snapshot.due == 0:
                reason = f"{snapshot.untrained_groups} groups of the step are not trained yet"
                refusals.append(Move(cell_id=cell.cell_id, to="rollout", reason=reason))
            else:
                reason = (
                    f"water level {snapshot.due} > 0: rollouts need the engine again"
                    if snapshot.untrained_groups > 0 and snapshot.due > 0
                    else "the step's groups are trained; its weights are published"
                )
                moves.append(Move(cell_id=cell.cell_id, to="rollout", reason=reason))
    return Plan(moves=tuple(moves), refusals=tuple(refusals), together=True)


def elastic(snapshot: Snapshot) -> Plan:
    """The published water-level rule: a growing training prefix inside a burst, last joined first back at its end."""
    if (waiting := _switching(snapshot)) is not None:
        return waiting
    if snapshot.untrained_groups == 0:
        return _end_of_burst(snapshot)
    if (rescue := _rescue(snapshot)) is not None:
        return rescue
    if not snapshot.serving:
        return Plan()
    cell = snapshot.serving[0]
    room, level = snapshot.capacity - cell.slots, snapshot.water_level
    if level > room:
        return _refused(cell, "train", f"water level {level} > {room} slots without {cell.cell_id}")
    # What waits for a trainer: groups, and micro-steps that none of the training cells can have claimed.
    waiting = snapshot.ready_groups + max(0, snapshot.pending_microsteps - len(snapshot.training))
    if waiting == 0:
        return _refused(cell, "train", "no graded group is ready")
    return _moved(cell, "train", f"water level {level} <= {room} slots that stay; {waiting} groups or micro-steps wait")


def elastic_predictive(snapshot: Snapshot) -> Plan:
    """The water level, with what is foreseen: no cell leaves before it is needed, and none waits where it can serve.

    - Training first, k >= 1 and work the limit (`tail_ratio`): only live rollouts must fit into the cells that stay;
      else queued ones must too.
    - A cell leaves for a backlog that pays for the move, and not while those that train will be done before the last
      rollout of the step, if sampling would get slower by its leaving.
    - A training cell without work returns when rollouts queue, or when sampling would get faster.
    - At a burst's end a cell stays when the next batch keeps it busy.
    """
    if (waiting := _switching(snapshot)) is not None:
        return waiting
    first = snapshot.staleness >= 1 and snapshot.tail_ratio < TRAINING_FIRST_BELOW
    if snapshot.untrained_groups == 0:
        return _end_of_burst(snapshot) if _ends(snapshot, first) else _stays(snapshot)
    if (rescue := _rescue(snapshot)) is not None:
        return rescue
    if (back := _back_to_serving(snapshot)) is not None:
        return back
    if not snapshot.serving:
        return Plan()
    core_trains = snapshot.cells[0].state is not CellState.ROLLOUT
    # Core first; then the cell with the fewest rollouts to hand over.
    cell = min(snapshot.serving, key=lambda one: one.residents) if core_trains else snapshot.serving[0]
    level = snapshot.residents if first else max(snapshot.water_level, snapshot.residents)
    room = snapshot.capacity - cell.slots
    if level > room:
        return _refused(cell, "train", f"level {level} > {room} slots without {cell.cell_id}")
    trainers, work = len(snapshot.training), snapshot.work
    if work < trainers + 1:
        return _refused(cell, "train", f"{work} micro-steps keep {trainers} cells busy already")
    if (reason := _not_yet(snapshot)) is not None:
        return _refused(cell, "train", reason)
    return _moved(cell, "train", f"level {level} <= {room} slots that stay; {work} micro-steps pending")


def async_stream(snapshot: Snapshot) -> Plan:
    """A fixed split: the first `train_cells` cells train for ever, each group as it becomes ready."""
    if (waiting := _switching(snapshot)) is not None:
        return waiting
    for cell in snapshot.cells[: snapshot.train_cells]:
        if cell.state is CellState.ROLLOUT:
            return _moved(cell, "train", f"fixed split: the first {snapshot.train_cells} cells train")
    for cell in snapshot.cells[snapshot.train_cells :]:
        if cell.state is CellState.TRAINING:
            return _moved(cell, "rollout", f"fixed split: only the first {snapshot.train_cells} cells train")
    return Plan()


def async_off1(snapshot: Snapshot) -> Plan:
    """The fixed split with a batch barrier: training starts when every group of the step is ready."""
    whole = snapshot.ready_groups >= snapshot.untrained_groups or snapshot.pending_microsteps > 0
    return replace(async_stream(snapshot), claim=whole)


def _not_yet(snapshot: Snapshot) -> str | None:
    """Why the next cell had better serve for longer; None when it had not, or when too little is known to say."""
    serving, trainers = len(snapshot.serving), len(snapshot.training)
    slower = snapshot.token_time_s(serving - 1) / snapshot.token_time_s(serving) - 1 if serving > 1 else 1.0
    if snapshot.due == 0 or slower <= SERVE_GAIN or snapshot.microstep_s <= 0:
        return None
    backlog_s = snapshot.work * snapshot.microstep_s
    if backlog_s / (trainers + 1) < MIN_BACKLOG_S:
        return f"{backlog_s:.0f} s of training do not pay for a move yet"
    left_s = backlog_s + snapshot.ungraded_groups * snapshot.group_microsteps * snapshot.microstep_s
    if trainers and left_s / trainers < snapshot.tail_s:
        return f"{trainers} cells train {left_s:.0f} s of work within the {snapshot.tail_s:.0f} s of the last rollouts"
    return None


def _back_to_serving(snapshot: Snapshot) -> Plan | None:
    """The last training cell back, when nothing is there to train and rollouts gain by it."""
    if not snapshot.training or snapshot.work > 0:
        return None
    cell = snapshot.training[-1]
    queue, free = snapshot.water_level - snapshot.residents, snapshot.capacity - snapshot.residents
    if queue > free:
        return _moved(cell, "rollout", f"nothing to train; {queue} rollouts wait, {free} slots free")
    serving = len(snapshot.serving)
    faster = 1 - snapshot.token_time_s(serving + 1) / snapshot.token_time_s(serving) if serving else 0.0
    if faster <= SERVE_GAIN:
        return None
    rest_s = cell.moved_s + DWELL_S - snapshot.now_s
    if rest_s > 0:
        return replace(_refused(cell, "rollout", f"moved less than {DWELL_S:.0f} s ago"), wake_after_s=rest_s)
    return _moved(cell, "rollout", f"nothing to train; one more cell samples {faster:.0%} faster")


def _ends(snapshot: Snapshot, training_first: bool) -> bool:
    """Whether the last training cell returns at a burst's end."""
    if not snapshot.training:
        return True
    work_s = snapshot.next_ready_groups * snapshot.group_microsteps * snapshot.microstep_s
    fits = training_first or snapshot.water_level + snapshot.pending_dispatch <= snapshot.capacity
    return not (fits and snapshot.serving and work_s >= MIN_BACKLOG_S * len(snapshot.training))


def _stays(snapshot: Snapshot) -> Plan:
    reason = f"{snapshot.next_ready_groups} groups of the next batch are ready"
    return _refused(snapshot.training[-1], "rollout", reason)


def _end_of_burst(snapshot: Snapshot) -> Plan:
    if not snapshot.training:
        return Plan()
    cell = snapshot.training[-1]
    if cell is not snapshot.cells[0]:
        return _moved(cell, "rollout", "the burst has ended: last joined, first back")
    if snapshot.next_ready_groups > 0 and snapshot.water_level + snapshot.pending_dispatch <= snapshot.capacity:
        return _refused(cell, "rollout", f"{snapshot.next_ready_groups} groups of the next batch are ready")
    return _moved(cell, "rollout", "the burst has ended; its weights are published")


def _rescue(snapshot: Snapshot) -> Plan | None:
    """A training cell back to rollout when a death left rollouts without any engine and training without data."""
    stuck = snapshot.water_level > 0 and snapshot.capacity == 0
    if not (stuck and snapshot.training and snapshot.ready_groups + snapshot.pending_microsteps == 0):
        return None
    return _moved(snapshot.training[-1], "rollout", f"no engine serves the {snapshot.water_level} rollouts left")


def _switching(snapshot: Snapshot) -> Plan | None:
    for cell in snapshot.cells:
        if cell.state in {CellState.DRAINING, CellState.RETURNING}:
            to: Target = "train" if cell.state is CellState.DRAINING else "rollout"
            return _refused(cell, to, f"{cell.cell_id} is {cell.state}: moves are serial")
    return None


def _moved(cell: CellView, to: Target, reason: str) -> Plan:
    return Plan(moves=(Move(cell_id=cell.cell_id, to=to, reason=reason),))


def _refused(cell: CellView, to: Target, reason: str) -> Plan:
    return Plan(refusals=(Move(cell_id=cell.cell_id, to=to, reason=reason),))


POLICIES: dict[str, Policy] = {
    "colocate": colocate,
    "elastic": elastic,
    "elastic_predictive": elastic_predictive,
    "async_off1": async_off1,
    "async_stream": async_stream,
}
