"""Tiny random models of each supported architecture, in Hugging Face layout."""

from pathlib import Path
from typing import Any

import torch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 4096,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_model(folder: Path, kind: str, *, seed: int = 0, scale: float = 5.0, **changes: Any) -> Any:
    """Write a random checkpoint folder and return the transformers model, fp32.

    `kind`: qwen3, llama, llama3 (scaled rotary frequencies), qwen3_moe. Weights are scaled up from transformers'
    initialisation, whose attention and routing are near uniform: a wrong position or a wrong expert shows.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    options: dict[str, Any] = {**_SIZES, **changes}
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**options))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**options))
    elif kind == "llama3":
        model = LlamaForCausalLM(LlamaConfig(**{"rope_parameters": LLAMA3_ROPE, **options}))
    elif kind == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_EXPERTS, **options}))
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(parameter, std=0.1)  # transformers starts the router at zero: all ties
    else:
        raise ValueError(f"no model of kind {kind!r}")
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model
