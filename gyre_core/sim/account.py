"""What a simulation measures: each cell's time by kind, rollouts, staleness; spans and levels when asked for.

Enters: changes of what a cell does, ends of rollouts and groups. Leaves: sums. Memory does not grow with the number of
steps unless `record` is set; quantiles come from a histogram of fixed size.
"""

import math
from dataclasses import dataclass, field

from gyre_core.pictures import CellSpan

BUSY = frozenset({"serving", "training", "optimizer"})
IDLE = frozenset({"no rollouts", "waits for groups", "waits for the barrier", "waits for the optimizer"})
OTHER = frozenset({"switch", "weights", "dead"})
_SHOWN = {
    "serving": "rollout", "training": "training", "optimizer": "training", "switch": "switch", "weights": "switch",
}  # fmt: skip
_BINS_A_DECADE = 200


class Histogram:
    """Logarithmic bins: quantiles to 1.2 %, whatever the number of values."""

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count, self.total, self.largest = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        index = math.ceil(math.log10(max(value, 1e-6)) * _BINS_A_DECADE)
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        """Of all values; 0 when there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value below which `share` of them lie."""
        left = share * self.count
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return min(self.largest, 10 ** (index / _BINS_A_DECADE))
        return self.largest

    def share_above(self, value: float) -> float:
        """Share of values at or above `value`."""
        edge = math.log10(value) * _BINS_A_DECADE
        return sum(n for index, n in self.bins.items() if index >= edge) / self.count if self.count else 0.0


@dataclass(slots=True)
class Accounts:
    """Sums over a simulation."""

    cells: int
    record: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # kind -> cell-seconds
    spans: list[CellSpan] = field(default_factory=list)
    levels: list[tuple[float, int, int]] = field(default_factory=list)  # time, water level, capacity
    published_s: list[float] = field(default_factory=list)  # ends of optimizer steps, when recorded
    executions: Histogram = field(default_factory=Histogram)  # seconds of a rollout, from its admission
    queries: Histogram = field(default_factory=Histogram)  # seconds of a group, from its first admission
    staleness: dict[int, int] = field(default_factory=dict)  # versions -> groups trained so old
    rollouts: int = 0
    clipped: int = 0
    failed: int = 0
    sampled_tokens: float = 0.0
    moves: int = 0
    relocated_calls: int = 0
    loaded_tokens: float = 0.0  # fetched or computed again because a call changed its cell
    deaths: int = 0

    def spent(self, cell: int, kind: str, start_s: float, end_s: float) -> None:
        """A cell did `kind` for a while."""
        if end_s <= start_s:
            return
        self.seconds[kind] = self.seconds.get(kind, 0.0) + end_s - start_s
        if self.record:
            name = f"cell-{cell}"
            shown = _SHOWN.get(kind, "idle")
            last = next((span for span in reversed(self.spans[-2 * self.cells :]) if span.cell_id == name), None)
            if last is not None and last.kind == shown and last.end_s == start_s:
                self.spans.remove(last)
                start_s = last.start_s
            self.spans.append(CellSpan(cell_id=name, kind=shown, start_s=start_s, end_s=end_s))
