from gyre_core.train.stats import combine_stats


def test_combine_stats_sums_counts_keeps_extremes_and_weights_means() -> None:
    rows = [
        {"loss": 1.0, "num_units": 1, "num_targets": 10, "ratio_min": 0.9, "ratio_mean": 1.0, "ratio_max": 1.1}
        | {"sampler_trainer_max_abs": 0.1, "sampler_trainer_mean_abs": 0.01},
        {"loss": -3.0, "num_units": 3, "num_targets": 30, "ratio_min": 0.8, "ratio_mean": 1.4, "ratio_max": 2.0}
        | {"sampler_trainer_max_abs": 0.05, "sampler_trainer_mean_abs": 0.05},
    ]
    assert combine_stats(rows) == {
        "loss": -2.0,
        "num_units": 4,
        "num_targets": 40,
        "ratio_min": 0.8,
        "ratio_mean": (1.0 + 3 * 1.4) / 4,
        "ratio_max": 2.0,
        "sampler_trainer_max_abs": 0.1,
        "sampler_trainer_mean_abs": (10 * 0.01 + 30 * 0.05) / 40,
    }
    assert combine_stats([]) == {}
