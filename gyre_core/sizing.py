"""Whether a model, a layout and a cluster fit together: arithmetic from shapes alone, no GPU and no weights.

Enters: a model's shape, how a cell's devices share it, the machines. Leaves: bytes of one device in each phase, bytes
that move, seconds at the wire's speed. Every formula is one function with its source; what is not counted is said.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gyre_core.errors import ConfigError

GIB = 2**30
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_GRADIENT_BYTES = 4  # sums are fp32 whatever the weights are (gyre_core/train/megatron)
_OPTIMIZER_BYTES = 12  # Adam: fp32 weights and two moments, sharded over the cell's devices (distributed optimizer)
# Bytes of one token and layer that the backward pass needs with 16-bit activations, in units of the hidden size
# (Korthikanti et al. 2022, with an attention that keeps no scores).
_LAYER_ACTIVATIONS = 34
# Of a device's memory: what CUDA, NCCL and fragments leave over. SGLang's own default for its share is 0.88 - 0.9.
_USABLE = 0.9


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machines(_Strict):
    """What the cluster is made of."""

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1, le=64)
    gpu_memory_gib: float = Field(gt=0)
    host_memory_gib: float = Field(gt=0)
    network_gb_s: float = Field(gt=0)  # gigabytes a second of one node, all its cards together
    store_gb_s: float = Field(gt=0)  # of the object store, all nodes together


class Layout(_Strict):
    """How one cell's devices share one copy of the weights for training, and how its engine shares them for serving."""

    tensor_parallel: int = Field(ge=1, default=1)
    pipeline_parallel: int = Field(ge=1, default=1)
    expert_parallel: int = Field(ge=1, default=1)
    data_parallel: int = Field(ge=1, default=1)
    engine_gpus: int = Field(ge=1, default=1)  # that hold one copy of the weights when serving

    @property
    def gpus(self) -> int:
        """Devices of a cell's trainer."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class Cluster(_Strict):
    """A cluster file.

    Example: read_cluster(Path("examples/presets/moe-122b-24-nodes.cluster.toml")).machines.nodes
    """

    machines: Machines
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that memory depends on.

    Example: read_shape(Path("examples/quickstart/policy")).parameters
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    experts: int = 0  # routed ones of a layer; 0: dense
    experts_per_token: int = 0
    expert_ffn: int = 0

    @property
    def expert_parameters(self) -> int:
        """Of all layers' routed experts (gate, up and down matrices)."""
        return self.layers * self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def other_parameters(self) -> int:
        """Attention, dense feed-forward or router, embeddings; norms are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        middle = self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + middle) + embeddings

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.other_parameters

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.other_parameters + round(self.expert_parameters * share)


def read_shape(folder: Path) -> Shape:
    """The shape in a Hugging Face config.json; raises ConfigError."""
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            ffn=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
            expert_ffn=config.get("moe_intermediate_size", 0) if experts else 0,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: cannot read the model's shape from {file}: {error}") from error


def read_cluster(path: Path) -> Cluster:
    """A cluster file (TOML); raises ConfigError."""
    try:
        return Cluster.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device while the cell trains.

    Example: training_memory(shape, layout, dtype="bfloat16", tokens=65536, recompute=True).core
    """

    weights: float
    gradients: float
    optimizer: float  # the core's alone
    activations: float

    @property
    def satellite(self) -> float:
        return self.weights + self.gradients + self.activations

    @property
    def core(self) -> float:
        return self.satellite + self.optimizer


def training_memory(shape: Shape, layout: Layout, *, dtype: str, tokens: int, recompute: bool) -> DeviceMemory:
    """One device of a cell that trains micro-steps of `tokens` packed tokens; logits (at targets only) not counted."""
    weight = _WEIGHT_BYTES[dtype]
    held = _held_parameters(shape, layout)
    layers = -(-shape.layers // layout.pipeline_parallel)
    width = shape.hidden * tokens
    if recompute:  # the input of each layer, and one layer's own activations
        activations = weight * width * layers + _LAYER_ACTIVATIONS / 2 * weight * width / layout.tensor_parallel
    else:
        activations = _LAYER_ACTIVATIONS / 2 * weight * width * layers / layout.tensor_parallel
    return DeviceMemory(
        weights=weight * held,
        gradients=_GRADIENT_BYTES * held,
        optimizer=_OPTIMIZER_BYTES * shape.parameters / layout.gpus,
        activations=activations,
    )


def _held_parameters(shape: Shape, layout: Layout) -> float:
    """Parameters on one device: experts are shared over `expert_parallel` devices, the rest over `tensor_parallel`."""
    experts = shape.expert_parameters / (layout.expert_parallel * layout.pipeline_parallel)
    if layout.expert_parallel == 1:
        experts = shape.expert_parameters / (layout.tensor_parallel * layout.pipeline_parallel)
    return experts + shape.other_parameters / (layout.tensor_parallel * layout.pipeline_parallel)


def kv_bytes_per_token(shape: Shape, *, dtype: str) -> int:
    """Keys and values of one token in all layers, one copy."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * _WEIGHT_BYTES[dtype]


def serving_memory(shape: Shape, layout: Layout, *, dtype: str, kv_tokens: int) -> tuple[float, float]:
    """(weights, keys and values) of one device of an engine; more devices than key-value heads hold copies of them."""
    weights = _WEIGHT_BYTES[dtype] * shape.parameters / layout.engine_gpus
    return weights, kv_bytes_per_token(shape, dtype=dtype) * kv_tokens / min(layout.engine_gpus, shape.kv_heads)


def usable_bytes(memory_gib: float) -> float:
    """What of a device's memory a program can count on."""
    return _USABLE * memory_gib * GIB


def weight_bytes(shape: Shape, *, dtype: str) -> float:
    """All weights once: what a publication moves to each cell."""
    return _WEIGHT_BYTES[dtype] * shape.parameters


def gradient_bytes(shape: Shape) -> float:
    """All gradients once: what each satellite hands to the core, each step."""
    return float(_GRADIENT_BYTES * shape.parameters)


def checkpoint_bytes(shape: Shape, *, dtype: str) -> float:
    """Weights and the optimizer's state: what a step's checkpoint writes."""
    return float((_WEIGHT_BYTES[dtype] + _OPTIMIZER_BYTES) * shape.parameters)


def layout_problems(shape: Shape, layout: Layout) -> list[str]:
    """What does not divide, with what to change."""
    found = []
    tensor, pipeline, expert = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
    if shape.heads % tensor:
        found.append(f"tensor_parallel {tensor} does not divide the {shape.heads} attention heads")
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        found.append(f"tensor_parallel {tensor} and the {shape.kv_heads} key-value heads: neither divides the other")
    if shape.vocabulary % tensor:
        found.append(f"tensor_parallel {tensor} does not divide the vocabulary of {shape.vocabulary}")
    if not shape.experts and shape.ffn % tensor:
        found.append(f"tensor_parallel {tensor} does not divide the feed-forward width {shape.ffn}")
    if shape.layers % pipeline:
        found.append(f"pipeline_parallel {pipeline} does not divide the {shape.layers} layers")
    if expert > 1 and not shape.experts:
        found.append(f"expert_parallel is {expert}, but the model is dense: set it to 1")
    if expert > 1 and shape.experts and shape.experts % expert:
        found.append(f"expert_parallel {expert} does not divide the {shape.experts} experts")
    if expert > 1 and tensor * layout.data_parallel % expert:
        ranks = tensor * layout.data_parallel
        found.append(f"expert_parallel {expert} does not divide tensor_parallel x data_parallel ({ranks})")
    return found
