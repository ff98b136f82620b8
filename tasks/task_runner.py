"""Prefect's thread pool for flow runs that last for days: it forgets what has ended.

Prefect keeps a cancel event for each task run, and the state of each, for as long as the flow run lives: 2 to 3 KB, of
which a run with a thousand rollouts a step makes thousands an hour.
"""

from typing import Any

from prefect.context import FlowRunContext
from prefect.futures import PrefectConcurrentFuture
from prefect.task_runners import ThreadPoolTaskRunner


class LongRunTaskRunner(ThreadPoolTaskRunner[Any]):
    """As its base, without what ended task runs leave behind.

    Example: flow(task_runner=LongRunTaskRunner(max_workers=128))
    """

    def submit(self, *args: Any, **kwargs: Any) -> PrefectConcurrentFuture[Any]:
        """As the base's."""
        future = super().submit(*args, **kwargs)
        future.wrapped_future.add_done_callback(lambda _: self._cancel_events.pop(future.task_run_id, None))
        return future


def forget_task_states() -> None:
    """Drop the states of the task runs so far: what would draw the arrows from old results to new tasks in the UI."""
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
