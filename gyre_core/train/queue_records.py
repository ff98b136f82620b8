"""What a step's queue and its members say to each other: plain records.

Enters: nothing but values. Leaves: the identity of a step, the rules of its queue, leased work, take-overs and the
account that the step's commit lists.
"""

from dataclasses import dataclass, field
from typing import Literal

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.packing import Unit
from gyre_core.train.queue import Lease
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.transfer.gradients import BufferOffer

# What a member does next: hand its gradient in; forget it and join the same step again; forget it, the step is over.
Instruction = Literal["hand_over", "rejoin", "over"]
BranchName = tuple[str, int]  # rollout, branch


class StaleStepError(TrainError):
    """The member's weights or session belong to another step: clear the gradient, pull the weights, join anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIdentity:
    """Which step, and from which weights. Example: StepIdentity(step=3, policy_version=3, weights="5e...")"""

    step: int
    policy_version: int
    weights: str  # checksum of the snapshot that all members hold


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """How a step's groups become leased micro-steps. Example: QueueRules(micro_step_tokens=16384)"""

    micro_step_tokens: int
    unit: Unit = "branch"
    zero_advantage_trains: bool = False  # TrainConfig's; if not, rollouts without advantage are left out
    tail_tokens: int = 256  # the last micro-steps are split down to about this many tokens
    lease: LeaseRule = field(default_factory=LeaseRule)
    silence_s: float = 30.0  # a member without a lease that does not ask for so long is gone
    share_prefixes: bool = True

    @classmethod
    def of(cls, train: TrainConfig) -> "QueueRules":
        """Micro-steps packed as a run's settings say."""
        return cls(
            micro_step_tokens=train.micro_step_tokens,
            unit=train.unit,
            share_prefixes=train.share_prefixes,
            zero_advantage_trains=train.zero_advantage_trains,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A leased micro-step and its branches as Arrow IPC. Example: Work(lease=lease, body=b"...")"""

    lease: Lease
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """A member's gradient that the owner should read now. Example: TakeOver(session="...", offer=offer)"""

    session: str
    offer: BufferOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """What a closed step trained: for its commit. Example: queue.account().taken["g0.0"] == "step-3-9c/cell-1#2" """

    taken: dict[str, str]  # micro-step -> session
    groups: dict[str, tuple[str, ...]]  # group -> its micro-steps; none when it carries no signal
    stats: dict[str, float]  # of the micro-steps (combine_stats)
    requeued: int
    failed: int
    cut_off: tuple[str, ...]  # sessions that were lost
    rates: dict[str, float]  # tokens a second by member
