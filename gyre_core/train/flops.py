"""What a micro-step's arithmetic is, from token counts: floating-point operations of forward and backward.

The formula (a multiply and an add are two operations; a backward pass costs twice its forward pass):

    linear      6 x parameters of the layers' matrices that a token goes through x packed tokens
    attention  12 x layers x heads x head width x pairs (a token and one it attends to, itself included)
    head        6 x hidden x vocabulary x positions that are projected

Norms, rotary embeddings, softmax and the optimizer are not counted, and recomputed activations count once: this is the
model's work, not the machine's. Divided by seconds it is comparable between packings, models and machines.
"""

from dataclasses import dataclass
from typing import Any

from gyre_core.train.packing import PackedMicroStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What of a model the formula needs. Example: model_cost(trainer.hf_model).flops(packed).total"""

    layer_parameters: float  # of all layers' matrices that one token is multiplied with (MoE: the active experts')
    num_layers: int
    attention_width: int  # query heads x head width
    hidden_size: int
    vocab_size: int

    def flops(self, packed: PackedMicroStep) -> "Flops":
        """Operations of one forward and backward pass over a packed micro-step."""
        pairs = int(packed.position.sum()) + packed.num_tokens  # a token at depth d sees d tokens and itself
        rows = packed.rows
        projected = len(set(zip(packed.parent[rows.child].tolist(), rows.temperature.tolist(), strict=True)))
        return Flops(
            linear=6.0 * self.layer_parameters * packed.num_tokens,
            attention=12.0 * self.num_layers * self.attention_width * pairs,
            head=6.0 * self.hidden_size * self.vocab_size * projected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations by part. Example: Flops(linear=1e9, attention=1e8, head=1e8).total == 1.2e9"""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.linear + self.attention + self.head


def model_cost(model: Any) -> ModelCost:
    """The cost of a model by its shape (an HfModel): its layers' matrices; of experts the active ones."""
    hidden, width = model.hidden_size, model.num_heads * model.head_dim
    attention = 2 * hidden * (width + model.num_kv_heads * model.head_dim)  # query and output; key and value
    dense = 3 * hidden * model.ffn_size
    experts = getattr(model, "experts", None)
    routed = 0
    sparse = 0
    if experts is not None:
        sparse = sum(experts.layers)
        routed = 3 * hidden * experts.ffn_size * experts.top_k + hidden * experts.count
    return ModelCost(
        layer_parameters=float(model.num_layers * attention + (model.num_layers - sparse) * dense + sparse * routed),
        num_layers=model.num_layers,
        attention_width=width,
        hidden_size=hidden,
        vocab_size=model.vocab_size,
    )
