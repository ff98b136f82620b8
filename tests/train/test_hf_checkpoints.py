"""Hugging Face checkpoints in and out, against transformers."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gyre_core.errors import ConfigError
from tests.support.trainers import WIDE_CLIP, hf_logprobs, on_policy, train
from tests.support.training import random_branches


@pytest.mark.parametrize("which", ["tiny", "tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_random_qwen3_equal_transformers(which, temperature, request, make_trainer) -> None:
    folder, model = request.getfixturevalue(which)
    trainer = make_trainer(folder)
    branches = random_branches(5, vocab=50, temperature=temperature)
    for branch, logprobs in zip(branches, trainer.logprobs(branches), strict=True):
        assert logprobs.dtype == np.float32
        assert logprobs[0] == 0
        expected = hf_logprobs(model, branch.token_ids, temperature)
        assert np.abs(logprobs[1:] - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("which", ["tiny", "tied"])
def test_export_hf_untrained_equals_the_checkpoint_bit_for_bit(which, request, make_trainer, tmp_path) -> None:
    folder, _ = request.getfixturevalue(which)
    trainer = make_trainer(folder)
    original = load_file(folder / "model.safetensors")
    exported = dict(trainer.export_hf())
    assert exported.keys() == original.keys()
    assert ("lm_head.weight" in exported) == (which == "tiny")
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name
    trainer.save_hf(tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
    assert (tmp_path / "out" / "config.json").read_text() == (folder / "config.json").read_text()


def test_export_hf_after_training_gives_transformers_the_trainers_model(tiny, make_trainer, tmp_path) -> None:
    from transformers import Qwen3ForCausalLM

    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    branches = on_policy(trainer, random_branches(2))
    train(trainer, branches, 2)
    trainer.save_hf(tmp_path / "out")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "out").float()
    expected = hf_logprobs(loaded, branches[0].token_ids)
    assert np.abs(trainer.logprobs(branches[:1])[0][1:] - expected).max() < 2e-5
    assert np.abs(hf_logprobs(tiny[1], branches[0].token_ids) - expected).max() > 1e-2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ('"model_type": "qwen3"->"model_type": "gpt2"', "model_type 'gpt2'"),
        ('"rope_type": "default"->"rope_type": "yarn"', "rope_type 'yarn'"),
        ('"use_sliding_window": false->"use_sliding_window": true', "use_sliding_window"),
        ('"intermediate_size": 80,->', "lacks 'intermediate_size'"),
        ('"num_hidden_layers": 2->"num_hidden_layers": 3', "lacks the tensor model.layers.2"),
        ('"num_hidden_layers": 2->"num_hidden_layers": 1', "tensors that a qwen3 model of its config does not"),
    ],
)
def test_trainer_unsupported_checkpoint_is_a_config_error(edit, message, tiny, make_trainer, tmp_path) -> None:
    before, after = edit.split("->")
    text = (tiny[0] / "config.json").read_text()
    assert before in text
    (tmp_path / "config.json").write_text(text.replace(before, after))
    (tmp_path / "model.safetensors").symlink_to(tiny[0] / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path)


def test_trainer_without_weights_is_a_config_error(tiny, make_trainer, tmp_path) -> None:
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        make_trainer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot read"):
        make_trainer(tmp_path)
