"""Rollouts as Prefect tasks: keep `slots` of them running, grade each as it ends, hand on each group when it is whole.

    specs --(at most `slots` at once)--> execute_rollout -> grade_rollout -> process_rollout -> complete_group

Waits for: the next task that ends. Woken by: that task's callback. Nothing polls.
"""

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from gyre_core.types import RolloutSpec
from tasks.context import Box, RunContext
from tasks.grading import grade_rollout
from tasks.rollouts import execute_rollout
from tasks.trajectories import CompleteGroup, complete_group, process_rollout

# Threads wait for harnesses and verifiers most of the time; how many rollouts run at once is `rollout.slots`, not this.
TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=64)


def run_groups(run: RunContext, groups: Sequence[Sequence[RolloutSpec]]) -> Iterator[CompleteGroup]:
    """Run the groups' rollouts; yields each group once, as soon as it is graded, selected and stored.

    Rollouts of one group start together, so that early groups are whole early. An error of the run itself (full disk,
    lost proxy) is raised; a bad rollout is data inside its group.
    """
    waiting = deque(spec for group in groups for spec in group)
    missing = {group[0].group_id: len(group) for group in groups}
    members: dict[str, list[Box[Any]]] = {group[0].group_id: [] for group in groups}
    ended: queue.SimpleQueue[tuple[str, str, PrefectFuture[Any]]] = queue.SimpleQueue()

    def watch(stage: str, group_id: str, future: PrefectFuture[Any]) -> None:
        future.add_done_callback(lambda done: ended.put((stage, group_id, done)))

    def start_next() -> None:
        if waiting:
            spec = waiting.popleft()
            watch("execute", spec.group_id, execute_rollout.submit(run, spec))

    for _ in range(run.config.rollout.slots):
        start_next()
    remaining = len(missing)
    while remaining:
        stage, group_id, future = ended.get()
        result = future.result()
        if stage == "execute":
            start_next()
            watch("grade", group_id, grade_rollout.submit(run, result))
        elif stage == "grade":
            watch("process", group_id, process_rollout.submit(run, result))
        elif stage == "process":
            members[group_id].append(result)
            missing[group_id] -= 1
            if not missing[group_id]:
                watch("complete", group_id, complete_group.submit(run, group_id, Box(members.pop(group_id))))
        else:
            remaining -= 1
            yield result.value
