"""Each architecture of the Megatron back end against transformers' implementation of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gyre_core.config.models import TrainConfig
from gyre_core.errors import ConfigError
from gyre_core.train.megatron.architecture import check_tensor_parallel, read_hf_config
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.hf import to_hf
from gyre_core.train.packing import pack_branches
from gyre_core.train.parity import packed_vs_branch_parity
from tests.support.models import write_model
from tests.support.training import random_branches

MODELS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama-no-gqa-tied": ("llama", {"num_key_value_heads": 4, "head_dim": 12, "tie_word_embeddings": True}),
    "llama3-rope": ("llama3", {}),
    "moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "moe-unnormalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "moe-some-layers-dense": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "moe-every-second-layer": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Model name -> (folder, transformers' model), each written once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            kind, changes = MODELS[name]
            made[name] = (folder, write_model(folder, kind, **changes))
        return made[name]

    return get


@pytest.fixture
def open_trainer():
    made = []

    def build(folder: Path, **config) -> MegatronTrainer:
        trainer = MegatronTrainer(folder, TrainConfig(threads=1, **config))
        made.append(trainer)
        return trainer

    yield build
    for trainer in made:
        trainer.close()


def transformers_logprobs(model, ids: np.ndarray) -> np.ndarray:
    tokens = torch.tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_model_logprobs_equal_transformers(name, written, open_trainer) -> None:
    folder, model = written(name)
    trainer = open_trainer(folder)
    branches = random_branches(3, prefix=40, tail=60)
    for branch, logprobs in zip(branches, trainer.logprobs(branches), strict=True):
        expected = transformers_logprobs(model, branch.token_ids)
        assert np.abs(logprobs[1:] - expected).max() < 1e-4
    assert np.abs(expected - expected.mean()).max() > 1  # the model says something


@pytest.mark.parametrize("name", MODELS)
def test_model_gradient_equals_transformers(name, written, open_trainer) -> None:
    # Plain policy gradient with weight x advantage 1 on one sequence: the gradient of minus the sum of log-probs.
    folder, model = written(name)
    trainer = open_trainer(folder, loss="policy_gradient")
    branch = random_branches(3)[0]
    (packed,) = pack_branches([branch], 10_000)
    trainer.micro_step(packed)
    ours = dict(to_hf(trainer.gradients().items(), trainer.hf_model))
    tokens = torch.tensor(branch.token_ids, dtype=torch.int64)
    model.zero_grad()
    logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])[:, 0]
    weight = torch.from_numpy(np.where(branch.target, branch.weights, 0))[1:]
    (-(weight * branch.advantage * logprobs).sum()).backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    compared = 0
    for name_, gradient in ours.items():
        if name_ in theirs:
            compared += 1
            scale = theirs[name_].norm().item()
            assert (gradient - theirs[name_]).norm().item() <= 1e-4 * max(scale, 1e-3), name_
    assert compared >= len(theirs) - 2 * model.config.num_hidden_layers  # experts are one tensor there, many here


@pytest.mark.parametrize("name", MODELS)
def test_model_round_trip_is_bit_exact(name, written, open_trainer, tmp_path) -> None:
    folder, _ = written(name)
    trainer = open_trainer(folder)
    original = load_file(folder / "model.safetensors")
    exported = dict(trainer.export_hf())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in original.items())
    trainer.save_hf(tmp_path / "out")
    again = MegatronTrainer(tmp_path / "out", TrainConfig(threads=1))
    assert again.weights_digest() == trainer.weights_digest()
    again.close()


@pytest.mark.parametrize("name", ["llama3-rope", "moe"])
def test_model_packed_equals_branch_by_branch(name, written, open_trainer) -> None:
    trainer = open_trainer(written(name)[0])
    report = packed_vs_branch_parity(trainer, random_branches(1, rollouts=3, branches=3))
    assert report["packed_tokens"] < 0.8 * report["branch_tokens"]
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5


def test_model_llama3_rope_changes_long_positions(written, open_trainer) -> None:
    # Negative control: without the scaling the same weights say something else beyond the original context.
    folder, model = written("llama3-rope")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "model.safetensors").unlink(missing_ok=True)
    (plain / "model.safetensors").symlink_to(folder / "model.safetensors")
    branch = random_branches(3, prefix=80, tail=80)[0]
    apart = open_trainer(plain).logprobs([branch])[0][1:] - transformers_logprobs(model, branch.token_ids)
    assert np.abs(apart).max() > 1e-2


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_model_recompute_changes_no_gradient(name, written, open_trainer) -> None:
    (packed,) = pack_branches(random_branches(0), 10_000)
    gradients = []
    for recompute in (False, True):
        trainer = open_trainer(written(name)[0], recompute=recompute, loss="policy_gradient")
        trainer.micro_step(packed)
        gradients.append(trainer.gradients())
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


# -- bf16 --------------------------------------------------------------------------------------------------------------


def test_bfloat16_is_near_float32_and_accumulates_in_float32(written, open_trainer) -> None:
    folder, _ = written("qwen3")
    branches = random_branches(0)
    exact = open_trainer(folder, loss="policy_gradient")
    rounded = open_trainer(folder, loss="policy_gradient", dtype="bfloat16")
    parameters = dict(rounded.model.named_parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    apart = np.concatenate([a - b for a, b in zip(exact.logprobs(branches), rounded.logprobs(branches), strict=True)])
    assert 1e-4 < np.abs(apart).mean() < 0.15
    (packed,) = pack_branches(branches, 10_000)
    for trainer in (exact, rounded):
        trainer.micro_step(packed)
    theirs = rounded.gradients()
    assert all(gradient.dtype == torch.float32 for gradient in theirs.values())
    first = torch.cat([gradient.flatten() for gradient in exact.gradients().values()])
    second = torch.cat([gradient.flatten() for gradient in theirs.values()])
    assert torch.nn.functional.cosine_similarity(first, second, dim=0) > 0.98


def test_bfloat16_master_weights_keep_steps_that_bfloat16_cannot_hold(written, open_trainer) -> None:
    # A step of 1e-5 is below half a unit in the last place of most weights: without fp32 masters nothing would move.
    folder, _ = written("qwen3")
    trainer = open_trainer(folder, loss="policy_gradient", dtype="bfloat16", learning_rate=1e-5)
    before = trainer.weights_digest()
    masters = [tensor.clone() for tensor in trainer.master_weights()]
    (packed,) = pack_branches(random_branches(0), 10_000)
    for _ in range(40):
        trainer.micro_step(packed)
        trainer.optimizer_step(6)
    assert all(master.dtype == torch.float32 for master in trainer.master_weights())
    moved = max(float((a - b).abs().max()) for a, b in zip(masters, trainer.master_weights(), strict=True))
    assert 1e-4 < moved < 1e-3
    assert trainer.weights_digest() != before  # and in the end the sum of them shows in bf16 too


def test_bfloat16_checkpoint_restores_masters_bit_for_bit(written, open_trainer, tmp_path) -> None:
    folder, _ = written("qwen3")
    trainer = open_trainer(folder, loss="policy_gradient", dtype="bfloat16", learning_rate=1e-4)
    (packed,) = pack_branches(random_branches(0), 10_000)
    trainer.micro_step(packed)
    trainer.optimizer_step(6)
    trainer.save_checkpoint(tmp_path / "one", {})
    masters = [tensor.clone() for tensor in trainer.master_weights()]
    trainer.micro_step(packed)
    trainer.optimizer_step(6)
    after_two = trainer.weights_digest()
    trainer.load_checkpoint(tmp_path / "one")
    assert all(torch.equal(a, b) for a, b in zip(masters, trainer.master_weights(), strict=True))
    trainer.micro_step(packed)
    trainer.optimizer_step(6)
    assert trainer.weights_digest() == after_two


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"model_type": "mistral"}, "model_type 'mistral'; the Megatron back end trains 'qwen3', 'qwen3_moe'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type 'yarn' \(default and llama3"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type 'linear'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"kv_lora_rank": 512}, "multi-head latent attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, r"layer_types \['sliding_attention'\]"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("moe", {"n_shared_experts": 1}, "shared experts"),
        ("moe", {"moe_intermediate_size": None, "num_experts": None}, "lacks 'num_local_experts'"),
    ],
)
def test_model_unsupported_feature_is_refused_by_name(name, change, message, written, tmp_path) -> None:
    config = json.loads((written(name)[0] / "config.json").read_text())
    config.update(change)
    if change.get("num_experts", 1) is None:
        config.pop("num_local_experts", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_hf_config(tmp_path)


def test_model_checkpoint_of_another_kind_is_refused(written, open_trainer, tmp_path) -> None:
    # A Qwen3's weights under a Llama's config: the norms of queries and keys would be dropped silently.
    config = json.loads((written("llama")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(written("qwen3")[0] / "model.safetensors")
    with pytest.raises(ConfigError, match="tensors that a llama model of its config does not"):
        open_trainer(tmp_path)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("qwen3", 3, r"does not divide the model's vocab_size \(64\)"),
        ("qwen3", 4, r"does not divide the model's num_key_value_heads \(2\)"),
        ("moe", 2, "mixture-of-experts models train with 1"),
    ],
)
def test_tensor_parallel_that_does_not_divide_is_refused(name, ranks, message, written) -> None:
    model = read_hf_config(written(name)[0])
    check_tensor_parallel(model, 1)
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(model, ranks)
