"""A cell's engines as one server whose calls share its speed.

Enters: calls with the tokens they have still to sample. Leaves: when the next one ends. All active calls advance at
the same rate, so one number, the tokens that each call has got since the start (`progress`), says how far all of them
are; a call ends when it reaches its own mark. Starting or ending a call costs O(log n).
"""

import heapq
from typing import Any

from gyre_core.sim.model import INFINITE, Costs


class Server:
    """The engines of one cell. Times only go forward."""

    __slots__ = (
        "_alpha", "_beta", "_engines", "_gamma", "_heap", "_kv", "_seq",
        "active", "context", "next_s", "now_s", "paused", "progress", "rate",
    )  # fmt: skip

    def __init__(self, costs: Costs, nodes: float) -> None:
        self._engines = costs.cell_engines(nodes)
        self._alpha, self._beta, self._gamma = costs.alpha_s, costs.beta_s, costs.gamma_s / 1e6
        self._kv = costs.kv_tokens
        self._heap: list[tuple[float, int, Any]] = []
        self._seq = 0
        self.active: dict[Any, tuple[float, int, float]] = {}  # call -> (mark, number, context)
        self.context = 0.0  # tokens of all active calls
        self.progress = 0.0
        self.rate = 0.0  # tokens a second of each call
        self.now_s = 0.0
        self.paused = False
        self.next_s = INFINITE

    def start(self, call: Any, tokens: float, context: float, now_s: float) -> None:
        """A call begins to sample `tokens`."""
        self._advance(now_s)
        self._seq += 1
        mark = self.progress + tokens
        self.active[call] = (mark, self._seq, context)
        heapq.heappush(self._heap, (mark, self._seq, call))
        self.context += context
        self._tune()

    def stop(self, call: Any, now_s: float) -> float:
        """A call leaves; returns the tokens it has not sampled."""
        self._advance(now_s)
        mark, _, context = self.active.pop(call)
        self.context -= context
        left = max(0.0, mark - self.progress)
        self._tune()
        return left

    def ended(self, now_s: float) -> Any:
        """The call that ends now (`next_s` has come)."""
        self._advance(now_s)
        _, _, call = heapq.heappop(self._heap)
        _, _, context = self.active.pop(call)
        self.context -= context
        self._tune()
        return call

    def pause(self, now_s: float, paused: bool) -> None:
        """Hold all calls, or let them go on."""
        self._advance(now_s)
        self.paused = paused
        self._tune()

    def _advance(self, now_s: float) -> None:
        self.progress += self.rate * (now_s - self.now_s)
        self.now_s = now_s

    def _tune(self) -> None:
        active = self.active
        calls = len(active)
        if not calls or self.paused:
            self.rate, self.next_s = 0.0, INFINITE
            if not calls:  # numbers stay small, whatever the length of the simulation
                self.progress, self.context = 0.0, 0.0
                self._heap.clear()
            return
        heap = self._heap
        mark, number, call = heap[0]
        while (found := active.get(call)) is None or found[1] != number:  # it has left, or has come again since
            heapq.heappop(heap)
            mark, number, call = heap[0]
        load = calls / self._engines
        if load < 1.0:
            load = 1.0
        context = self.context / self._engines
        if context > self._kv:
            share = self._kv / context
            rate = share / (self._alpha + self._beta * max(1.0, load * share) + self._gamma * self._kv)
        else:
            rate = 1.0 / (self._alpha + self._beta * load + self._gamma * context)
        self.rate = rate
        left = mark - self.progress
        self.next_s = self.now_s + left / rate if left > 0.0 else self.now_s
