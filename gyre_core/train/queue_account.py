"""The account of a closed step: proof that each branch of each group is in the gradient once, and how it was summed."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gyre_core.errors import TrainError
from gyre_core.train.queue import MicroStepQueue
from gyre_core.train.queue_records import BranchName, GradientSum, StepAccount
from gyre_core.train.stats import combine_stats


class SumOrder:
    """In which order the owner added what. Example: order = SumOrder(); order.computed("s/core#1", "g0.0")"""

    def __init__(self) -> None:
        self._parts: list[tuple[str, bool, list[str]]] = []

    def computed(self, session: str, micro_step: str) -> None:
        """The owner computed one into its sum."""
        if not self._parts or self._parts[-1][0] != session:
            self._parts.append((session, True, []))
        self._parts[-1][2].append(micro_step)

    def added(self, session: str, micro_steps: Sequence[str]) -> None:
        """The owner added a satellite's sum."""
        self._parts.append((session, False, list(micro_steps)))

    def sums(self) -> tuple[GradientSum, ...]:
        """What was added, first to last."""
        return tuple(
            GradientSum(session=session, owner=owner, micro_steps=tuple(steps)) for session, owner, steps in self._parts
        )


def make_account(
    queue: MicroStepQueue,
    groups: Mapping[str, Sequence[str]],
    branches: Mapping[str, tuple[BranchName, ...]],
    stats: Mapping[str, Mapping[str, float]],
    order: SumOrder,
    cut_off: Sequence[str],
) -> StepAccount:
    """Raises TrainError when a micro-step or branch is missing or there twice."""
    taken = queue.taken()
    listed = [micro_step for steps in groups.values() for micro_step in steps]
    names = [name for micro_step in listed for name in branches[micro_step]]
    added = [micro_step for part in order.sums() for micro_step in part.micro_steps]
    if not (sorted(listed) == sorted(taken) == sorted(added)) or len(set(names)) != len(names):
        raise TrainError("a micro-step or branch is not in the gradient once")
    counts = queue.counts()
    return StepAccount(
        taken=taken,
        groups={group: tuple(steps) for group, steps in groups.items()},
        stats=combine_stats([stats[micro_step] for micro_step in taken if micro_step in stats]),
        requeued=counts.requeued,
        failed=counts.failed,
        cut_off=tuple(cut_off),
        rates=queue.rates.all(),
        sums=order.sums(),
        branches={micro_step: branches[micro_step] for micro_step in listed},
    )


def queue_status(queue: MicroStepQueue, offers: Container[str]) -> dict[str, Any]:
    """Counts, sessions and rates as plain data."""
    return {
        "sealed": queue.sealed,
        "trainers": list(queue.trainers()),
        **asdict(queue.counts()),
        "sessions": {
            session: {
                "lease": lease.micro_step_id if (lease := queue.lease_of(session)) else None,
                "completed": len(queue.completed(session)),
                "offered": session in offers,
            }
            for session in queue.sessions()
        },
        "tokens_per_s": {name: round(rate, 1) for name, rate in queue.rates.all().items()},
    }
