"""Attention over a packed forest: queries, keys and values of N tokens in, N outputs out, no N x N mask.

On CPU the work follows the segments (gyre_core/train/packing.py). A segment's queries see its ancestors' tokens, all
of them, and its own tokens, causally. Both parts are plain flash attention without any mask, merged by their
log-sum-exps, so the arithmetic is what the forest needs and memory is O(N):

- ancestors: the children of one segment have the same ancestors, so they are one call: their queries, side by side,
  against the gathered path;
- own tokens: long segments one causal call each; short ones are right-padded to the next power of two and batched
  (behind the causal diagonal padding is invisible), because a call costs more than their arithmetic.

The backward pass hands the *merged* output and log-sum-exp to the kernels' own backward, which makes the parts'
gradients exact: with the global normaliser each part's probabilities are the global ones (the identity behind ring
attention, Liu et al. 2023, arXiv 2310.01889). A forest of plain chains is causal flash attention, nothing else.

On GPU the same forest becomes a FlexAttention block mask (`flex_block_mask`). That path has not run on a GPU yet; the
tests compare its forward pass with the segments' on CPU, where FlexAttention has no backward.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gyre_core.train.packing import PackedMicroStep

# Segments below this many tokens are padded and batched. Measured with 4 heads of 32 on one core: a causal call on 32
# tokens costs 0.1 ms, of which 0.03 ms is arithmetic; from 64 on the gather costs more than the call.
_SHORT_SEGMENT = 64
_NEVER = 1e30  # log-sum-exp of padded queries: their probabilities come out as exactly 0

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Rows = slice | Tensor  # packed tokens: a slice where they are contiguous (a view), else an index (a copy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """Which attention calls a forest needs; built once a micro-step, used by every layer. Example: segment_layout(p)"""

    across: tuple[tuple[Rows, Rows], ...]  # (queries, keys): every query sees every key
    causal: tuple[slice, ...]  # long segments
    padded: tuple[tuple[Tensor, Tensor], ...]  # short ones: token index [n, length], and where it is real
    subtree_end: Tensor  # [N] one past the last descendant: q sees k iff k <= q < subtree_end[k]


def segment_layout(packed: PackedMicroStep) -> SegmentLayout:
    """Plan the calls of a forest of N tokens and S segments; O(N + S * depth) time and memory."""
    start, end, above = packed.segment_start, packed.segment_end, packed.segment_parent
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(above.tolist()):
        if parent >= 0:
            children.setdefault(parent, []).append(segment)
    across = []
    for parent, segments in children.items():
        queries = np.concatenate([np.arange(start[s], end[s]) for s in segments])
        across.append((_rows(queries), _rows(packed.path(int(end[parent]) - 1))))
    causal: list[slice] = []
    short: dict[int, list[tuple[int, int]]] = {}
    for first, last in zip(start.tolist(), end.tolist(), strict=True):
        if last - first >= _SHORT_SEGMENT:
            causal.append(slice(first, last))
        else:
            short.setdefault(1 << (last - first - 1).bit_length(), []).append((first, last))
    padded = []
    for length, spans in sorted(short.items()):
        lows, highs = np.array(spans).T[:, :, None]
        index = lows + np.arange(length)
        padded.append((torch.from_numpy(np.minimum(index, highs - 1)), torch.from_numpy(index < highs)))
    return SegmentLayout(
        across=tuple(across),
        causal=tuple(causal),
        padded=tuple(padded),
        subtree_end=torch.from_numpy(subtree_ends(packed)),
    )


def subtree_ends(packed: PackedMicroStep) -> np.ndarray:
    """[N] one past each token's last descendant, in depth-first order."""
    ends = packed.segment_end.copy()
    for segment in range(len(ends) - 1, -1, -1):
        parent = packed.segment_parent[segment]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[segment])
    return np.repeat(ends, packed.segment_end - packed.segment_start)


def _rows(index: np.ndarray) -> Rows:
    if index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


def _take(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows of an [N, heads, width] tensor as the kernels' [1, heads, rows, width]; a view where rows is a slice."""
    picked = tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
    return picked.transpose(0, 1).unsqueeze(0)


def _add(total: Tensor, rows: Rows, part: Tensor) -> None:
    part = part.squeeze(0).transpose(0, 1)
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part)


def _take_padded(tensor: Tensor, index: Tensor) -> Tensor:
    """[N, heads, width] -> [n, heads, length, width]."""
    return tensor.index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:]).transpose(1, 2)


class SegmentAttention(torch.autograd.Function):
    """query [N, heads, width], key and value [N, kv heads, width] -> [N, heads, width]; scores are scaled by `scale`.

    Key heads may be fewer than query heads (grouped-query attention). Deterministic: kernels split over batch and
    heads only, and every sum here runs in the layout's order.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N, heads]
        for rows in layout.causal:
            part, part_lse = _flash(*(_take(t, rows) for t in (query, key, value)), 0.0, True, scale=scale)
            out[rows] = part.squeeze(0).transpose(0, 1)
            lse[rows] = part_lse.squeeze(0).transpose(0, 1)
        for index, real in layout.padded:
            part, part_lse = _flash(*(_take_padded(t, index) for t in (query, key, value)), 0.0, True, scale=scale)
            out[index[real]] = part.transpose(1, 2)[real]
            lse[index[real]] = part_lse.transpose(1, 2)[real]
        for queries, keys in layout.across:
            part, part_lse = _flash(
                _take(query, queries), _take(key, keys), _take(value, keys), 0.0, False, scale=scale
            )
            own, own_lse = out[queries], lse[queries]
            part, part_lse = part.squeeze(0).transpose(0, 1), part_lse.squeeze(0).transpose(0, 1)
            share = torch.sigmoid(part_lse - own_lse).unsqueeze(-1).to(own.dtype)
            out[queries] = torch.lerp(own, part, share)
            lse[queries] = torch.logaddexp(own_lse, part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout: SegmentLayout = ctx.layout
        grad = grads[0].contiguous()
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key = torch.zeros_like(key, memory_format=torch.contiguous_format)
        grad_value = torch.zeros_like(value, memory_format=torch.contiguous_format)
        for rows in layout.causal:
            parts = _flash_backward(
                *(_take(t, rows) for t in (grad, query, key, value, out)),
                _take(lse.unsqueeze(-1), rows).squeeze(-1),
                0.0,
                True,
                scale=ctx.scale,
            )
            for total, part in zip((grad_query, grad_key, grad_value), parts, strict=True):
                total[rows] = part.squeeze(0).transpose(0, 1)
        for index, real in layout.padded:
            hidden = ~real[:, None, :]
            parts = _flash_backward(
                *(_take_padded(t, index) for t in (grad, query, key, value, out)),
                _take_padded(lse.unsqueeze(-1), index).squeeze(-1).masked_fill(hidden, _NEVER),
                0.0,
                True,
                scale=ctx.scale,
            )
            for total, part in zip((grad_query, grad_key, grad_value), parts, strict=True):
                total[index[real]] = part.transpose(1, 2)[real]
        for queries, keys in layout.across:
            part_query, part_key, part_value = _flash_backward(
                _take(grad, queries),
                _take(query, queries),
                _take(key, keys),
                _take(value, keys),
                _take(out, queries),
                _take(lse.unsqueeze(-1), queries).squeeze(-1),
                0.0,
                False,
                scale=ctx.scale,
            )
            _add(grad_query, queries, part_query)
            _add(grad_key, keys, part_key)
            _add(grad_value, keys, part_value)
        return grad_query, grad_key, grad_value, None, None


def flex_block_mask(layout: SegmentLayout, device: torch.device) -> BlockMask:
    """The forest as a FlexAttention block mask: q sees k iff k <= q < subtree_end[k]."""
    ends = layout.subtree_end.to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return create_block_mask(sees, None, None, len(ends), len(ends), device=str(device))


@dataclass(slots=True)
class ForestCell:
    """The forest that a model's layers attend over. One a model, set before each forward pass.

    It travels beside the tensors because Megatron's activation recompute passes tensors only; it must stay until the
    backward pass is done.
    """

    layout: SegmentLayout | None = None
    block_mask: BlockMask | None = field(default=None)  # on GPU


class TreeCoreAttention(torch.nn.Module):
    """Megatron's core attention over the forest in `cell`. Takes [N, 1, heads, width], gives [N, 1, heads * width].

    Built by the layer spec with DotProductAttention's arguments. Dropout is not supported: a shared prefix would get
    one draw for all its branches.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if config.attention_dropout != 0.0:
            raise ValueError("tree attention has no dropout; set attention_dropout to 0")
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cell = ForestCell()  # replaced by the model's

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_unused: Any) -> Tensor:
        """The mask argument is ignored: the forest says who sees whom."""
        layout = self.cell.layout
        assert layout is not None, "the forest must be set before the forward pass"
        if query.device.type == "cpu":
            out = SegmentAttention.apply(query[:, 0], key[:, 0], value[:, 0], layout, self.scale)
            return out.reshape(query.shape[0], 1, -1)
        return self.flex(query, key, value, self.cell.block_mask)

    def flex(self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None) -> Tensor:
        """The FlexAttention form of `forward`."""
        q, k, v = (t.permute(1, 2, 0, 3).contiguous() for t in (query, key, value))
        out = flex_attention(q, k, v, block_mask=block_mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        assert isinstance(out, Tensor)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict:
        """Nothing of its own goes into a checkpoint."""
        return {}
