"""Random worlds for the policies: cells, rollouts of random lengths. Every invariant is checked at every tick."""

import random
from collections.abc import Callable

from gyre_core.scheduler.cell import CellState, CellStatus
from gyre_core.scheduler.mechanism import enforce
from gyre_core.scheduler.policy import CellView, Plan, Policy, Snapshot, async_off1, async_stream, elastic_predictive

Enforce = Callable[[Snapshot, Plan], Plan]


class World:
    """A few steps of `groups` groups under a policy; `run` raises AssertionError where an invariant is broken."""

    def __init__(self, seed: int, policy: Policy, *, enforcing: Enforce = enforce) -> None:
        self.rng = random.Random(seed)
        self.policy, self.enforcing = policy, enforcing
        count = self.rng.randint(2, 5)
        self.cells = [CellStatus(cell_id=f"cell-{i}", state=CellState.ROLLOUT, epoch=0) for i in range(count)]
        self.slots = [self.rng.randint(1, 6)] * count
        self.switch_left = [0] * count
        self.train_cells = self.rng.randint(1, count - 1)
        self.size = self.rng.randint(1, 4)  # rollouts of a group
        self.groups = self.rng.randint(1, 8)
        self.tail_ratio = self.rng.choice([0.3, 1.0])
        self.moves = 0
        self.trained: list[int] = []

    def run(self, steps: int = 3) -> None:
        for step in range(steps):
            self._step(step)
        assert sorted(self.trained) == list(range(steps * self.groups)), "each group is trained once"
        # Every optional return (elastic_predictive's) is paid for by a group that was trained since.
        optional = 2 * steps * self.groups if self.policy is elastic_predictive else 0
        assert self.moves <= steps * 2 * len(self.cells) + optional, f"{self.moves} moves in {steps} steps: thrash"

    def _step(self, step: int) -> None:
        self.live = {(g, r): self._length() for g in range(self.groups) for r in range(self.size)}
        self.home: dict[tuple[int, int], int] = {}
        self.ready: list[int] = []
        self.micro: list[int] = []
        self.left = set(range(self.groups))
        still = 0
        while self.left or any(cell.state is not CellState.ROLLOUT for cell in self.cells):
            before = (len(self.live), len(self.left), self.moves, len(self.ready), sum(self.live.values()))
            if self._tick(step):
                return
            after = (len(self.live), len(self.left), self.moves, len(self.ready), sum(self.live.values()))
            still = still + 1 if before == after else 0
            assert still < 40, f"deadlock: {self._snapshot()}"

    def _tick(self, step: int) -> bool:
        if not self.left:
            # Fixed splits never return; the others are given their moves at the burst's end.
            plan = self._decide()
            if not plan.moves and not any(self.switch_left):
                back = all(cell.state is CellState.ROLLOUT for cell in self.cells)
                assert back or self.policy in {async_off1, async_stream}, "cells stay in training after a burst"
                return True
        else:
            plan = self._decide()
        self._advance_switches()
        self._admit()
        for key in [key for key in self.home if self.rng.random() < 0.9]:
            self.live[key] -= 1
            if self.live[key] <= 0:
                del self.live[key], self.home[key]
                if all(g != key[0] for g, _ in self.live):
                    self.ready.append(key[0])
        trainers = sum(cell.state is CellState.TRAINING for cell in self.cells)
        if trainers:
            core = self.cells[0].state
            assert core in {CellState.TRAINING, CellState.DRAINING}, "satellites train while the core serves"
        if trainers and core is CellState.TRAINING:
            for group in self.micro[:trainers]:
                self.micro.remove(group)
                self.left.remove(group)
                self.trained.append(step * self.groups + group)
            if plan.claim:
                self.micro, self.ready = self.micro + self.ready, []
        return False

    def _decide(self) -> Plan:
        snapshot = self._snapshot()
        plan = self.policy(snapshot)
        assert plan == self.policy(snapshot), "a decision is reproducible from its snapshot"
        plan = self.enforcing(snapshot, plan)
        assert all(move.reason for move in (*plan.moves, *plan.refusals)), "every decision has a reason"
        assert len(plan.moves) <= 1 or plan.together, "moves are serial"
        assert not plan.moves or not any(self.switch_left), "moves are serial"
        for move in plan.moves:
            index = int(move.cell_id.removeprefix("cell-"))
            start = CellState.DRAINING if move.to == "train" else CellState.RETURNING
            self.cells[index] = self.cells[index].moved(start)
            self.switch_left[index] = self.rng.randint(1, 3)
            self.moves += 1
            if move.to == "train":
                moved = [key for key, home in self.home.items() if home == index]
                for key in moved:
                    del self.home[key]
                self._admit(only=moved)
                assert all(key in self.home for key in moved), "a live rollout lost its slot in a move"
        return plan

    def _admit(self, only: list[tuple[int, int]] | None = None) -> None:
        for key in only if only is not None else list(self.live):
            if key not in self.home:
                for index, cell in enumerate(self.cells):
                    used = sum(home == index for home in self.home.values())
                    if cell.state is CellState.ROLLOUT and used < self.slots[index]:
                        self.home[key] = index
                        break

    def _advance_switches(self) -> None:
        for index, cell in enumerate(self.cells):
            if self.switch_left[index]:
                self.switch_left[index] -= 1
                if self.switch_left[index] == 0:
                    end = CellState.TRAINING if cell.state is CellState.DRAINING else CellState.ROLLOUT
                    self.cells[index] = cell.moved(end)

    def _length(self) -> int:
        return min(60, 1 + int(self.rng.paretovariate(1.2)))

    def _snapshot(self) -> Snapshot:
        views = tuple(
            CellView(
                cell_id=cell.cell_id,
                state=cell.state,
                slots=self.slots[index],
                residents=sum(home == index for home in self.home.values()),
            )
            for index, cell in enumerate(self.cells)
        )
        total = self.groups * self.size
        return Snapshot(
            cells=views,
            dispatched=total,
            finished=total - len(self.live),
            ready_groups=len(self.ready),
            untrained_groups=len(self.left),
            pending_microsteps=len(self.micro),
            train_cells=self.train_cells,
            staleness=1,
            tail_ratio=self.tail_ratio,
        )
