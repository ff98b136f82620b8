"""Where a step's time went: phases add up, and what was not measured is not made up."""

import pytest

from gyre_core.train.accounting import PHASES, flops_per_s, phase_seconds, phase_shares


def test_phase_seconds_add_up_to_the_step_and_waiting_is_the_rest() -> None:
    seconds = phase_seconds({"packing_s": 0.5, "forward_backward_s": 4.0, "optimizer_s": -1e-9}, step_s=10.0)
    assert list(seconds) == [f"{phase}_s" for phase in PHASES]
    assert seconds["waiting_s"] == pytest.approx(5.5)
    assert seconds["optimizer_s"] == 0.0
    assert sum(seconds.values()) == pytest.approx(10.0)
    unmeasured = {"gradients": 0.0, "optimizer": 0.0, "checkpoint": 0.0, "publication": 0.0}
    expected = {"waiting": 0.55, "packing": 0.05, "forward_backward": 0.4, **unmeasured}
    assert phase_shares(seconds) == pytest.approx(expected)


def test_phase_shares_of_an_older_record_are_none() -> None:
    assert phase_shares({"train_s": 3.0, "checkpoint_s": 0.1}) is None


def test_flops_per_s_is_of_forward_and_backward_alone() -> None:
    assert flops_per_s({"flops": 8e9, "forward_backward_s": 4.0, "train_s": 100.0}) == 2e9
    assert flops_per_s({}) == 0.0
