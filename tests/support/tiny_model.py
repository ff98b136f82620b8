"""A tiny random Qwen3 in Hugging Face layout, with a tokenizer: real enough for SGLang and transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.tokenizer import byte_tokenizer

VOCAB_SIZE = 512
CONTEXT_LENGTH = 1024


def tiny_config(*, tie: bool = False) -> Qwen3Config:
    """Hidden 64, two layers, grouped-query attention; ends at the tokenizer's <|im_end|>."""
    tokenizer = byte_tokenizer()
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=tie,
        initializer_range=0.2,  # ten times the usual: outputs differ by prompt, and between two seeds
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def tiny_model(seed: int, *, tie: bool = False) -> Any:
    """The model with weights that depend on the seed only; norms are random too, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tie=tie)).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model


def save_tiny_model(folder: Path, seed: int = 0, *, tie: bool = False) -> Path:
    """config.json, safetensors and tokenizer in `folder`."""
    tiny_model(seed, tie=tie).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_weights(seed: int, *, tie: bool = False) -> dict[str, torch.Tensor]:
    """The model's tensors by Hugging Face name, as a trainer exports them (a tied head is left out)."""
    state = tiny_model(seed, tie=tie).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if not (tie and name == "lm_head.weight")}


def greedy_tokens(seed: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model of this seed samples greedily after a prompt, by transformers; stop tokens do not stop it."""
    model, ids = tiny_model(seed), list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
