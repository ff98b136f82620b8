"""The task that trains a step while its rollouts still run: each group goes to the core's queue as it becomes whole.

    inbox -> core's micro-step queue -> trainers of the cells that train -> the core's optimizer step

Waits for: the next group, then the optimizer step. A core that dies meanwhile is started again by the fleet and told
everything once more; its queue knows by its journal what was trained.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from gyre_core.cells.client import CellClient
from gyre_core.errors import GyreError, TrainError
from gyre_core.train.queue_records import StepAccount
from tasks.context import Box, RunContext
from tasks.spans import record_trained
from tasks.trajectories import CompleteGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")

_WAIT_S = 10.0  # of one request for the step's end
_RETRY_S = 1.0  # between two tries while the core does not answer
_LOOK_S = 0.5  # between two looks at a batch barrier


class Inbox:
    """Groups on their way from the flow to training, in order. Example: inbox.put(group); inbox.close()"""

    def __init__(self) -> None:
        self._groups: queue.SimpleQueue[CompleteGroup | None] = queue.SimpleQueue()

    def put(self, group: CompleteGroup) -> None:
        """One more group of the step."""
        self._groups.put(group)

    def close(self) -> None:
        """No more come."""
        self._groups.put(None)

    def __iter__(self) -> Iterator[CompleteGroup]:
        return iter(self._groups.get, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What one optimizer step did.

    Example: TrainedStep(num_rollouts=48, micro_steps=(...), stats={"grad_norm": 0.3}, groups_trained=("s0000-p01",),
    ...)
    """

    num_rollouts: int  # the outer mean's denominator
    micro_steps: tuple[tuple[tuple[str, int], ...], ...]  # (rollout_id, branch) by micro-step, in order
    stats: dict[str, float] = field(default_factory=dict)
    groups_trained: tuple[str, ...] = ()
    groups_dropped: dict[str, str] = field(default_factory=dict)
    weights_before: str = ""  # digest of the weights that the step started from
    account: dict[str, Any] = field(default_factory=dict)  # which micro-step was in whose gradient


@task(name="stream_train", task_run_name="step {step_label} / train", cache_policy=NO_CACHE)
def stream_train(run: RunContext, step_label: int, inbox: Box[Inbox]) -> Box[TrainedStep]:
    """Hand each group of the inbox to the core's queue, then wait for the optimizer step.

    Every group is trained or dropped with its reason. A group whose members all have advantage 0 is trained: it
    counts in the mean, and its gradient is known to be exactly 0 without computing it. When no group is left the step
    is taken with no gradient at all: the policy version advances, the weights do not change.
    """
    step = _Step(run, step_label - 1)
    first_s, handed = 0.0, []
    for group in inbox.value:
        while not run.scheduling.may_hand_over():
            run.scheduling.check()
            run.scheduling.burst.wait(run.scheduling.burst.stamp, _LOOK_S)
        first_s = first_s or time.monotonic()
        handed.append((group, time.time()))
        step.take(group)
        run.scheduling.burst.group_handed()
    run.scheduling.check()  # an inbox is closed too when the run ends early
    closed_s = time.monotonic()
    result = step.close()
    run.cell_version += 1
    ended_s = time.monotonic()
    record_trained(run, step_label - 1, handed, time.time())
    account = StepAccount.from_json(result["account"])
    totals = dict(account.stats)
    seconds = float(result.get("optimizer_s", result.get("seconds", 0.0)))
    stats = {
        **totals,
        "loss": totals.get("loss", 0.0) / max(1, step.num_rollouts),
        "grad_norm": float(result.get("grad_norm", 0.0)),
        "learning_rate": run.config.train.learning_rate_at(step_label - 1),
        "groups_without_signal": float(step.without_signal),
        "train_s": ended_s - (first_s or closed_s),
        "train_tail_s": ended_s - closed_s,  # after the last group was graded
        "packing_s": float(result.get("packing_s", 0.0)),
        "forward_backward_s": totals.get("duration_s", 0.0),
        "gradients_s": float(result.get("gradients_s", 0.0)),
        "optimizer_s": max(0.0, seconds - float(result.get("gradients_s", 0.0))),
        "micro_steps_requeued": float(account.requeued),
        "trainers": float(len({_trainer(session) for session in account.taken.values()})),
    }
    run.scheduling.estimates.step_ended(
        groups=len(step.trained) - step.without_signal,
        micro_steps=len(account.branches),
        forward_backward_s=stats["forward_backward_s"],
        optimizer_s=stats["gradients_s"] + stats["optimizer_s"],
    )
    return Box(
        TrainedStep(
            num_rollouts=step.num_rollouts,
            micro_steps=account.micro_steps,
            stats=stats,
            groups_trained=tuple(sorted(step.trained)),
            groups_dropped=step.dropped,
            weights_before=str(result.get("weights_before", "")),
            account=account.to_json(),
        )
    )


def _trainer(session: str) -> str:
    """The trainer in a session's name, `step-3-9c/cell-1#2`."""
    return session.rpartition("/")[2].partition("#")[0]


class _Step:
    """One step on the core, told again to a core that was started again."""

    def __init__(self, run: RunContext, step: int) -> None:
        self._run, self._step = run, step
        self._handed: list[CompleteGroup] = []
        self._generation = -1
        self.trained: list[str] = []
        self.dropped: dict[str, str] = {}
        self.num_rollouts = 0
        self.without_signal = 0

    def take(self, group: CompleteGroup) -> None:
        """One group of the step."""
        if group.dropped_reason is not None:
            self.dropped[group.group_id] = group.dropped_reason
            return
        self.trained.append(group.group_id)
        self.num_rollouts += group.num_included
        if not _signal(group):
            self.without_signal += 1
        self._on_core(lambda core: core.train_group(group.group_id, _signal(group)))
        self._handed.append(group)

    def close(self) -> dict[str, Any]:
        """Seal the step; returns what the optimizer step and its account say, when it was taken."""
        self._on_core(lambda core: core.train_seal(num_rollouts=self.num_rollouts))
        self._run.scheduling.burst.sealed()
        while True:
            self._run.scheduling.check()
            result = self._on_core(self._sealed_and_finished)
            if result is not None:
                return result

    def _sealed_and_finished(self, core: CellClient) -> dict[str, Any] | None:
        core.train_seal(num_rollouts=self.num_rollouts)  # a core that was started again has forgotten it
        return core.train_finish(wait_s=_WAIT_S)

    def _on_core(self, verb: Callable[[CellClient], T]) -> T:
        """Call the core, as often as it has to be started again. Raises what it refuses, and what ends the run."""
        fleet = self._run.services.fleet
        patience_s = time.monotonic() + 3 * self._run.config.scheduler.dead_after_s
        while True:
            self._run.scheduling.check()
            fleet.check()
            generation = fleet.core_generation
            try:
                core = fleet.core
                if generation != self._generation:
                    self._open(core)
                    self._generation = generation
                return verb(core)
            except TrainError:
                raise
            except GyreError as error:
                fleet.check()
                if generation == fleet.core_generation and time.monotonic() > patience_s:
                    raise  # it lives, and says no
                logger.warning("step %d: the core does not answer, asking again: %s", self._step + 1, error)
                time.sleep(_RETRY_S)

    def _open(self, core: CellClient) -> None:
        run = self._run
        core.train_open(
            step=self._step,
            policy_version=run.policy_version,
            learning_rate=run.config.train.learning_rate_at(self._step),
        )
        for group in self._handed:
            core.train_group(group.group_id, _signal(group))


def _signal(group: CompleteGroup) -> list[Any]:
    """The branches that have a gradient of their own."""
    return [branch for branch in group.branches if branch.advantage != 0.0]
