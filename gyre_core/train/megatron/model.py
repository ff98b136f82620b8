"""The policy as Megatron holds it: a packed forest in, log-probs of its loss rows out.

Legend: N tokens, R loss rows, H heads (distinct pairs of edge source and temperature), V vocabulary.
Invariants: RoPE follows a token's depth in its tree; a token attends to its ancestors and itself; only the H positions
that a loss row starts from are projected to the vocabulary, in chunks, and their logits are never kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gyre_core.train.megatron.architecture import HfModel, rotary_frequencies
from gyre_core.train.megatron.attention import (
    ForestCell,
    SegmentLayout,
    TreeCoreAttention,
    flex_block_mask,
    segment_layout,
)
from gyre_core.train.megatron.ranks import tensor_group, tensor_rank
from gyre_core.train.packing import PackedMicroStep

# megatron-core 0.16.1 forgets this name where Transformer Engine is missing; None makes its router use torch.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]

# Logits held at once. 2**25 fp32 values are 128 MiB: 220 positions of a 152k vocabulary, all of a tiny one's.
_CHUNK_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """A packed micro-step as tensors on the trainer's device. Example: forest_of(packed, torch.device("cpu"))"""

    token_ids: Tensor  # [N]
    position: Tensor  # [N]
    layout: SegmentLayout
    head_source: Tensor  # [H] packed token whose hidden state predicts
    head_temperature: Tensor  # [H]
    row_head: Tensor  # [R]
    row_token: Tensor  # [R] token id that is predicted


def forest_of(packed: PackedMicroStep, device: torch.device) -> Forest:
    """Move a micro-step to the device and find its distinct heads: siblings and equal edges share their logits."""
    rows = packed.rows
    pairs = np.stack([packed.parent[rows.child].astype(np.float64), rows.temperature.astype(np.float64)])
    heads, row_head = np.unique(pairs, axis=1, return_inverse=True)

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(array, dtype=dtype, device=device)

    return Forest(
        token_ids=tensor(packed.token_ids),
        position=tensor(packed.position),
        layout=segment_layout(packed),
        head_source=tensor(heads[0]),
        head_temperature=tensor(heads[1], torch.float32),
        row_head=tensor(row_head.reshape(-1)),
        row_token=tensor(packed.token_ids[rows.child]),
    )


class TreeGPTModel(GPTModel):
    """Megatron's GPTModel over a forest. Only public parts of it are called: embedding, decoder, output weight."""

    def __init__(self, config: TransformerConfig, model: HfModel) -> None:
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = TreeCoreAttention
        super().__init__(
            config,
            spec,
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_positions,
            position_embedding_type="none",  # RoPE is ours: Megatron's counts places in the sequence, not depth
            share_embeddings_and_output_weights=model.tied_embeddings,
            parallel_output=True,
        )
        self.inv_freq = rotary_frequencies(model)
        self.cell = ForestCell()
        for module in self.modules():
            if isinstance(module, TreeCoreAttention):
                module.cell = self.cell

    def forward(self, forest: Forest) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[R] log-probs, fp32, of the loss rows' tokens at the rows' temperatures."""
        hidden = self.hidden_states(forest)
        return HeadLogProbs.apply(
            hidden.index_select(0, forest.head_source).float(),
            self.output_weight().float(),
            forest.head_temperature,
            forest.row_head,
            forest.row_token,
            tensor_rank() * len(self.output_weight()),
            tensor_group(),
        )

    def hidden_states(self, forest: Forest) -> Tensor:
        """[N, hidden] after the final norm."""
        self.cell.layout = forest.layout
        if forest.token_ids.device.type != "cpu":
            self.cell.block_mask = flex_block_mask(forest.layout, forest.token_ids.device)
        embedded = self.embedding(input_ids=forest.token_ids[None], position_ids=forest.position[None])
        angles = forest.position[:, None].float() * self.inv_freq.to(forest.position.device)
        rotary = torch.cat([angles, angles], -1)[:, None, None, :]
        hidden: Any = self.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary)
        return hidden[:, 0]

    def output_weight(self) -> Tensor:
        """[V, hidden] of the projection to the vocabulary; the embedding's own where tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight


class HeadLogProbs(torch.autograd.Function):
    """hidden [H, width], weight [V, width], temperatures [H] -> [R] log softmax(hidden W^T / T)[row_head, row_token].

    Works through chunks of heads and recomputes their logits in the backward pass, so memory is one chunk of logits
    whatever H is. fp32 inside. Tensor-parallel ranks hold consecutive parts of the vocabulary, the first one's id in
    `first`: maxima, sums and the target's logit are reduced over them, never the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        temperature: Tensor,
        head: Tensor,
        token: Tensor,
        first: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        logprobs = hidden.new_empty(len(head))
        lse = hidden.new_empty(len(hidden))
        for start, stop, rows in _chunks(len(hidden), len(weight), head):
            logits = _logits(hidden[start:stop], weight, temperature[start:stop])
            if group is None:
                lse[start:stop] = torch.logsumexp(logits, -1)
                logprobs[rows] = logits[head[rows] - start, token[rows]] - lse[head[rows]]
            else:
                top = logits.max(-1).values
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
                total = (logits - top[:, None]).exp_().sum(-1)
                dist.all_reduce(total, group=group)
                lse[start:stop] = total.log_() + top
                at, mine = _local(token[rows], first, len(weight))
                chosen = logits[head[rows] - start, at].masked_fill(~mine, 0.0)
                dist.all_reduce(chosen, group=group)
                logprobs[rows] = chosen - lse[head[rows]]
        ctx.save_for_backward(hidden, weight, temperature, head, token, lse)
        ctx.first, ctx.group = first, group
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, temperature, head, token, lse = ctx.saved_tensors
        (grad,) = grads
        head_grad = torch.zeros_like(lse).index_add_(0, head, grad)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start, stop, rows in _chunks(len(hidden), len(weight), head):
            logits = _logits(hidden[start:stop], weight, temperature[start:stop])
            # d logprob / d logits = onehot - softmax
            logits.sub_(lse[start:stop, None]).exp_().mul_(-head_grad[start:stop, None])
            at, mine = _local(token[rows], ctx.first, len(weight))
            logits.index_put_((head[rows] - start, at), grad[rows].masked_fill(~mine, 0.0), accumulate=True)
            logits.div_(temperature[start:stop, None])
            grad_hidden[start:stop] = logits @ weight
            grad_weight.addmm_(logits.t(), hidden[start:stop])
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)  # each rank's part of the vocabulary pulls on it
        return grad_hidden, grad_weight, None, None, None, None, None


def _local(token: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Places in this rank's part of the vocabulary (0 where the token is another's), and which are here."""
    mine = (token >= first) & (token < first + size)
    return (token - first).masked_fill(~mine, 0), mine


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden @ weight.t()).div_(temperature[:, None])


def _chunks(num_heads: int, vocab_size: int, head: Tensor) -> list[tuple[int, int, Tensor]]:
    """(first head, one past the last, rows of those heads)."""
    size = max(1, _CHUNK_LOGITS // vocab_size)
    if num_heads <= size:
        return [(0, num_heads, torch.arange(len(head), device=head.device))]
    spans = [(start, min(start + size, num_heads)) for start in range(0, num_heads, size)]
    return [(start, stop, torch.nonzero((head >= start) & (head < stop)).flatten()) for start, stop in spans]
