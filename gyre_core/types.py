"""Nouns that more than one part of Gyre uses: sampling, calls, nodes, outcomes, rollouts, training branches.

Everything here is immutable data without behaviour that needs torch, a network or a clock. Token ids are int32 arrays,
log-probs float32 arrays in nats at the sampling temperature, times seconds since the epoch, durations seconds.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
LogProbs = NDArray[np.float32]
BoolMask = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token was sampled (it is the last output id)
    LENGTH = "length"  # max_new_tokens or the context ended it
    ABORT = "abort"  # the engine was told to stop; the partial output is kept


class Role(StrEnum):
    """What a call is to its rollout. AUX is recorded and never trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    AUX = "aux"


class Substitution(StrEnum):
    """How a call's prompt relates to what was recorded before it."""

    CLEAN = "clean"  # strict append to recorded tokens, texts equal
    RESPLICED = "respliced"  # texts differ in form only; the recorded tokens stand in
    FORKED = "forked"  # the meaning differs: rendered anew, hangs where tokens really diverge
    SYNTHETIC = "synthetic"  # holds an assistant message that nobody sampled (context, never a target)


class Outcome(StrEnum):
    """How a rollout ended: the taxonomy of trajectories.md section 4."""

    FINISHED = "finished"  # harness ended by itself, graded
    TIME_LIMIT = "time_limit"  # harness time limit, workspace kept, graded (partial credit)
    HARNESS_FAILED = "harness_failed"  # harness crashed or gave up, workspace kept, graded
    VERIFIER_FAILED = "verifier_failed"  # verifier crashed, no or bad reward file, its own time limit: excluded
    NO_ARTIFACT = "no_artifact"  # no workspace or no call made: infrastructure failure
    CANCELLED = "cancelled"  # overall limit or cancellation: excluded


GRADED_OUTCOMES = frozenset({Outcome.FINISHED, Outcome.TIME_LIMIT, Outcome.HARNESS_FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an engine samples one call.

    Example: SamplingParams(max_new_tokens=256, temperature=1.0, stop_token_ids=(2,))
    """

    max_new_tokens: int  # > 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # other than 1.0 is refused for training (no sampling mask)
    top_k: int = -1  # -1 is off
    stop_token_ids: tuple[int, ...] = ()  # the sampled stop token is part of the output
    stop: tuple[str, ...] = ()  # stop strings
    seed: int | None = None  # per-call seed, None lets the engine choose


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens [start, end) of a call were sampled by weights of `version`.

    Example: VersionSpan(version=3, start=0, end=17)
    """

    version: int  # policy version (optimizer steps in the weights)
    start: int  # first output token, 0-based
    end: int  # one past the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine returned for one call, ids in and ids out.

    Example: Generation(output_ids=np.array([5, 2], np.int32), logprobs=np.array([-.1, -.2], np.float32), ...)
    """

    output_ids: TokenIds  # sampled ids, the stop token included when one was sampled
    logprobs: LogProbs  # sampler log-probs, same length
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]  # cover [0, len(output_ids)) in order without gaps
    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens that came from the engine's prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One model call of a harness, without its tokens (those hang in the tree).

    Example: CallRecord(call_id="r1-c0", rollout_id="r1", index=0, node_id=1, role=Role.MAIN, ...)
    """

    call_id: str  # unique in the run
    rollout_id: str
    index: int  # order of arrival in the rollout, from 0
    node_id: int  # the tree node that holds the call's sampled tokens
    role: Role
    dialect: str  # messages | chat | responses
    model_name: str  # what the harness asked for; never used to route
    substitution: Substitution
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    started_s: float  # request read
    finished_s: float  # reply ready
    hints: dict[str, str] = field(default_factory=dict)  # harness headers that show roles and sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A rollout's outcome and reward.

    Example: Grade(outcome=Outcome.FINISHED, reward=0.5, reason="verifier wrote 0.5", verifier_attempts=1, ...)
    """

    outcome: Outcome
    reward: float | None  # None: excluded from the group's statistics, never turned into 0
    reason: str  # one sentence for people; says why when excluded
    verifier_attempts: int = 0
    verifier_s: float = 0.0  # time in the verifier, all attempts
    metrics: dict[str, float] = field(default_factory=dict)  # further numbers of reward.json

    @property
    def included(self) -> bool:
        """Whether the rollout counts in its group's statistics."""
        return self.reward is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """One agent run to be done.

    Example: RolloutSpec(rollout_id="s0003-p07-02", group_id="s0003-p07", problem_id="p07", step=3, member=2, ...)
    """

    rollout_id: str  # unique in the run; also the proxy session's name
    group_id: str  # problem and dispatch
    problem_id: str
    step: int  # the step it was dispatched for, from 0; -1 for evaluation
    member: int  # 0-based index in the group
    dispatch_version: int  # policy version at dispatch; staleness counts from it
    seed: int  # seeds the rollout's sampling

    @property
    def label(self) -> str:
        """The name people see: `step 12 / rollout p07-03` (steps count from 1), or the dispatch's own name."""
        if self.step >= 0:
            return f"step {self.step + 1} / rollout {self.problem_id}-{self.member:02d}"
        return f"{self.group_id} / rollout {self.problem_id}-{self.member:02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessResult:
    """How the harness process of a rollout ended. Exit codes prove nothing by themselves.

    Example: HarnessResult(exit_code=0, timed_out=False, duration_s=2.1, log_tail="", started_s=..., finished_s=...)
    """

    exit_code: int | None  # None: it never started, or was killed
    timed_out: bool
    duration_s: float
    log_tail: str  # the last 2,000 characters of stdout and stderr
    started_s: float
    finished_s: float
    error: str = ""  # why no process ran (image, sandbox), else empty


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBranch:
    """One selected branch as the trainer takes it: a root-to-leaf path with disjoint targets.

    Loss weights are those of the inner mean of the two-level mean: they sum to 1 over a rollout's selected targets.
    The outer division (by the included rollouts of the step) is done once, at the optimizer step.

    Example: TrainingBranch(rollout_id="r1", group_id="g", branch=0, role=Role.MAIN, token_ids=ids, target=mask, ...)
    """

    rollout_id: str
    group_id: str
    branch: int  # order of selection, from 0
    role: Role  # of the leaf
    token_ids: TokenIds  # [T], prompt and outputs in the engine's order
    target: BoolMask  # [T], True where the token is trained by this branch; never at position 0
    sampler_logprobs: LogProbs  # [T], 0 where target is False
    weights: NDArray[np.float32]  # [T], 0 where target is False
    advantage: float
    temperature: float  # of the sampling, for the trainer's log-probs
    min_version: int  # oldest policy version among the targets' spans


Json = dict[str, Any]
