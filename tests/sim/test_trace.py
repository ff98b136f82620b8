"""Worlds from stored runs: the fit of the engine's speed to measured calls."""

import pytest

from gyre_core.sim.trace import Call, fit_engine


def call(start_s: float, end_s: float, tokens: int) -> Call:
    return Call(start_s=start_s, end_s=end_s, prompt_tokens=10, output_tokens=tokens)


def test_engine_fit_finds_the_time_of_a_token_and_of_its_neighbours() -> None:
    # Alone 10 tokens take 1 + 10 * (0.1 + 0.05) s; beside one other the load is 2.
    alone = [call(100.0 * n, 100.0 * n + 1 + tokens * 0.15, tokens) for n, tokens in enumerate((10, 20, 40))]
    pair = [call(1_000.0 + 100 * n, 1_000.0 + 100 * n + 1 + 20 * 0.2, 20) for n in (0, 1) for _ in range(2)]
    constant_s, alpha_s, beta_s = fit_engine([*alone, *pair])
    assert (constant_s, alpha_s, beta_s) == pytest.approx((1.0, 0.1, 0.05))


def test_engine_fit_without_load_leaves_the_load_out() -> None:
    constant_s, alpha_s, beta_s = fit_engine([call(0.0, 2.0, 10), call(10.0, 14.0, 20)])
    assert (alpha_s + beta_s, constant_s) == pytest.approx((0.2, 0.0), abs=1e-9)
