"""Time as an argument, so that rules about time can be tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall and monotonic time in seconds."""

    def now_s(self) -> float:
        """Seconds since the epoch: for records that people and other machines read."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back: for durations and deadlines."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to. Example: `clock = ManualClock(); clock.advance(3.0)`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._time_s = start_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; negative seconds raise ValueError."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back ({seconds} s)")
        self._time_s += seconds

    def now_s(self) -> float:
        return self._time_s

    def monotonic_s(self) -> float:
        return self._time_s
