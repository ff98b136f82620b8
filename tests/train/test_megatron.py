"""The Megatron back end against transformers, itself without sharing, and numbers checked by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gyre_core.config.models import TrainConfig
from gyre_core.errors import ConfigError, TrainError
from gyre_core.train.megatron import model as model_module
from gyre_core.train.megatron.attention import SegmentAttention, flex_block_mask, segment_layout
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import PackedMicroStep, pack_branches
from gyre_core.train.parity import packed_vs_branch_parity, sampler_trainer_parity
from tests.support.training import make_branch, random_branches, write_tiny_qwen3

WIDE_CLIP = {"clip_low": 0.9, "clip_high": 9.0}


@pytest.fixture
def make_trainer(tiny):
    """Trainers on the tiny model, closed at the end of the test."""
    made = []

    def make(folder: Path = tiny[0], seed: int = 0, **config) -> MegatronTrainer:
        trainer = MegatronTrainer(folder, TrainConfig(threads=1, **config), seed)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def hf_logprobs(model, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    tokens = torch.tensor(ids, dtype=torch.int64)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()


def on_policy(trainer: MegatronTrainer, branches):
    """The branches with the trainer's own log-probs as the sampler's."""
    return [
        replace(branch, sampler_logprobs=np.where(branch.target, own, 0).astype(np.float32))
        for branch, own in zip(branches, trainer.logprobs(branches), strict=True)
    ]


def train(trainer: MegatronTrainer, branches, steps: int, budget: int = 10_000) -> None:
    packed = pack_branches(branches, budget)
    for _ in range(steps):
        for micro_step in packed:
            trainer.micro_step(micro_step)
        trainer.optimizer_step(len({branch.rollout_id for branch in branches}))


# -- Hugging Face ------------------------------------------------------------------------------------------------------


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
        ('"num_hidden_layers": 2->"num_hidden_layers": 1', "tensors that a Qwen3 model does not"),
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


# -- tree packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_packed_vs_branch_parity_random_tries_agree(seed, make_trainer) -> None:
    trainer = make_trainer(micro_step_tokens=[10_000, 120][seed % 2])
    report = packed_vs_branch_parity(trainer, random_branches(seed, num_groups=2, rollouts=3, branches=3))
    assert report["packed_tokens"] < 0.8 * report["branch_tokens"]
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5


def test_packed_vs_branch_parity_long_segments_and_deep_trees_agree(make_trainer) -> None:
    # Beyond the padded buckets: segments over 64 tokens, and a caterpillar whose every step forks.
    trainer = make_trainer()
    rng = np.random.default_rng(0)
    long = random_branches(7, num_groups=1, rollouts=3, branches=2, prefix=150, tail=140)
    spine = rng.integers(0, 64, 40).tolist()
    caterpillar = [
        make_branch([*spine[:at], (spine[at] + 1) % 64, 5], [at, at + 1], rollout_id=f"c{at}", group_id="c")
        for at in range(1, 40)
    ]
    report = packed_vs_branch_parity(trainer, long + caterpillar)
    assert report["max_rel_logprob_err"] <= 1e-5
    assert report["max_rel_grad_err"] <= 1e-5


def broken_positions(packed: PackedMicroStep) -> PackedMicroStep:
    return replace(packed, position=np.arange(packed.num_tokens))


def broken_ancestors(packed: PackedMicroStep) -> PackedMicroStep:
    """Every segment hangs where its elder sibling ends: siblings see each other."""
    above = packed.segment_parent.copy()
    for segment in range(1, len(above)):
        if above[segment] >= 0:
            above[segment] = segment - 1
    return replace(packed, segment_parent=above)


@pytest.mark.parametrize("breakage", [broken_positions, broken_ancestors])
def test_packed_vs_branch_parity_broken_packing_is_caught(breakage, make_trainer, monkeypatch) -> None:
    trainer = make_trainer()
    branches = random_branches(0)
    original = model_module.forest_of
    monkeypatch.setattr(
        "gyre_core.train.megatron.backend.forest_of",
        lambda packed, device: original(breakage(packed) if len(packed.branches) > 1 else packed, device),
    )
    report = packed_vs_branch_parity(trainer, branches)
    assert report["max_rel_logprob_err"] > 1e-2
    assert report["max_rel_grad_err"] > 1e-2


def test_segment_attention_random_forest_equals_a_dense_mask_and_flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    branches = random_branches(4, num_groups=2, rollouts=3, branches=3, prefix=70, tail=20)
    (packed,) = pack_branches(branches, 10_000)
    layout, num = segment_layout(packed), packed.num_tokens
    assert layout.causal and layout.padded and layout.across
    tensors = [torch.randn(num, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    out_grad = torch.randn(num, 4, 16)
    sees = torch.zeros(num, num, dtype=torch.bool)
    for token in range(num):
        sees[token, torch.from_numpy(packed.path(token))] = True
    results = []
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
    for out in (
        SegmentAttention.apply(*tensors, layout, 0.25),
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees, scale=0.25, enable_gqa=True
        )[0].transpose(0, 1),
    ):
        results.append([out.detach(), *torch.autograd.grad(out, tensors, out_grad)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5), (ours - theirs).abs().max()
    with torch.no_grad():  # FlexAttention has no backward pass on CPU
        mask = flex_block_mask(layout, torch.device("cpu"))
        inputs = [tensor.detach() for tensor in (query, key, value)]
        flex = flex_attention(*inputs, block_mask=mask, scale=0.25, enable_gqa=True)[0].transpose(0, 1)
    assert torch.allclose(results[0][0], flex, atol=2e-5)


def test_head_logprobs_in_chunks_and_mixed_temperatures_equal_log_softmax(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(model_module, "_CHUNK_LOGITS", 40)  # 4 heads of a vocabulary of 10
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(10, 6, requires_grad=True)
    temperature = torch.tensor([1.0, 0.5] * 5 + [2.0])
    head, token = torch.randint(0, 11, (30,)), torch.randint(0, 10, (30,))
    grad = torch.randn(30)
    ours = model_module.HeadLogProbs.apply(hidden, weight, temperature, head, token)
    plain = torch.log_softmax(hidden @ weight.t() / temperature[:, None], -1)[head, token]
    assert torch.allclose(ours, plain, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight), grad),
        torch.autograd.grad(plain, (hidden, weight), grad),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_micro_step_recompute_gives_the_same_gradients(make_trainer) -> None:
    branches = random_branches(0)
    grads = []
    for recompute in (False, True):
        trainer = make_trainer(recompute=recompute, **WIDE_CLIP)
        trainer.micro_step(pack_branches(branches, 10_000)[0])
        grads.append(trainer.gradients())
    assert all(torch.allclose(grads[0][name], grads[1][name], rtol=1e-5, atol=1e-7) for name in grads[0])


# -- loss and steps ----------------------------------------------------------------------------------------------------


def test_micro_step_gradient_equals_transformers_with_a_hand_written_loss(tiny, make_trainer) -> None:
    _, model = tiny
    trainer = make_trainer(**WIDE_CLIP)
    branches = random_branches(3, num_groups=2, rollouts=2, branches=2, temperature=0.7)
    trainer.micro_step(pack_branches(branches, 10_000)[0])
    ours = trainer.gradients()
    model.zero_grad()
    total = torch.zeros(())
    for branch in branches:
        ids = torch.tensor(branch.token_ids, dtype=torch.int64)
        at = torch.tensor(np.flatnonzero(branch.target))
        logits = model(ids[None]).logits[0] / 0.7
        logprobs = torch.log_softmax(logits[at - 1], -1).gather(-1, ids[at, None])[:, 0]
        ratio = torch.exp((logprobs - torch.tensor(branch.sampler_logprobs)[at]).mean())
        weight = torch.tensor(branch.weights)[at].sum()
        scaled = torch.minimum(ratio * branch.advantage, ratio.clamp(0.1, 10.0) * branch.advantage)
        total = total - weight * scaled
    total.backward()
    for name, parameter in (
        ("decoder.final_layernorm.weight", model.model.norm.weight),
        ("output_layer.weight", model.lm_head.weight),
        ("embedding.word_embeddings.weight", model.model.embed_tokens.weight),
        ("decoder.layers.0.mlp.linear_fc2.weight", model.model.layers[0].mlp.down_proj.weight),
    ):
        apart = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
        assert apart < 1e-4, name
    model.zero_grad()


def test_micro_step_split_and_order_give_the_same_gradient(make_trainer) -> None:
    branches = random_branches(6, num_groups=3)
    gradients = []
    trainer = make_trainer(**WIDE_CLIP)
    for budget, flip in ((10_000, False), (80, False), (80, True)):
        packed = pack_branches(branches, budget)
        for micro_step in packed[::-1] if flip else packed:
            trainer.micro_step(micro_step)
        assert trainer.accumulated_micro_steps == len(packed)
        gradients.append(trainer.gradients())
        trainer.reset_gradients()
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert (other[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_micro_step_stats_say_what_happened(make_trainer) -> None:
    trainer = make_trainer()
    branches = on_policy(trainer, random_branches(0))
    branches[0] = replace(branches[0], sampler_logprobs=np.where(branches[0].target, -9.0, 0).astype(np.float32))
    (packed,) = pack_branches(branches, 10_000)
    stats = trainer.micro_step(packed)
    assert stats.num_tokens < stats.num_branch_tokens == sum(len(branch.token_ids) for branch in branches)
    assert stats.num_targets == sum(int(branch.target.sum()) for branch in branches)
    assert stats.num_units == 12
    assert stats.weight_sum == pytest.approx(6)  # six whole rollouts
    assert stats.clipped_units == (1 if branches[0].advantage > 0 else 0)
    assert stats.ratio_max > 1.1
    assert stats.sampler_trainer_max_abs > 0.1
    # On-policy units contribute -(their weight) x advantage each, the clipped one its bound.
    first = branches[0]
    rest = -sum(float(branch.weights.sum()) * branch.advantage for branch in branches[1:])
    own = stats.ratio_max if first.advantage < 0 else 1.0004
    assert stats.loss == pytest.approx(rest - float(first.weights.sum()) * first.advantage * own, abs=1e-3)


def test_micro_step_burst_start_reference_is_on_policy_and_corrects_the_sampler(make_trainer) -> None:
    trainer = make_trainer(reference="burst_start")
    branches = [make_branch([1, 2, 3, 4], [2, 3], sampler=-30.0, advantage=2.0)]
    stats = trainer.micro_step(pack_branches(branches, 100)[0])
    assert stats.ratio_min == stats.ratio_max == 1.0
    assert stats.loss == pytest.approx(-2.0 * 2.0)  # weight 1, advantage 2, correction capped at 2
    reference = np.array([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 loss rows"):
        trainer.micro_step(pack_branches(branches, 100)[0], reference)


def test_optimizer_step_equals_torch_adamw_on_the_divided_clipped_gradient(tiny, make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-3, weight_decay=0.1, grad_clip=0.5, **WIDE_CLIP)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.micro_step(pack_branches(random_branches(1), 10_000)[0])
    gradients = {name: gradient / 6 for name, gradient in trainer.gradients().items()}
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values())).item()
    stats = trainer.optimizer_step(6)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5
    copies = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    for name, copy in copies.items():
        copy.grad = gradients[name] * (0.5 / norm)
    torch.optim.AdamW(
        [
            {"params": [copy for copy in copies.values() if copy.dim() > 1], "weight_decay": 0.1},
            {"params": [copy for copy in copies.values() if copy.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.98),
    ).step()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, copies[name], atol=2e-6), name
        assert not torch.equal(parameter, before[name])


def test_optimizer_step_learning_rate_zero_changes_no_bit(make_trainer) -> None:
    trainer = make_trainer(learning_rate=0.0, weight_decay=0.1, **WIDE_CLIP)
    before = trainer.weights_digest()
    train(trainer, random_branches(0), 2)
    assert trainer.step == 2
    assert trainer.weights_digest() == before


def test_optimizer_step_given_learning_rate_holds_for_that_step_alone(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    before = trainer.weights_digest()
    for packed in pack_branches(random_branches(0), 4096):
        trainer.micro_step(packed)
    stats = trainer.optimizer_step(4, learning_rate=0.0)
    assert (stats.learning_rate, trainer.weights_digest()) == (0.0, before)
    train(trainer, random_branches(0), 1)
    assert trainer.weights_digest() != before


def test_training_same_inputs_give_same_bits_and_other_seeds_do_not_matter(make_trainer) -> None:
    digests = set()
    for seed in (0, 1):
        trainer = make_trainer(seed=seed, learning_rate=1e-2, **WIDE_CLIP)
        train(trainer, random_branches(0), 2, budget=90)
        digests.add(trainer.weights_digest())
    assert len(digests) == 1  # nothing is drawn at random in a step


def test_micro_step_raises_the_probability_of_what_was_good(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    good = make_branch([1, 2, 3, 4, 5], [3, 4], rollout_id="good", advantage=1.0)
    bad = make_branch([1, 2, 3, 6, 7], [3, 4], rollout_id="bad", advantage=-1.0)
    before = trainer.logprobs([good, bad])
    train(trainer, on_policy(trainer, [good, bad]), 1)
    after = trainer.logprobs([good, bad])
    assert after[0][3:].sum() > before[0][3:].sum()
    assert after[1][3:].sum() < before[1][3:].sum()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_micro_step_non_finite_loss_is_refused_and_changes_nothing(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    good = random_branches(0)
    train(trainer, good, 1)
    before = trainer.weights_digest()
    trainer.micro_step(pack_branches(good, 10_000)[0])
    bad = [replace(b, sampler_logprobs=np.where(b.target, -1e4, 0).astype(np.float32), advantage=-1.0) for b in good]
    with pytest.raises(TrainError, match=r"micro-step refused: its loss is inf.*g0-r0.*dropped"):
        trainer.micro_step(pack_branches(bad, 10_000)[0])
    assert all(not gradient.any() for gradient in trainer.gradients().values())
    with pytest.raises(TrainError, match="no micro-step since the last one"):
        trainer.optimizer_step(6)
    assert trainer.weights_digest() == before
    assert trainer.step == 1
    train(trainer, good, 1)  # and it goes on as if nothing had been
    other = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(other, good, 2)
    assert trainer.weights_digest() == other.weights_digest()


def test_micro_step_non_finite_gradient_is_refused(make_trainer, monkeypatch) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    (packed,) = pack_branches(random_branches(0), 10_000)
    before = trainer.weights_digest()
    handle = trainer.model.decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainError, match="its gradient is not finite"):
        trainer.micro_step(packed)
    handle.remove()
    assert trainer.accumulated_micro_steps == 0
    assert trainer.weights_digest() == before


def test_optimizer_step_non_finite_gradient_is_refused(make_trainer) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    before = trainer.weights_digest()
    trainer.micro_step(pack_branches(random_branches(0), 10_000)[0])
    trainer._gradient_buffers()[0][3] = float("inf")  # what a broken transfer of another replica's would do
    with pytest.raises(TrainError, match="optimizer step 1 refused: the gradient is not finite"):
        trainer.optimizer_step(6)
    assert trainer.weights_digest() == before
    assert trainer.step == 0


def test_trainer_bad_arguments_are_refused(make_trainer) -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match="token id 64 is outside the vocabulary of 64"):
        trainer.micro_step(pack_branches([make_branch([1, 64], [1])], 10)[0])
    with pytest.raises(ValueError, match="at least one included rollout"):
        trainer.optimizer_step(0)
    trainer.micro_step(pack_branches([make_branch([1, 2], [1])], 10)[0])
    with pytest.raises(TrainError, match="between steps"):
        packed_vs_branch_parity(trainer, random_branches(0))
    trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.logprobs([])


# -- sampler parity ----------------------------------------------------------------------------------------------------


def test_sampler_trainer_parity_finds_the_worst_target(make_trainer) -> None:
    trainer = make_trainer()
    branches = on_policy(trainer, random_branches(0))
    report = sampler_trainer_parity(trainer, branches)
    assert report["sampler_trainer_max_abs"] < 1e-6
    assert report["tokens"] == sum(int(branch.target.sum()) for branch in branches)
    position = int(np.flatnonzero(branches[3].target)[1])
    moved = branches[3].sampler_logprobs.copy()
    moved[position] += 0.25
    branches[3] = replace(branches[3], sampler_logprobs=moved)
    report = sampler_trainer_parity(trainer, branches)
    assert report["sampler_trainer_max_abs"] == pytest.approx(0.25, abs=1e-6)
    assert report["sampler_trainer_mean_abs"] == pytest.approx(0.25 / report["tokens"], rel=1e-2)
    assert report["worst"]["rollout_id"] == branches[3].rollout_id
    assert report["worst"]["position"] == position
    assert sampler_trainer_parity(trainer, [])["tokens"] == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoint_resume_in_a_fresh_trainer_continues_bit_for_bit(make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, "weight_decay": 0.01, **WIDE_CLIP}
    branches = random_branches(0)
    straight = make_trainer(**config)
    train(straight, branches, 3, budget=90)
    straight.save_checkpoint(tmp_path / "step-3", {"frontier": ["a", 1]})
    after_three = straight.weights_digest()
    train(straight, branches, 2, budget=90)

    resumed = make_trainer(seed=7, **config)
    train(resumed, random_branches(9), 1)  # other weights, other AdamW state
    assert resumed.load_checkpoint(tmp_path / "step-3") == {"frontier": ["a", 1]}
    assert resumed.step == 3
    assert resumed.weights_digest() == after_three
    train(resumed, branches, 2, budget=90)
    assert resumed.weights_digest() == straight.weights_digest()
    # Negative control: the same weights without AdamW's state end elsewhere.
    straight.load_checkpoint(tmp_path / "step-3")
    for part in straight._optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
    train(straight, branches, 2, budget=90)
    assert straight.weights_digest() != resumed.weights_digest()


def test_checkpoint_resume_in_a_fresh_process_continues_bit_for_bit(tiny, make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, **WIDE_CLIP}
    straight = make_trainer(**config)
    train(straight, random_branches(0), 3)
    straight.save_checkpoint(tmp_path / "step-3", {})
    train(straight, random_branches(0), 2)
    # From standard input on purpose: there is no __main__ file that a helper process could import.
    script = f"""
import sys
from pathlib import Path
from tests.train.test_megatron import MegatronTrainer, TrainConfig, random_branches, train
trainer = MegatronTrainer(Path({str(tiny[0])!r}), TrainConfig(threads=1, **{config!r}), 5)
trainer.load_checkpoint(Path({str(tmp_path / "step-3")!r}))
train(trainer, random_branches(0), 2)
trainer.save_checkpoint(Path({str(tmp_path / "step-5")!r}), {{}})
print(trainer.weights_digest())
trainer.close()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, cwd=root, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == straight.weights_digest()
    assert (tmp_path / "step-5" / "metadata.json").exists()


def test_checkpoint_before_the_first_step_can_be_resumed(make_trainer, tmp_path) -> None:
    config = {"learning_rate": 1e-2, **WIDE_CLIP}
    trainer = make_trainer(**config)
    trainer.save_checkpoint(tmp_path / "step-0", {})
    train(trainer, random_branches(0), 2)
    first = trainer.weights_digest()
    trainer.load_checkpoint(tmp_path / "step-0")
    assert trainer.step == 0
    train(trainer, random_branches(0), 2)
    assert trainer.weights_digest() == first


def test_checkpoint_new_learning_rate_wins_over_the_stored_one(make_trainer, tmp_path) -> None:
    trainer = make_trainer(learning_rate=1e-2, **WIDE_CLIP)
    train(trainer, random_branches(0), 1)
    trainer.save_checkpoint(tmp_path / "step-1", {})
    frozen = make_trainer(learning_rate=0.0, **WIDE_CLIP)
    frozen.load_checkpoint(tmp_path / "step-1")
    train(frozen, random_branches(0), 1)
    assert frozen.weights_digest() == trainer.weights_digest()


def test_checkpoint_refusals_name_the_folder_and_keep_what_was_there(make_trainer, tied, tmp_path) -> None:
    trainer = make_trainer(**WIDE_CLIP)
    with pytest.raises(TrainError, match="not a complete checkpoint"):
        trainer.load_checkpoint(tmp_path / "nowhere")
    trainer.micro_step(pack_branches(random_branches(0), 10_000)[0])
    with pytest.raises(TrainError, match="in the middle of a step"):
        trainer.save_checkpoint(tmp_path / "half", {})
    trainer.reset_gradients()
    trainer.save_checkpoint(tmp_path / "one", {"n": 1})
    with pytest.raises(TrainError, match="exists already"):
        trainer.save_checkpoint(tmp_path / "one", {"n": 2})
    assert trainer.load_checkpoint(tmp_path / "one") == {"n": 1}
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="could not be written"):
        trainer.save_checkpoint(tmp_path / "file" / "one", {})
    foreign = make_trainer(tied[0])
    with pytest.raises(TrainError, match="could not be read"):
        foreign.load_checkpoint(tmp_path / "one")
    (tmp_path / "one" / "metadata.json").unlink()  # what a kill before the end leaves
    with pytest.raises(TrainError, match=r"no metadata\.json"):
        trainer.load_checkpoint(tmp_path / "one")


def test_trainer_several_one_after_the_other_work_in_one_process(tmp_path) -> None:
    folder = tmp_path / "model"
    write_tiny_qwen3(folder, layers=1)
    results = []
    for _ in range(3):
        trainer = MegatronTrainer(folder, TrainConfig(threads=1))
        results.append(trainer.logprobs(random_branches(0)[:1])[0])
        trainer.close()
        assert not torch.distributed.is_initialized()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
