"""Totals over micro-steps."""

from gyre_core.train.stats import combine_stats


def test_combine_sums_counts_keeps_extremes_weighs_means() -> None:
    first = {"num_targets": 30, "num_units": 2, "loss": 1.0, "ratio_min": 0.9, "ratio_max": 1.1, "ratio_mean": 1.0}
    second = {"num_targets": 10, "num_units": 6, "loss": 2.0, "ratio_min": 0.8, "ratio_max": 1.05, "ratio_mean": 0.9}
    first["sampler_trainer_mean_abs"], second["sampler_trainer_mean_abs"] = 0.2, 0.4
    total = combine_stats([first, second])
    assert total["num_targets"] == 40
    assert total["loss"] == 3.0
    assert (total["ratio_min"], total["ratio_max"]) == (0.8, 1.1)
    assert abs(total["ratio_mean"] - (2 * 1.0 + 6 * 0.9) / 8) < 1e-12
    assert abs(total["sampler_trainer_mean_abs"] - (30 * 0.2 + 10 * 0.4) / 40) < 1e-12


def test_combine_nothing_is_empty() -> None:
    assert combine_stats([]) == {}
