"""Rollouts as Prefect tasks: as many at once as the serving cells hold, each graded as it ends, each group handed on
when it is whole.

    specs --(at most `capacity` at once)--> execute_rollout -> grade_rollout -> process_rollout -> complete_group

One stream serves a whole run: rollouts of several batches may be in it at once, and go on while cells train. Waits for:
the next task that ends. Woken by: that task's callback, a cell that comes back, the end of a task that runs beside it.
Nothing polls.
"""

import heapq
import queue
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar
from uuid import UUID

from prefect.futures import PrefectFuture

from gyre_core.config import RunConfig
from gyre_core.scheduler.admission import Key, admission_of
from gyre_core.types import RolloutSpec
from tasks.context import Box, RunContext
from tasks.grading import grade_rollout
from tasks.rollouts import execute_rollout
from tasks.task_runner import LongRunTaskRunner
from tasks.trajectories import CompleteGroup, complete_group, process_rollout

T = TypeVar("T")

# Threads wait for harnesses and verifiers most of the time; how many rollouts run at once is not decided here.
TASK_RUNNER: Any = LongRunTaskRunner(max_workers=128)


def task_runner_of(config: RunConfig) -> Any:
    """`TASK_RUNNER`, or one with threads for more rollouts, and as many that are graded."""
    threads = 2 * config.rollout.slots + 16
    return TASK_RUNNER if threads <= 128 else LongRunTaskRunner(max_workers=threads)


class RolloutStream:
    """See the module. The flow's own thread uses it; `poke` may come from any.

    Example: stream = RolloutStream(run); stream.add(groups); list(stream.groups(ids))
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._admission = admission_of(run.config.scheduler.policy)
        self._waiting: list[tuple[Key, int, RolloutSpec]] = []  # a heap: the next to be admitted first
        self._added = 0
        self._running = 0
        self._missing: dict[str, int] = {}  # group -> members that are not processed yet
        self._members: dict[str, list[Box[Any]]] = {}
        self._complete: dict[str, CompleteGroup] = {}  # that nobody has asked for yet
        self._wanted: set[str] = set()  # that somebody waits for
        self._ended_beside: set[UUID] = set()
        self._ended: queue.SimpleQueue[tuple[str, str, PrefectFuture[Any] | None]] = queue.SimpleQueue()

    def add(self, groups: Sequence[Sequence[RolloutSpec]]) -> None:
        """Rollouts to run, in the order of the policy's admission; alike ones as they come.

        Those of one group start together, so that early groups are whole early.
        """
        scheduling = self._run.scheduling
        for group in groups:
            first = group[0]
            scheduling.estimates.group_added(
                first.group_id, step=first.step, problem_id=first.problem_id, rollouts=len(group)
            )
            key = self._admission(first.step, scheduling.estimates.predicted(first.problem_id))
            for spec in group:
                heapq.heappush(self._waiting, (key, self._added, spec))
                self._added += 1
            self._missing[first.group_id] = len(group)
            self._members[first.group_id] = []
            scheduling.burst.dispatched(len(group), step=first.step)
        self._start()

    def put(self, groups: Collection[CompleteGroup]) -> None:
        """Groups that are complete already (an earlier process of the run committed them)."""
        self._complete.update({group.group_id: group for group in groups})

    def knows(self, group_id: str) -> bool:
        """Whether the group is under way, or complete and not asked for."""
        return group_id in self._missing or group_id in self._complete

    def num_complete(self, group_ids: Collection[str]) -> int:
        """How many of these groups are complete and not asked for."""
        return sum(group_id in self._complete for group_id in group_ids)

    def beside(self, future: PrefectFuture[T]) -> PrefectFuture[T]:
        """Watch a task that runs beside the rollouts: its failure ends whatever is waited for here."""
        self._watch("beside", "", future)
        return future

    def result(self, future: PrefectFuture[T]) -> T:
        """Wait for a task of `beside`, while rollouts go on."""
        while future.task_run_id not in self._ended_beside:
            self._step()
        self._ended_beside.discard(future.task_run_id)
        return future.result()

    def poke(self) -> None:
        """The capacity may have changed."""
        self._ended.put(("poke", "", None))

    def groups(self, group_ids: Collection[str]) -> Iterator[CompleteGroup]:
        """Each of these groups once, as soon as it is graded, selected and stored; others are kept for later.

        An error of the run itself (full disk, lost proxy) and of a task beside is raised; a bad rollout is data inside
        its group.
        """
        wanted = self._wanted = set(group_ids)
        while wanted:
            for group_id in [name for name in self._complete if name in wanted]:
                wanted.discard(group_id)
                yield self._complete.pop(group_id)
            if wanted:
                self._step()

    def _step(self) -> None:
        stage, group_id, future = self._ended.get()
        result: Any = future.result() if future is not None else None
        if stage == "execute":
            self._running -= 1
            spec = result.value.spec
            self._run.scheduling.estimates.rollout_ended(spec.rollout_id, spec.group_id, time.monotonic())
            self._run.scheduling.burst.finished(step=spec.step)
            self._watch("grade", group_id, grade_rollout.submit(self._run, result))
        elif stage == "grade":
            self._watch("process", group_id, process_rollout.submit(self._run, result))
        elif stage == "process":
            self._members[group_id].append(result)
            self._missing[group_id] -= 1
            if not self._missing[group_id]:
                members = Box(self._members.pop(group_id))
                self._watch("complete", group_id, complete_group.submit(self._run, group_id, members))
        elif stage == "complete":
            del self._missing[group_id]
            self._complete[group_id] = result.value
            if group_id not in self._wanted:
                self._run.scheduling.burst.group_ready(of_next=True)
        elif stage == "beside" and future is not None:
            self._ended_beside.add(future.task_run_id)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._run.scheduling.capacity():
            _, _, spec = heapq.heappop(self._waiting)
            self._running += 1
            self._run.scheduling.estimates.rollout_started(spec.rollout_id, spec.group_id, time.monotonic())
            self._watch("execute", spec.group_id, execute_rollout.submit(self._run, spec))

    def _watch(self, stage: str, group_id: str, future: PrefectFuture[Any]) -> None:
        future.add_done_callback(lambda done: self._ended.put((stage, group_id, done)))


def stream_of(run: RunContext) -> RolloutStream:
    """The run's stream, made at its first use."""
    if run.stream is None:
        run.stream = RolloutStream(run)
        run.scheduling.on_capacity(run.stream.poke)
    return run.stream


def run_groups(run: RunContext, groups: Sequence[Sequence[RolloutSpec]]) -> Iterator[CompleteGroup]:
    """Run these groups' rollouts beside whatever runs; yields each group once, when it is whole."""
    stream = stream_of(run)
    stream.add(groups)
    yield from stream.groups([group[0].group_id for group in groups])
