"""A bound on how long one flow run trains; the next run of the same name goes on where it stopped.

Enters: the bound in seconds, and a call at each step boundary. Leaves: whether another step fits. Invariant: a box lets
at least one step begin, so that a run whose steps are longer than its box still gets on.
"""

from gyre_core.clock import Clock, SystemClock


class TimeBox:
    """Time that a flow run may take, from the moment this object is made; None: no bound.

    Example: box = TimeBox(3600.0); while box.has_room(): train_step(...)
    """

    def __init__(self, max_wall_s: float | None, *, clock: Clock | None = None) -> None:
        if max_wall_s is not None and max_wall_s <= 0:
            raise ValueError(f"max_wall_s is {max_wall_s:g}: give the seconds that a run may take, or none")
        self._max_wall_s = max_wall_s
        self._clock = clock or SystemClock()
        self._started_s = self._clock.monotonic_s()
        self._step_started_s: float | None = None
        self._longest_step_s = 0.0

    def has_room(self) -> bool:
        """Called where a step would begin: whether one as long as the longest so far still ends inside the box."""
        now_s = self._clock.monotonic_s()
        if self._step_started_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._step_started_s)
        first = self._step_started_s is None
        self._step_started_s = now_s
        if self._max_wall_s is None or first:
            return True
        return now_s - self._started_s + self._longest_step_s <= self._max_wall_s
