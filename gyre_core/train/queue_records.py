"""What a step's queue and its members say to each other: plain records.

Enters: nothing but values. Leaves: the identity of a step, the rules of its queue, leased work, take-overs and the
account that the step's commit lists.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.train.packing import Unit
from gyre_core.train.queue import Lease
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.transfer.gradients import BufferOffer

# What a member does next: hand its gradient in; forget it and join the same step again; forget it, the step is over; it
# has left, its gradient lies in the buffer that it offered until the step is over.
Instruction = Literal["hand_over", "rejoin", "over", "left"]
ACCOUNT = "account"  # its key in a step record's extra
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
class GradientSum:
    """Micro-steps of one session in the order in which they were computed.

    The owner's went straight into the step's sum, one after the other; a satellite's were summed from zero, and that
    sum was added whole. Example: GradientSum(session="step-3-9c/cell-1#2", owner=False, micro_steps=("g0.1", "g1.0"))
    """

    session: str
    owner: bool
    micro_steps: tuple[str, ...]


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
    sums: tuple[GradientSum, ...] = ()  # in the order in which they were added: the same again gives the same bits
    branches: dict[str, tuple[BranchName, ...]] = field(default_factory=dict)  # micro-step -> what it computed

    @property
    def micro_steps(self) -> tuple[tuple[BranchName, ...], ...]:
        """Branches by micro-step, in the order of `sums`: a step record's `micro_steps`."""
        return tuple(self.branches[name] for part in self.sums for name in part.micro_steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what a step record keeps under `extra["account"]`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StepAccount":
        """The inverse of `to_json`, also after JSON made lists of tuples; raises ValueError for anything else."""
        try:
            return cls(
                taken={str(name): str(session) for name, session in data["taken"].items()},
                groups={str(group): tuple(map(str, steps)) for group, steps in data["groups"].items()},
                stats={str(name): float(value) for name, value in data["stats"].items()},
                requeued=int(data["requeued"]),
                failed=int(data["failed"]),
                cut_off=tuple(map(str, data["cut_off"])),
                rates={str(name): float(value) for name, value in data["rates"].items()},
                sums=tuple(
                    GradientSum(
                        session=str(part["session"]),
                        owner=bool(part["owner"]),
                        micro_steps=tuple(map(str, part["micro_steps"])),
                    )
                    for part in data["sums"]
                ),
                branches={
                    str(name): tuple((str(rollout_id), int(branch)) for rollout_id, branch in branches)
                    for name, branches in data["branches"].items()
                },
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a step's account: {error!r}") from error
