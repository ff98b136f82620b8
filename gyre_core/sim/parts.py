"""Cells, groups and rollouts of a running simulation: mutable, private to the world."""

from collections import deque
from typing import Any

from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView
from gyre_core.sim.draw import GroupDraw, RolloutDraw
from gyre_core.sim.engine import Server


class Group:
    """The rollouts of one problem in one step."""

    __slots__ = ("draw", "left", "micro_left", "open", "started_s", "step", "version")

    def __init__(self, draw: GroupDraw, step: int, version: int) -> None:
        self.draw, self.step, self.version = draw, step, version
        self.open = len(draw.rollouts)  # rollouts that have not ended
        self.micro_left = 0  # micro-steps that have not been trained
        self.started_s = -1.0  # first admission


class Rollout:
    """One agent's run. `phase`: queued, tool, waiting, loading, sampling, done."""

    __slots__ = ("cell", "cold", "draw", "epoch", "group", "left", "phase", "segment", "started_s")

    def __init__(self, group: Group, draw: RolloutDraw) -> None:
        self.group, self.draw = group, draw
        self.phase = "queued"
        self.segment = 0
        self.left = draw.tokens[0]  # to sample in this segment
        self.cell: Cell | None = None
        self.cold = True  # its prefix is not on the cell that serves it
        self.epoch = 0  # raised when it changes its cell: what was under way there is void
        self.started_s = 0.0

    @property
    def context(self) -> float:
        """Tokens that the present call reads."""
        return self.draw.contexts[self.segment]


class MicroStep:
    """A piece of a group's training."""

    __slots__ = ("group", "seconds")

    def __init__(self, group: Group, seconds: float) -> None:
        self.group, self.seconds = group, seconds


class Cell:
    """A cell: its engines, its rollouts, what it trains."""

    __slots__ = (
        "done", "epoch", "index", "kind", "kind_since_s", "leaves", "load_free_s", "moved_s",
        "name", "residents", "server", "slots", "state", "task", "view",
    )  # fmt: skip

    def __init__(self, index: int, slots: int, server: Server) -> None:
        self.index, self.slots, self.server = index, slots, server
        self.name = f"cell-{index}"
        self.state = CellState.ROLLOUT
        self.residents: dict[Rollout, None] = {}
        self.task: MicroStep | None = None
        self.done: list[MicroStep] = []  # of the open step, in its gradient
        self.epoch = 0
        self.leaves = False  # returns when its micro-step has ended
        self.load_free_s = 0.0  # when its engines have loaded all prefixes asked for
        self.moved_s = -1e9
        self.kind, self.kind_since_s = "no rollouts", 0.0
        self.view: CellView | None = None  # as last shown to the policy


class Queue:
    """Rollouts that wait for a slot: those that lost one first, then by the policy's order."""

    def __init__(self) -> None:
        self.resumed: deque[Rollout] = deque()
        self.fresh: list[tuple[Any, int, Rollout]] = []
