"""Which outcome a rollout has, before any verifier runs: a pure decision (trajectories.md section 4).

Enters: how the harness ended, how many model calls were recorded, whether there is a workspace. Leaves: an outcome
and whether to grade it. Invariant: exit codes and time limits never exclude a rollout that worked on a workspace;
only what the agent cannot be blamed for does.
"""

from dataclasses import dataclass

from gyre_core.config.models import GradingConfig
from gyre_core.types import Grade, HarnessResult, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do with an ended rollout.

    Example: Decision(outcome=Outcome.TIME_LIMIT, to_grade=True, reason="harness reached its time limit after 60 s")
    """

    outcome: Outcome
    to_grade: bool
    reason: str  # one clause


def classify(
    harness: HarnessResult,
    *,
    num_calls: int,
    workspace_kept: bool,
    overall_expired: bool = False,
    time_limit: str = "",
) -> Decision:
    """Decide by what happened, in this order: cancelled, nothing ran, no call made, time limit, failed, finished.

    `time_limit` tells people which limit the harness had and who set it.
    """
    if overall_expired:
        return Decision(outcome=Outcome.CANCELLED, to_grade=False, reason="the overall limit ended the rollout")
    if harness.error:
        return Decision(outcome=Outcome.NO_ARTIFACT, to_grade=False, reason=f"no harness ran: {harness.error}")
    if not workspace_kept:
        return Decision(outcome=Outcome.NO_ARTIFACT, to_grade=False, reason="the workspace is gone")
    if num_calls == 0:
        ended = "was killed at its time limit" if harness.timed_out else f"ended with {_exit(harness)}"
        tail = harness.log_tail.strip()[-300:]
        reason = f"the harness {ended} without a model call" + (f"; its output ends with: {tail}" if tail else "")
        return Decision(outcome=Outcome.NO_ARTIFACT, to_grade=False, reason=reason)
    if harness.timed_out:
        named = f" ({time_limit})" if time_limit else ""
        reason = f"the harness reached its time limit{named} after {harness.duration_s:.1f} s"
        return Decision(outcome=Outcome.TIME_LIMIT, to_grade=True, reason=reason)
    if harness.exit_code != 0:
        return Decision(
            outcome=Outcome.HARNESS_FAILED, to_grade=True, reason=f"the harness ended with {_exit(harness)}"
        )
    return Decision(outcome=Outcome.FINISHED, to_grade=True, reason="the harness finished")


def ungraded(decision: Decision, grading: GradingConfig) -> Grade:
    """The grade of a rollout that no verifier sees: excluded, or the published 0 for one without an artifact."""
    if decision.outcome is Outcome.NO_ARTIFACT and grading.no_artifact == "zero":
        return Grade(
            outcome=decision.outcome,
            reward=0.0,
            reason=f'{decision.reason}; counted as 0 (grading.no_artifact = "zero")',
        )
    return Grade(outcome=decision.outcome, reward=None, reason=decision.reason)


def _exit(harness: HarnessResult) -> str:
    return "a signal" if harness.exit_code is None else f"exit code {harness.exit_code}"
