"""What a run has measured of its own rollouts and steps, as the numbers that policies look ahead with.

Enters: groups and rollouts as they are dispatched, start and end; micro-steps and optimizer steps. Leaves: the length
to foresee for a problem, the tail that is left of a step, and the ratio that says whether training goes first.

Rollouts of one problem have alike lengths: what its earlier rollouts took, against all, is foreseen for its next ones.
"""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

_KEPT = 2048  # rollouts: several steps of most runs
_LONGEST = 99.8  # percentile that stands for the longest rollout: the very longest is noise
_PRIOR_ROLLOUTS = 1.0  # weight of the mean over all problems in what is foreseen for one
_OVERDUE = 0.05  # of its age: what a group still takes that has taken as long as was foreseen


@dataclass(slots=True, kw_only=True)
class _Group:
    step: int
    problem_id: str
    left: int  # members that have not ended
    predicted: float  # when it was dispatched
    started_s: float = -1.0  # its first member; -1: none yet


class Estimates:
    """Thread-safe.

    Example: estimates = Estimates(); estimates.group_added("s0-p1", step=0, problem_id="p1", rollouts=8)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rollouts: deque[float] = deque(maxlen=_KEPT)
        self._problems: dict[str, tuple[int, float]] = {}  # rollouts that ended, their seconds
        self._all = (0, 0.0)
        self._groups: dict[str, _Group] = {}  # that are not over
        self._started: dict[str, float] = {}
        self._group_seconds = (0, 0.0)  # groups that ended; their seconds, each over what was foreseen for it
        self._microstep_s = 0.0
        self._group_microsteps = 1.0
        self._train_s = 0.0  # of a step, on one cell
        self._optimizer_s = 0.0

    def group_added(self, group_id: str, *, step: int, problem_id: str, rollouts: int) -> None:
        """A group of this step's batch waits for slots."""
        with self._lock:
            predicted = self._predicted(problem_id)
            self._groups[group_id] = _Group(step=step, problem_id=problem_id, left=rollouts, predicted=predicted)

    def rollout_started(self, rollout_id: str, group_id: str, now_s: float) -> None:
        """A rollout runs from now on."""
        with self._lock:
            self._started[rollout_id] = now_s
            group = self._groups[group_id]
            if group.started_s < 0:
                group.started_s = now_s

    def rollout_ended(self, rollout_id: str, group_id: str, now_s: float) -> None:
        """It needs no engine any more."""
        with self._lock:
            seconds = now_s - self._started.pop(rollout_id)
            group = self._groups[group_id]
            self._rollouts.append(seconds)
            count, total_s = self._problems.get(group.problem_id, (0, 0.0))
            self._problems[group.problem_id] = (count + 1, total_s + seconds)
            self._all = (self._all[0] + 1, self._all[1] + seconds)
            group.left -= 1
            if not group.left:
                del self._groups[group_id]
                count, total_s = self._group_seconds
                self._group_seconds = (count + 1, total_s + (now_s - group.started_s) / group.predicted)

    def step_ended(self, *, groups: int, micro_steps: int, forward_backward_s: float, optimizer_s: float) -> None:
        """A step was trained; seconds of all its trainers together."""
        with self._lock:
            self._microstep_s = forward_backward_s / micro_steps if micro_steps else 0.0
            self._group_microsteps = micro_steps / groups if groups else 1.0
            self._train_s, self._optimizer_s = forward_backward_s, optimizer_s

    def predicted(self, problem_id: str) -> float:
        """How long a problem's rollouts take, in means over all problems; 1 where nothing is known."""
        with self._lock:
            return self._predicted(problem_id)

    @property
    def microstep_s(self) -> float:
        """Mean time of a micro-step on one cell; 0 before the first step."""
        with self._lock:
            return self._microstep_s

    @property
    def group_microsteps(self) -> float:
        """Micro-steps of a group, on average over the last step; 1 before the first."""
        with self._lock:
            return self._group_microsteps

    @property
    def longest_s(self) -> float:
        """The longest rollout to expect; 0 before the first has ended."""
        with self._lock:
            return self._longest()

    def tail_s(self, step: int, now_s: float) -> float:
        """Time until the step's last group has ended as foreseen; 0: not known, or over."""
        with self._lock:
            count, total_s = self._group_seconds
            if not count:
                return 0.0
            tail_s = 0.0
            for group in self._groups.values():
                if group.step == step:
                    age_s = now_s - group.started_s if group.started_s >= 0 else 0.0
                    tail_s = max(tail_s, group.predicted * total_s / count - age_s, _OVERDUE * age_s)
            return tail_s

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

    def _predicted(self, problem_id: str) -> float:
        rollouts, total_s = self._all
        if not total_s:
            return 1.0
        mean_s = total_s / rollouts
        own, own_s = self._problems.get(problem_id, (0, 0.0))
        return (own_s + _PRIOR_ROLLOUTS * mean_s) / ((own + _PRIOR_ROLLOUTS) * mean_s)

    def _longest(self) -> float:
        return float(np.percentile(self._rollouts, _LONGEST)) if self._rollouts else 0.0
