"""Hugging Face checkpoints <-> megatron-core: tensors to parameter names and back, whole or a tensor-parallel shard.

Enters: a folder in Hugging Face layout (unquantised; `architecture` says which models). Leaves: named full tensors, so
that an export feeds a streamed weight update. Invariants: import then export gives back every tensor bit for bit in the
checkpoint's own names and order of layers; the vocabulary is the checkpoint's, never padded; tied embeddings stay tied.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gyre_core.errors import ConfigError
from gyre_core.train.megatron.architecture import HfModel

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_ROUTER = ("mlp.router.weight", "mlp.gate.weight")
_SAME = {**_LAYER, **_QK_NORM, _ROUTER[0]: _ROUTER[1]}  # one tensor on either side


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
        for ours, theirs in {**_LAYER, **(_QK_NORM if model.qk_norm else {})}.items():
            out[ours_at + ours] = take(theirs_at + theirs)
        query, key, value = (take(f"{theirs_at}self_attn.{name}_proj.weight") for name in "qkv")
        out[f"{ours_at}self_attention.linear_qkv.weight"] = _merge_qkv(query, key, value, model)
        mlps = [("mlp.", "mlp.")]
        if model.experts is not None and model.experts.layers[layer]:
            out[ours_at + _ROUTER[0]] = take(theirs_at + _ROUTER[1])
            mlps = [
                (f"mlp.experts.local_experts.{index}.", f"mlp.experts.{index}.") for index in range(model.experts.count)
            ]
        for ours, theirs in mlps:
            gate, up, down = (take(f"{theirs_at}{theirs}{name}_proj.weight") for name in ("gate", "up", "down"))
            out[f"{ours_at}{ours}linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{ours_at}{ours}linear_fc2.weight"] = down
    if left:
        raise ConfigError(
            f"model.path: the checkpoint has tensors that a {model.kind} model of its config does not: "
            f"{sorted(left)[:5]}"
        )
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
        mlp = re.fullmatch(r"mlp\.(?:experts\.local_experts\.(\d+)\.)?linear_fc([12])\.weight", part)
        if part in _SAME:
            yield at + _SAME[part], tensor.clone()
        elif part == "self_attention.linear_qkv.weight":
            for letter, piece in zip("qkv", _split_qkv(tensor, model), strict=True):
                yield f"{at}self_attn.{letter}_proj.weight", piece
        elif mlp:
            at += "mlp." if mlp[1] is None else f"mlp.experts.{mlp[1]}."
            if mlp[2] == "2":
                yield f"{at}down_proj.weight", tensor.clone()
            else:
                gate, up = tensor.chunk(2)
                yield f"{at}gate_proj.weight", gate.clone()
                yield f"{at}up_proj.weight", up.clone()
        else:
            raise AssertionError(f"unknown parameter {name}")


def write_hf(tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path) -> None:
    """Write `target` as a checkpoint folder: these tensors, and every other file of `source` (config, tokenizer)."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
            shutil.copyfile(file, target / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, target / "model.safetensors", {"format": "pt"})


def shard(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of a full megatron-core tensor that a tensor-parallel rank holds; a view, the tensor itself with one."""
    if ranks == 1 or (kind := _split_kind(name)) is None:
        return tensor
    if kind == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(ranks, dim=1 if kind == "columns" else 0)[rank]


def unshard(name: str, parts: list[Tensor]) -> Tensor:
    """The full tensor from the ranks' parts, in rank order: the inverse of `shard`."""
    if len(parts) == 1 or (kind := _split_kind(name)) is None:
        return parts[0]
    if kind == "gated":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(parts, dim=1 if kind == "columns" else 0)


def is_split(name: str) -> bool:
    """Whether tensor-parallel ranks hold parts of this parameter; else each holds all of it."""
    return _split_kind(name) is not None


def _split_kind(name: str) -> str | None:
    if name.endswith("linear_fc1.weight"):
        return "gated"  # each rank has its rows of the gate, then its rows of the up projection
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return "columns"
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")):
        return "rows"
    return None


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
