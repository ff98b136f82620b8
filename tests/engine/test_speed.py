"""Speed of engines from their calls: what is measured, and what cannot be told."""

import numpy as np
import pytest

from gyre_core.engine.speed import NO_SUMS, SpeedMeter, add_call, add_sums, fit_speed

A, B = "http://a", "http://b"


def sums_of(calls: list[tuple[int, float]], *, start_s: float, token_s: float, load_s: float) -> tuple[float, ...]:
    sums = NO_SUMS
    for tokens, at_once in calls:
        seconds = start_s + tokens * (token_s + load_s * at_once)
        sums = add_call(sums, tokens=tokens, seconds=seconds, at_once=at_once)
    return sums


def draws(number: int, seed: int) -> list[tuple[int, float]]:
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(20, 2000)), float(rng.uniform(1, 12))) for _ in range(number)]


def test_fit_speed_of_exact_calls_finds_what_made_them() -> None:
    speed = fit_speed(sums_of(draws(200, 0), start_s=0.3, token_s=0.02, load_s=0.004))
    assert speed is not None
    assert (speed.start_s, speed.token_s, speed.load_s) == pytest.approx((0.3, 0.02, 0.004), rel=1e-6)


def test_fit_speed_of_one_level_of_load_says_nothing_of_the_load() -> None:
    calls = [(tokens, 6.0) for tokens, _ in draws(50, 1)]
    speed = fit_speed(sums_of(calls, start_s=0.0, token_s=0.02, load_s=0.004))
    assert speed is not None
    assert speed.load_s == 0.0
    assert speed.token_s == pytest.approx(0.02 + 6 * 0.004)


def test_fit_speed_of_few_calls_is_unknown() -> None:
    calls = draws(9, 2)
    assert fit_speed(sums_of(calls[:7], start_s=0.0, token_s=0.02, load_s=0.004)) is None
    assert fit_speed(NO_SUMS) is None
    assert fit_speed(sums_of(calls, start_s=0.0, token_s=0.02, load_s=0.004)) is not None


def test_fit_speed_never_has_negative_parts() -> None:
    sums = NO_SUMS
    for tokens, at_once in draws(100, 3):  # faster with more calls at once, which no engine is
        sums = add_call(sums, tokens=tokens, seconds=tokens * (0.05 - 0.002 * at_once), at_once=at_once)
    speed = fit_speed(sums)
    assert speed is not None
    assert speed.load_s == 0.0
    assert 0.026 < speed.token_s < 0.048


def test_fit_speed_follows_what_has_changed() -> None:
    sums = sums_of(draws(500, 4), start_s=0.0, token_s=0.02, load_s=0.001)
    for tokens, at_once in draws(3000, 5):
        sums = add_call(sums, tokens=tokens, seconds=tokens * (0.06 + 0.002 * at_once), at_once=at_once)
    speed = fit_speed(sums)
    assert speed is not None
    assert (speed.token_s, speed.load_s) == pytest.approx((0.06, 0.002), rel=0.02)


def test_fit_speed_of_two_processes_that_each_see_half_the_calls() -> None:
    halves = [
        sums_of([(tokens, at_once / 2) for tokens, at_once in draws(200, seed)], start_s=0, token_s=0.02, load_s=0.008)
        for seed in (6, 7)
    ]  # a call beside n others, of which each process knows n / 2, slows by 0.004 for each of the n
    speed = fit_speed(add_sums(*halves), processes=2)
    assert speed is not None
    assert (speed.token_s, speed.load_s) == pytest.approx((0.02, 0.004), rel=1e-6)


def test_meter_calls_at_once_are_the_mean_over_the_calls_own_time() -> None:
    meter = SpeedMeter()
    meter.begin(1, A, 0.0)
    meter.begin(2, A, 6.0)
    meter.begin(3, B, 6.0)
    meter.end(2, A, 8.0, tokens=10)
    meter.end(1, A, 10.0, tokens=50)
    meter.end(3, B, 11.0, tokens=0)  # nothing came: it says nothing
    first = add_call(NO_SUMS, tokens=10, seconds=2.0, at_once=2.0)
    assert meter.sums == pytest.approx(add_call(first, tokens=50, seconds=10.0, at_once=(6 + 2 * 2 + 2) / 10))
