"""What a run has measured of its own rollouts and steps, as the numbers that policies look ahead with.

Enters: durations of ended rollouts, of micro-steps and of optimizer steps. Leaves: the longest rollout to expect, the
tail that is left, and the ratio that says whether training or serving goes first. The newest values count.
"""

import threading
from collections import deque

import numpy as np

_KEPT = 2048  # rollouts: several steps of most runs
_LONGEST = 99.8  # percentile that stands for the longest rollout: the very longest is noise


class Estimates:
    """Thread-safe. Example: estimates = Estimates(); estimates.rollout_ended(120.0); estimates.longest_s == 120.0"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rollouts: deque[float] = deque(maxlen=_KEPT)
        self._started: dict[str, tuple[int, float]] = {}
        self._microstep_s = 0.0
        self._train_s = 0.0  # of a step, on one cell
        self._optimizer_s = 0.0

    def rollout_started(self, rollout_id: str, step: int, now_s: float) -> None:
        """A rollout of this step's batch runs from now on."""
        with self._lock:
            self._started[rollout_id] = (step, now_s)

    def rollout_ended(self, rollout_id: str, now_s: float) -> None:
        """It needs no engine any more."""
        with self._lock:
            _, started_s = self._started.pop(rollout_id, (-1, now_s))
            self._rollouts.append(now_s - started_s)

    def step_ended(self, *, micro_steps: int, forward_backward_s: float, optimizer_s: float) -> None:
        """A step was trained; seconds of all its trainers together."""
        with self._lock:
            self._microstep_s = forward_backward_s / micro_steps if micro_steps else 0.0
            self._train_s, self._optimizer_s = forward_backward_s, optimizer_s

    @property
    def microstep_s(self) -> float:
        """Mean time of a micro-step on one cell; 0 before the first step."""
        with self._lock:
            return self._microstep_s

    @property
    def longest_s(self) -> float:
        """The longest rollout to expect; 0 before the first has ended."""
        with self._lock:
            return self._longest()

    def tail_s(self, step: int, now_s: float) -> float:
        """Time until the step's youngest running rollout has ended, should it be the longest; 0: not known, or over."""
        with self._lock:
            youngest = [started_s for of, started_s in self._started.values() if of == step]
            if not youngest:
                return 0.0
            return max(0.0, self._longest() - (now_s - max(youngest)))

    def tail_ratio(self, *, staleness: int, cells: int, slots: int, rollouts: int, groups: int) -> float:
        """(longest rollout + optimizer step + a group's training) / ((k + 1) * work of a step / cells); 1: not known.

        Work of a step in cell-seconds: its rollouts' times over a cell's slots, and its training.
        """
        with self._lock:
            if not self._rollouts or self._train_s <= 0:
                return 1.0
            work_s = float(np.mean(self._rollouts)) * rollouts / slots + self._train_s
            longest_s = self._longest() + self._optimizer_s + self._train_s / max(1, groups)
            return longest_s / ((staleness + 1) * work_s / cells)

    def _longest(self) -> float:
        return float(np.percentile(self._rollouts, _LONGEST)) if self._rollouts else 0.0
