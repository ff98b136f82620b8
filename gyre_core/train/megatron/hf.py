"""Hugging Face checkpoints <-> megatron-core: config.json to TransformerConfig, tensors to parameter names and back.

Enters: a folder in Hugging Face layout (Qwen3 dense, unquantised). Leaves: named full tensors, so that an export feeds
a streamed weight update. Invariants: import then export gives back every tensor bit for bit in the checkpoint's own
names and order of layers; the vocabulary is the checkpoint's, never padded; tied embeddings stay tied.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gyre_core.errors import ConfigError

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """What a checkpoint folder says about its model. Example: read_hf_config(Path("examples/quickstart/policy"))"""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    max_positions: int


def read_hf_config(path: Path) -> HfModel:
    """Read `path`/config.json; ConfigError names what this back end does not support."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    if config.get("model_type") != "qwen3":
        raise ConfigError(
            f"model.path: {file} has model_type {config.get('model_type')!r}; "
            "the Megatron back end trains 'qwen3' (dense)"
        )
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    refused = [
        (kind != "default", f"rope_type {kind!r}"),
        (bool(config.get("use_sliding_window")), "use_sliding_window"),
        (bool(config.get("attention_bias")), "attention_bias"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act {config.get('hidden_act')!r}"),
        ("quantization_config" in config, "quantization_config"),
    ]
    for unsupported, what in refused:
        if unsupported:
            raise ConfigError(f"model.path: {file} uses {what}, which the Megatron back end does not support")
    try:
        return HfModel(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn_size=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings", 32768),
        )
    except KeyError as error:
        raise ConfigError(f"model.path: {file} lacks {error}") from error


def transformer_config(model: HfModel, *, recompute: bool = False) -> TransformerConfig:
    """Megatron's view of the model, fp32. Why each switch: fused kernels need CUDA, round, or ignore a forest.

    masked_softmax_fusion would ignore the forest in bf16, cross_entropy_loss_fusion rounds gradients to bf16,
    gradient_accumulation_fusion needs Apex. calculate_per_token_loss makes data-parallel ranks sum their gradients
    instead of averaging them: the one division is the optimizer step's. `recompute` keeps activations at layer
    boundaries only.
    """
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        calculate_per_token_loss=True,
        **(full if recompute else {}),
    )


def load_hf_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of `path`/*.safetensors by name; ConfigError when there are none or a file is broken."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {path} holds no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 - not a dict
        except Exception as error:  # safetensors raises its own, undocumented kinds
            raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    return tensors


def to_megatron(tensors: dict[str, Tensor], model: HfModel) -> dict[str, Tensor]:
    """Hugging Face names to megatron-core names, float32. ConfigError names missing and unknown tensors."""
    left = dict(tensors)
    if model.tied_embeddings:
        left.pop("lm_head.weight", None)  # some writers store it twice

    def take(name: str) -> Tensor:
        try:
            return left.pop(name).float()
        except KeyError:
            raise ConfigError(f"model.path: the checkpoint lacks the tensor {name}") from None

    out = {}
    for ours, theirs in _TOP.items():
        if not (model.tied_embeddings and ours == "output_layer.weight"):
            out[ours] = take(theirs)
    for layer in range(model.num_layers):
        ours_at, theirs_at = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for ours, theirs in _LAYER.items():
            out[ours_at + ours] = take(theirs_at + theirs)
        query, key, value = (take(f"{theirs_at}self_attn.{name}_proj.weight") for name in "qkv")
        out[f"{ours_at}self_attention.linear_qkv.weight"] = _merge_qkv(query, key, value, model)
        gate, up = (take(f"{theirs_at}mlp.{name}_proj.weight") for name in ("gate", "up"))
        out[f"{ours_at}mlp.linear_fc1.weight"] = torch.cat([gate, up])
    if left:
        raise ConfigError(f"model.path: the checkpoint has tensors that a Qwen3 model does not: {sorted(left)[:5]}")
    return out


def to_hf(named: Iterable[tuple[str, Tensor]], model: HfModel) -> Iterator[tuple[str, Tensor]]:
    """megatron-core parameters, one at a time, to (Hugging Face name, contiguous copy)."""
    for name, tensor in named:
        tensor = tensor.detach()
        if name in _TOP:
            yield _TOP[name], tensor.clone()
            continue
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        assert match, f"unknown parameter {name}"
        at, part = f"model.layers.{match[1]}.", match[2]
        if part in _LAYER:
            yield at + _LAYER[part], tensor.clone()
        elif part == "self_attention.linear_qkv.weight":
            for letter, piece in zip("qkv", _split_qkv(tensor, model), strict=True):
                yield f"{at}self_attn.{letter}_proj.weight", piece
        elif part == "mlp.linear_fc1.weight":
            gate, up = tensor.chunk(2)
            yield f"{at}mlp.gate_proj.weight", gate.clone()
            yield f"{at}mlp.up_proj.weight", up.clone()
        else:
            raise AssertionError(f"unknown parameter {name}")


def write_hf(tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path) -> None:
    """Write `target` as a checkpoint folder: these tensors, and every other file of `source` (config, tokenizer)."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
            shutil.copyfile(file, target / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, target / "model.safetensors", {"format": "pt"})


def _merge_qkv(query: Tensor, key: Tensor, value: Tensor, model: HfModel) -> Tensor:
    """Megatron's rows: for each key head its query heads, the key head, the value head."""
    groups, width, hidden = model.num_kv_heads, model.head_dim, model.hidden_size
    parts = (
        query.view(groups, -1, width, hidden),
        key.view(groups, 1, width, hidden),
        value.view(groups, 1, width, hidden),
    )
    return torch.cat(parts, 1).reshape(-1, hidden)


def _split_qkv(weight: Tensor, model: HfModel) -> tuple[Tensor, Tensor, Tensor]:
    per_group = model.num_heads // model.num_kv_heads
    blocks = weight.view(model.num_kv_heads, per_group + 2, model.head_dim, model.hidden_size)
    query, key, value = blocks[:, :per_group], blocks[:, per_group], blocks[:, per_group + 1]
    return tuple(part.reshape(-1, model.hidden_size).clone() for part in (query, key, value))  # pyright: ignore
