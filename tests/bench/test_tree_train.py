"""`gyre bench tree-train`: its forests to a token, its formula by hand, and a small run of the command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from gyre_core.bench import tree_train
from gyre_core.bench.tree_train import (
    TreeTrainSize,
    bench_tree_train,
    synthetic_forest,
    tree_train_lines,
    write_random_qwen3,
)
from gyre_core.cli.main import app
from gyre_core.train.flops import ModelCost, model_cost
from gyre_core.train.packing import pack_branches
from tests.support.training import make_branch

TINY = TreeTrainSize(layers=1, hidden=64, heads=2, vocab=64, branch_tokens=96, trees=2, budget_tokens=512, rounds=1)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5, 0.2])
@pytest.mark.parametrize("seed", [0, 1])
def test_synthetic_forest_has_the_asked_ratio_to_a_token(ratio: float, seed: int) -> None:
    branches = synthetic_forest(ratio, TINY, seed=seed)
    (packed,) = pack_branches(branches, 10_000)
    assert packed.num_branch_tokens == 2 * 8 * 96
    assert abs(packed.num_tokens - ratio * packed.num_branch_tokens) <= 2  # rounding, once a tree
    assert len(np.unique(packed.rows.child)) == packed.rows.num_rows  # each token is a target once


def test_synthetic_forest_ratio_that_eight_branches_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio 0\.1: 8 branches have ratios above 0\.125"):
        synthetic_forest(0.1, TINY, seed=0)


def test_model_cost_flops_of_a_fork_by_hand() -> None:
    cost = ModelCost(layer_parameters=100, num_layers=2, attention_width=8, hidden_size=4, vocab_size=10)
    branches = [make_branch([1, 2, 3], [1, 2], branch=0), make_branch([1, 2, 4, 5], [2], branch=1)]
    (packed,) = pack_branches(branches, 100)  # 1 2 3 / 4 5: depths 0 1 2 2 3, both rows behind 2 share a projection
    flops = cost.flops(packed)
    assert flops.linear == 6 * 100 * 5
    assert flops.attention == 12 * 2 * 8 * (1 + 2 + 3 + 3 + 4)
    assert flops.head == 6 * 4 * 10 * 2
    assert flops.total == flops.linear + flops.attention + flops.head


def test_model_cost_counts_the_matrices_of_the_model(tmp_path) -> None:
    from safetensors.torch import load_file

    from gyre_core.train.megatron.backend import MegatronTrainer, TrainConfig

    write_random_qwen3(tmp_path, TINY, seed=0)
    tensors = load_file(tmp_path / "model.safetensors")
    trainer = MegatronTrainer(tmp_path, TrainConfig(threads=1))
    cost = model_cost(trainer.hf_model)
    trainer.close()
    assert cost.layer_parameters == sum(t.numel() for name, t in tensors.items() if ".layers." in name and t.dim() == 2)
    assert (cost.num_layers, cost.attention_width, cost.hidden_size, cost.vocab_size) == (1, 128, 64, 64)


def test_bench_tree_train_agrees_on_gradients_and_reports_every_key() -> None:
    lines: list[str] = []
    result = bench_tree_train(TINY, ratios=(0.5,), report=lines.append)
    row = result["per_ratio"]["0.5"]
    assert result["max_rel_grad_err"] == row["max_rel_grad_err"] < 1e-5
    assert row["tokens"] == {"packed": 768, "per_branch": 1536}
    assert row["micro_steps"] == {"packed": 2, "per_branch": 4}  # per branch: five branches of 96 fit 512
    assert row["bound"] == 2.0
    assert row["flops_bound"] < row["bound"]
    assert row["fraction_of_bound"] == pytest.approx(row["speedup"] / 2, abs=1e-3)
    assert sum(row["flops_share"].values()) == pytest.approx(1, abs=1e-3)
    assert result["fraction_of_bound"] == row["fraction_of_bound"]
    assert result["peak_memory_mb"].keys() == {"packed", "per_branch"}
    assert any("0.5" in line for line in tree_train_lines(result))
    assert lines[0].startswith("ratio 0.5")


def test_tree_train_command_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_train, "QUICK", TINY)
    done = CliRunner().invoke(app, ["bench", "tree-train", "--quick", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["per_ratio"]) == {"0.9", "0.5", "0.2"}
    assert result["max_rel_grad_err"] < 1e-5
