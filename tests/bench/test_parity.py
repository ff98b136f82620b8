"""gyre bench parity --synthetic in one process: numbers within the bound, broken packings out of it."""

from gyre_core.bench.parity import BOUND, synthetic_parity


def test_synthetic_parity_is_within_the_bound_and_catches_broken_packings() -> None:
    report = synthetic_parity(seeds=(0, 1), tensor_parallel=(1,))
    assert [(row["seed"], row["tensor_parallel"]) for row in report["per_seed"]] == [(0, 1), (1, 1)]
    assert 0 < report["max_rel_grad_err"] <= BOUND
    assert report["max_rel_logprob_err"] <= BOUND
    assert report["within_bound"] is True
    assert report["per_seed"][0]["packed_tokens"] * 2 == report["per_seed"][0]["branch_tokens"]
    assert report["controls"].keys() == {"wrong_mask", "wrong_positions"}
    for control in report["controls"].values():
        assert control["caught"] is True
        assert control["max_rel_grad_err"] > 0.1
        assert control["max_abs_logprob_err"] > 0.01
