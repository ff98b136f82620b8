"""Copies between the "device" KV pool and the host pool of the hierarchical cache, in plain indexing.

Device buffers are [token, head, dim] a layer; keys of all layers stand before values of all layers where both come in
one list. `layer_first` host buffers are alike; `page_first_direct` ones (what Mooncake Store takes) are
[page, layer, slot, head, dim]. Parameters are named as SGLang names them: it passes them by name.
"""

from collections.abc import Sequence

import torch

Buffers = Sequence[torch.Tensor]


def copy_layer_first(
    src_layers: Buffers,
    dst_layers: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows `src_indices` of each source into rows `dst_indices` of its target."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(target[dst_indices].shape)


def load_layer_from_pages(
    src_ptrs: Buffers,
    dst_ptrs: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of host pages (`src_ptrs`) into rows of that layer's device buffers."""
    page, slot = src_indices // page_size, src_indices % page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[page, layer_id, slot]


def store_layers_to_pages(
    src_ptrs: Buffers,
    dst_ptrs: Buffers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of all layers' device buffers (`src_ptrs`) into host pages."""
    page, slot = dst_indices // page_size, dst_indices % page_size
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for index, host in enumerate(dst_ptrs):
        for layer, device in enumerate(src_ptrs[index * num_layers : (index + 1) * num_layers]):
            host[page, layer, slot] = device[src_indices]
