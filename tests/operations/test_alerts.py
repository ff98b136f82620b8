"""When a run warns, with numbers worked by hand."""

import pytest

from gyre_core.alerts import heldout_warning, outcomes_warning


@pytest.mark.parametrize(
    ("rewards", "num_rewards", "warns"),
    [
        ([0.4], 50, False),  # nothing before it
        ([0.4, 0.5, 0.45], 50, False),  # 50 rewards: 2 * 0.5 * sqrt(2 / 50) = 0.2 may be chance
        ([0.4, 0.6, 0.39], 50, True),  # 0.21 below the best
        ([0.6, 0.4, 0.5], 50, False),  # 0.1 below it
        ([0.500, 0.475], 1_000_000, True),  # 0.0014 may be chance; 0.02 is the least that counts
        ([0.500, 0.485], 1_000_000, False),
    ],
)
def test_heldout_warning_only_beyond_what_chance_explains(rewards: list[float], num_rewards: int, warns: bool) -> None:
    assert (heldout_warning(rewards, num_rewards) is not None) is warns


def test_outcomes_warning_names_counts_and_a_reason() -> None:
    outcomes = {"finished": 5, "time_limit": 1, "no_artifact": 1, "verifier_failed": 1}
    message = outcomes_warning(outcomes, {"b": "no reward file", "a": "no call was made"})
    assert message == ("2 of 8 rollouts could not be counted (1 no_artifact, 1 verifier_failed); a: no call was made")


@pytest.mark.parametrize("outcomes", [{"finished": 7, "no_artifact": 1}, {"cancelled": 1, "finished": 1}, {}])
def test_outcomes_warning_below_a_quarter_or_with_few_rollouts_is_none(outcomes: dict[str, int]) -> None:
    assert outcomes_warning(outcomes, {}) is None
