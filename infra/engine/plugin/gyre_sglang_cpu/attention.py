"""SGLang's `torch_native` attention with two costs removed.

Stock decoding runs one attention call a sequence and layer; here sequences of like length share one padded call. Stock
prefill behind a cached prefix computes the prefix's queries too and throws them away; here only the new queries are
computed. On the reference CPU with 16 calls in flight: decoding attention 0.76 ms instead of 1.97 ms a layer; 200 new
tokens behind 3,000 cached ones: 3 ms instead of 21 ms a layer. Cross attention and sliding windows stay stock.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

# A masked SDPA call costs about three times as much a score as a causal one (measured 2.5 to 4), so computing the new
# queries alone pays when they are fewer than a third of all.
MASKED_COST = 3


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that share one padded attention call.

    Legend: B sequences of the group, L its longest length.
    """

    rows_B: torch.Tensor  # their positions in the batch
    slots_BL: torch.Tensor  # flattened [B * L]: KV slot of each token, 0 beyond a sequence's end
    mask_B11L: torch.Tensor | None  # 0 at tokens, -inf beyond the end; None when all are of one length


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of the batch in groups whose shortest length is at least half of the longest: padding at most doubles.

    Example: group_by_length([10, 100, 6, 60]) == [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    for index in order:
        if groups and 2 * lengths[index] >= lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


class BatchedTorchNativeBackend(TorchNativeAttnBackend):
    """Drop-in for `--attention-backend torch_native`."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._groups: list[DecodeGroup] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = None
        if forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None:
            self._groups = self._plan_decode(forward_batch)

    def _plan_decode(self, forward_batch: Any) -> list[DecodeGroup]:
        lengths: list[int] = forward_batch.seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        groups = []
        for rows in group_by_length(lengths):
            rows_B = torch.tensor(rows)
            longest, shortest = lengths[rows[0]], lengths[rows[-1]]
            slots_BL = table[forward_batch.req_pool_indices[rows_B], :longest]
            mask_B11L = None
            if shortest != longest:
                beyond_BL = torch.arange(longest) >= forward_batch.seq_lens[rows_B].unsqueeze(1)
                slots_BL = slots_BL.masked_fill(beyond_BL, 0)
                mask_B11L = torch.zeros(beyond_BL.shape).masked_fill_(beyond_BL, -torch.inf)[:, None, None, :]
            groups.append(DecodeGroup(rows_B, slots_BL.flatten(), mask_B11L))
        return groups

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        window = layer.sliding_window_size
        stock = (
            self._groups is None
            or layer.is_cross_attention
            or (window is not None and window > -1)
            or layer.qk_head_dim != layer.v_head_dim
            or keys.dtype != q.dtype
        )
        if stock:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        num_kv, dim = layer.tp_k_head_num, layer.qk_head_dim
        # The query heads that share a key head are one head's queries: no copy of keys for grouped attention.
        queries = q.reshape(-1, num_kv, layer.tp_q_head_num // num_kv, dim)
        output = torch.empty_like(queries)
        for group in self._groups:
            shape = (len(group.rows_B), -1, num_kv, dim)
            mask = group.mask_B11L
            output[group.rows_B] = scaled_dot_product_attention(
                queries[group.rows_B],
                keys.index_select(0, group.slots_BL).view(shape).transpose(1, 2),
                values.index_select(0, group.slots_BL).view(shape).transpose(1, 2),
                attn_mask=mask if mask is None else mask.to(q.dtype),
                scale=layer.scaling,
            )
        return output.view(-1, layer.tp_q_head_num * dim)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or sliding_window_size is not None or not causal or k_cache.dtype != query.dtype:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        start = 0
        lengths = zip(extend_prefix_lens.tolist(), extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
        for row, (prefix, num_new, total) in enumerate(lengths):
            slots = req_to_token[req_pool_indices[row], :total]
            keys = k_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)  # [1, kv heads, total, dim]
            values = v_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            queries = query[start : start + num_new].transpose(0, 1).unsqueeze(0)  # [1, heads, new, dim]
            mask = None
            skipped = 0
            if MASKED_COST * num_new < total:
                mask = torch.zeros(num_new, total, dtype=query.dtype)
                mask.masked_fill_(torch.ones(num_new, total, dtype=torch.bool).triu_(prefix + 1), -torch.inf)
            elif prefix:  # long extension: one causal call over everything is cheaper
                queries = torch.nn.functional.pad(queries, (0, 0, prefix, 0))
                skipped = prefix
            result = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=enable_gqa
            )
            output[start : start + num_new] = result[0, :, skipped:].transpose(0, 1)
            start += num_new
        return output
