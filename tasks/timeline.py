"""What each cell did when, and the water level beside it: for the run's picture. Bounded; thread-safe."""

import threading
import time
from collections.abc import Callable

from gyre_core.pictures import CellSpan, LevelPoint

_MAX_SPANS = 4000  # a picture cannot show more; then the older half goes
_MAX_POINTS = 4000  # then every second of them goes
_SHORTEST_S = 0.01


class CellTimeline:
    """Spans and levels in seconds since it was made.

    Example: timeline.mark("cell-0", "switch"); timeline.mark("cell-0", "training"); timeline.spans()
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._started_s = now_s()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, float]] = {}
        self._spans: list[CellSpan] = []
        self._points: list[LevelPoint] = []

    def mark(self, cell_id: str, kind: str) -> None:
        """The cell does this from now on: rollout, training, switch, idle or dead."""
        with self._lock:
            at = self._elapsed_s()
            if cell_id in self._open:
                self._close(cell_id, at)
            self._open[cell_id] = (kind, at)
            if len(self._spans) > _MAX_SPANS:
                del self._spans[: _MAX_SPANS // 2]

    def level(self, water_level: int, capacity: int) -> None:
        """Rollouts that need an engine, and slots of the cells that serve."""
        with self._lock:
            last = self._points[-1] if self._points else None
            if last is not None and (last.water_level, last.capacity) == (water_level, capacity):
                return
            self._points.append(LevelPoint(at_s=self._elapsed_s(), water_level=water_level, capacity=capacity))
            if len(self._points) > _MAX_POINTS:
                self._points = self._points[::2]

    def spans(self) -> list[CellSpan]:
        """What every cell did until now, the span that still goes on included."""
        with self._lock:
            at = self._elapsed_s()
            going = [
                CellSpan(cell_id=cell_id, kind=kind, start_s=start_s, end_s=at)
                for cell_id, (kind, start_s) in self._open.items()
                if at - start_s > _SHORTEST_S
            ]
            return [*self._spans, *going]

    def levels(self) -> list[LevelPoint]:
        """The water level at each of its changes."""
        with self._lock:
            return list(self._points)

    def _close(self, cell_id: str, at: float) -> None:
        kind, start_s = self._open[cell_id]
        if at - start_s > _SHORTEST_S:
            self._spans.append(CellSpan(cell_id=cell_id, kind=kind, start_s=start_s, end_s=at))

    def _elapsed_s(self) -> float:
        return self._now_s() - self._started_s
