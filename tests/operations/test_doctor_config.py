"""`gyre doctor --config`: arithmetic checked by hand, presets, and what cannot run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_core.cli.main import app
from gyre_core.config import load_run_config
from gyre_core.doctor_config import config_checks
from gyre_core.errors import ConfigError
from gyre_core.sizing import (
    GIB,
    Layout,
    Shape,
    kv_bytes_per_token,
    layout_problems,
    read_cluster,
    read_shape,
    serving_memory,
    training_memory,
)

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "examples" / "presets"
NAMES = ("moe-122b-24-nodes", "moe-122b-32-nodes", "moe-2400b-192-nodes")
# 2 layers of hidden size 8, 4 heads of width 2, 2 key-value heads, feed-forward 16, 10 words.
DENSE = Shape(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=16, vocabulary=10, tied=False)
# The same with 4 experts of width 6, of which a token takes 2.
MIXED = Shape(
    hidden=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=16,
    vocabulary=10,
    tied=True,
    experts=4,
    experts_per_token=2,
    expert_ffn=6,
)


def test_parameters_of_a_dense_and_a_mixed_shape() -> None:
    # A layer: q and o 2*8*8, k and v 2*8*4, feed-forward 3*8*16 = 128 + 64 + 384 = 576; embeddings 2*10*8 = 160.
    assert DENSE.parameters == DENSE.active_parameters == 2 * 576 + 160
    # A layer: attention 192, router 8*4 = 32, experts 4*3*8*6 = 576; tied embeddings 80.
    assert MIXED.expert_parameters == 2 * 576 and MIXED.other_parameters == 2 * (192 + 32) + 80
    assert MIXED.active_parameters == 2 * 224 + 80 + 576


def test_training_memory_splits_weights_and_optimizer() -> None:
    layout = Layout(tensor_parallel=2, data_parallel=2)
    memory = training_memory(DENSE, layout, dtype="bfloat16", tokens=100, recompute=True)
    assert memory.weights == 2 * 1312 / 2 and memory.gradients == 4 * 1312 / 2
    assert memory.optimizer == 12 * 1312 / 4  # over all four processes
    assert memory.activations == 2 * 8 * 100 * 2 + 17 * 2 * 8 * 100 / 2  # each layer's input, and one layer of 34/2
    assert memory.core - memory.satellite == memory.optimizer
    whole = training_memory(DENSE, layout, dtype="bfloat16", tokens=100, recompute=False)
    assert whole.activations == 17 * 2 * 8 * 100 * 2 / 2  # all layers' own, split in two


def test_experts_are_shared_over_their_own_ranks() -> None:
    layout = Layout(tensor_parallel=2, data_parallel=2, expert_parallel=4)
    memory = training_memory(MIXED, layout, dtype="float32", tokens=1, recompute=True)
    assert memory.weights == 4 * (1152 / 4 + 528 / 2)


def test_serving_memory_of_more_gpus_than_key_value_heads_holds_copies() -> None:
    assert kv_bytes_per_token(DENSE, dtype="bfloat16") == 2 * 2 * 2 * 2 * 2
    weights, kv = serving_memory(DENSE, Layout(engine_gpus=8), dtype="bfloat16", kv_tokens=1000)
    assert weights == 2 * 1312 / 8 and kv == 32 * 1000 / 2  # two heads: two ways at most


@pytest.mark.parametrize(
    ("layout", "telling"),
    [
        (Layout(tensor_parallel=3), "tensor_parallel 3 does not divide the 4 attention heads"),
        (Layout(pipeline_parallel=4), "pipeline_parallel 4 does not divide the 2 layers"),
        (Layout(tensor_parallel=4), "tensor_parallel 4 does not divide the vocabulary of 10"),
        (
            Layout(tensor_parallel=2, data_parallel=2, expert_parallel=3),
            "expert_parallel 3 does not divide the 4 experts",
        ),
        (Layout(expert_parallel=2), "expert_parallel 2 does not divide tensor_parallel x data_parallel (1)"),
    ],
)
def test_layout_that_does_not_divide_is_named(layout: Layout, telling: str) -> None:
    assert telling in layout_problems(MIXED, layout)


@pytest.mark.parametrize("name", NAMES)
def test_presets_fit_their_clusters_and_say_what_this_version_lacks(name: str) -> None:
    config = load_run_config(PRESETS / f"{name}.toml")
    checks = config_checks(config, read_cluster(PRESETS / f"{name}.cluster.toml"))
    assert [check.name for check in checks if check.ok == "missing"] == ["this version"]
    assert read_shape(config.model.path).parameters == pytest.approx(2.4e12 if "2400b" in name else 1.22e11, rel=0.02)


def test_preset_of_24_nodes_core_memory_as_in_the_docs() -> None:
    config = load_run_config(PRESETS / "moe-122b-24-nodes.toml")
    cluster = read_cluster(PRESETS / "moe-122b-24-nodes.cluster.toml")
    memory = training_memory(
        read_shape(config.model.path), cluster.layout, dtype="bfloat16", tokens=131072, recompute=True
    )
    assert memory.core / GIB == pytest.approx(119.6, abs=0.1)


def test_smaller_gpus_are_refused_with_what_to_change(tmp_path: Path) -> None:
    text = (PRESETS / "moe-122b-24-nodes.cluster.toml").read_text()
    (tmp_path / "c.toml").write_text(text.replace("gpu_memory_gib = 141", "gpu_memory_gib = 80"))
    config = load_run_config(PRESETS / "moe-122b-24-nodes.toml")
    found = {check.name: check for check in config_checks(config, read_cluster(tmp_path / "c.toml"))}
    assert found["training memory"].ok == "missing" and "does not fit" in found["training memory"].detail
    assert found["serving memory"].ok == "missing" and "max_total_tokens may be" in found["serving memory"].detail


def test_cluster_file_with_an_unknown_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[machines]\nnodez = 1\n")
    with pytest.raises(ConfigError, match="nodez"):
        read_cluster(tmp_path / "c.toml")


def test_doctor_command_checks_the_quickstart_and_slots_that_never_work() -> None:
    quickstart = str(ROOT / "examples" / "quickstart" / "run.toml")
    done = CliRunner().invoke(app, ["doctor", "--config", quickstart, "--set", "rollout.slots=60", "--json"])
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["layout"]["ok"] == "ok"
    assert checks["staleness"]["ok"] == "warn" and "12 slots never have work" in checks["staleness"]["detail"]
