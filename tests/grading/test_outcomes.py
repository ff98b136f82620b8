import pytest

from gyre_core.config.models import GradingConfig
from gyre_core.grading.outcomes import Decision, classify, ungraded
from gyre_core.types import GRADED_OUTCOMES, HarnessResult, Outcome
from tests.support.problems import harness_result


@pytest.mark.parametrize(
    ("harness", "num_calls", "kept", "outcome"),
    [
        (harness_result(), 3, True, Outcome.FINISHED),
        (harness_result(exit_code=1), 3, True, Outcome.HARNESS_FAILED),
        (harness_result(exit_code=None), 3, True, Outcome.HARNESS_FAILED),
        (harness_result(exit_code=None, timed_out=True), 3, True, Outcome.TIME_LIMIT),
        (harness_result(), 0, True, Outcome.NO_ARTIFACT),
        (harness_result(exit_code=None, timed_out=True), 0, True, Outcome.NO_ARTIFACT),
        (harness_result(exit_code=1), 0, True, Outcome.NO_ARTIFACT),
        (harness_result(), 3, False, Outcome.NO_ARTIFACT),
        (harness_result(exit_code=None, error="no image"), 0, True, Outcome.NO_ARTIFACT),
    ],
)
def test_classify_follows_the_table(harness: HarnessResult, num_calls: int, kept: bool, outcome: Outcome):
    decision = classify(harness, num_calls=num_calls, workspace_kept=kept)
    assert decision.outcome is outcome
    assert decision.to_grade == (outcome in GRADED_OUTCOMES)
    assert decision.reason


def test_classify_overall_limit_wins_over_everything():
    decision = classify(harness_result(error="x"), num_calls=0, workspace_kept=False, overall_expired=True)
    assert (decision.outcome, decision.to_grade) == (Outcome.CANCELLED, False)


def test_classify_no_call_says_how_the_harness_ended():
    reason = classify(harness_result(exit_code=2, log_tail="no network\n"), num_calls=0, workspace_kept=True).reason
    assert reason == "the harness ended with exit code 2 without a model call; its output ends with: no network"


@pytest.mark.parametrize(
    ("outcome", "no_artifact", "reward"),
    [
        (Outcome.NO_ARTIFACT, "exclude", None),
        (Outcome.NO_ARTIFACT, "zero", 0.0),
        (Outcome.CANCELLED, "zero", None),
    ],
)
def test_ungraded_reward_follows_the_setting(outcome: Outcome, no_artifact, reward: float | None):
    decision = Decision(outcome=outcome, to_grade=False, reason="why")
    grade = ungraded(decision, GradingConfig(no_artifact=no_artifact))
    assert (grade.outcome, grade.reward, grade.included) == (outcome, reward, reward is not None)
    assert grade.reason.startswith("why")
