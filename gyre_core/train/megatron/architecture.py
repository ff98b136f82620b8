"""What a Hugging Face config.json says about its model, and Megatron's view of it.

Enters: config.json of a Qwen3 (dense), Qwen3-MoE or Llama model. Leaves: `HfModel`, a TransformerConfig, the rotary
frequencies. Invariant: a feature that changes the model's mathematics and is not implemented is refused by name; a key
that is not known to matter is not read.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gyre_core.errors import ConfigError

Kind = Literal["qwen3", "qwen3_moe", "llama"]
_KINDS: tuple[Kind, ...] = ("qwen3", "qwen3_moe", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture-of-experts model's routed experts. No aux loss and no capacity: every token gets its top k.

    Example: Experts(count=128, top_k=8, ffn_size=768, normalise=True, layers=(True,) * 48)
    """

    count: int
    top_k: int
    ffn_size: int  # of one expert
    normalise: bool  # the top k's probabilities sum to 1
    layers: tuple[bool, ...]  # which layers have experts; the others are dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of the rotary frequencies. Example: Llama3Rope(factor=8, low=1, high=4, original=8192)"""

    factor: float
    low: float
    high: float
    original: int  # context length before the scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """What a checkpoint folder says about its model. Example: read_hf_config(Path("examples/quickstart/policy"))"""

    kind: Kind
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
    rope_scaling: Llama3Rope | None = None
    experts: Experts | None = None

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised a head."""
        return self.kind != "llama"


def read_hf_config(path: Path) -> HfModel:
    """Read `path`/config.json; ConfigError names what this back end does not support."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {file}: {error}") from error
    if config.get("model_type") not in _KINDS:
        raise ConfigError(
            f"model.path: {file} has model_type {config.get('model_type')!r}; "
            f"the Megatron back end trains {', '.join(map(repr, _KINDS))}"
        )
    kind: Kind = config["model_type"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    layer_types = set(config.get("layer_types") or ())
    refused = [
        (rope_type not in ("default", "llama3"), f"rope_type {rope_type!r} (default and llama3 are)"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor"),
        (bool(config.get("use_sliding_window")), "use_sliding_window"),
        (bool(layer_types - {"full_attention"}), f"layer_types {sorted(layer_types - {'full_attention'})}"),
        (bool(config.get("attention_bias")), "attention_bias"),
        (bool(config.get("mlp_bias")), "mlp_bias"),
        (bool(config.get("kv_lora_rank")), "kv_lora_rank (multi-head latent attention)"),
        (bool(config.get("n_shared_experts") or config.get("shared_expert_intermediate_size")), "shared experts"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act {config.get('hidden_act')!r}"),
        (bool(config.get("attention_dropout")), "attention_dropout: a shared prefix would get one draw for all"),
        ("quantization_config" in config, "quantization_config"),
    ]
    for unsupported, what in refused:
        if unsupported:
            raise ConfigError(f"model.path: {file} uses {what}, which the Megatron back end does not support")
    try:
        return HfModel(
            kind=kind,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn_size=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings", 32768),
            rope_scaling=_llama3_rope(rope, config) if rope_type == "llama3" else None,
            experts=_experts(config) if kind == "qwen3_moe" else None,
        )
    except KeyError as error:
        raise ConfigError(f"model.path: {file} lacks {error}") from error


def _llama3_rope(rope: dict[str, Any], config: dict[str, Any]) -> Llama3Rope:
    return Llama3Rope(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        original=rope.get("original_max_position_embeddings") or config["max_position_embeddings"],
    )


def _experts(config: dict[str, Any]) -> Experts:
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    return Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalise=bool(config.get("norm_topk_prob", False)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"])),
    )


def rotary_frequencies(model: HfModel) -> Tensor:
    """[head_dim / 2] radians a position, fp32.

    With Llama 3.1's scaling, wavelengths above original / low are stretched by `factor`, those below original / high
    stay, and between them the two are blended linearly in original / wavelength. Source: the Llama 3.1 model code.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    frequencies = 1.0 / (model.rope_theta**exponents)
    rope = model.rope_scaling
    if rope is None:
        return frequencies
    turns = rope.original * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor


def check_tensor_parallel(model: HfModel, ranks: int) -> None:
    """ConfigError when `ranks` tensor-parallel processes cannot split the model evenly."""
    if ranks == 1:
        return
    if model.experts is not None:
        raise ConfigError(
            f"train.tensor_parallel = {ranks}: mixture-of-experts models train with 1; megatron-core splits experts "
            "together with the sequence, and a packed forest is not split along it"
        )
    for what, size in (
        ("vocab_size", model.vocab_size),
        ("num_key_value_heads", model.num_kv_heads),
        ("intermediate_size", model.ffn_size),
    ):
        if size % ranks:
            raise ConfigError(
                f"train.tensor_parallel = {ranks} does not divide the model's {what} ({size}): lower it to a divisor"
            )


def transformer_config(
    model: HfModel, *, recompute: bool = False, dtype: str = "float32", tensor_parallel: int = 1
) -> TransformerConfig:
    """Megatron's view of the model. Why each switch: fused kernels need CUDA, round, or ignore a forest.

    masked_softmax_fusion would ignore the forest in bf16, cross_entropy_loss_fusion rounds gradients to bf16,
    gradient_accumulation_fusion needs Apex. calculate_per_token_loss makes data-parallel ranks sum their gradients
    instead of averaging them: the one division is the optimizer step's. `recompute` keeps activations at layer
    boundaries only. Experts are routed in fp32, without auxiliary losses: those are means over whatever shares a
    micro-step, so they would make results depend on the packing.
    """
    options: dict[str, Any] = {}
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.experts is not None:
        options |= {
            "num_moe_experts": model.experts.count,
            "moe_router_topk": model.experts.top_k,
            "moe_ffn_hidden_size": model.experts.ffn_size,
            "moe_layer_freq": [int(layer) for layer in model.experts.layers],
            "moe_router_pre_softmax": not model.experts.normalise,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        calculate_per_token_loss=True,
        **options,
    )
