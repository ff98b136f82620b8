"""The engine's view of the weights and its checksums, against values of a real server and of its GPU kernel."""

import pytest
import torch

from gyre_core.errors import TransferError
from gyre_core.transfer.layout import (
    EngineRanks,
    device_checksum,
    engine_tensors,
    host_checksum,
    host_tensors,
    overall_checksum,
)
from tests.support.fixtures import recorded_body


def recorded_checksums() -> dict[str, str]:
    return recorded_body("weights_checksum")["ranks"][0]["checksums"]


def test_host_checksum_of_ones_is_the_servers() -> None:
    sums = recorded_checksums()
    assert host_checksum(torch.ones(64)) == sums["model.norm.weight"] == "2f20cd03c9cd392a"
    assert host_checksum(torch.ones(16)) == sums["model.layers.0.self_attn.q_norm.weight"]


def test_host_checksum_is_of_values_not_of_strides() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert host_checksum(matrix.t()) == host_checksum(matrix.t().contiguous())


def test_overall_checksum_is_the_servers() -> None:
    assert overall_checksum(recorded_checksums()) == recorded_body("weights_checksum")["ranks"][0]["per_gpu_checksum"]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        # Values of sglang.kernels.ops.memory.gpu_tensor_hash (0.5.23), run by Triton's interpreter.
        (torch.arange(10, dtype=torch.float32), "3015603431603089"),
        (torch.arange(20000, dtype=torch.float32) / 7, "23198a2f021ef117"),
        ((torch.arange(8195) / 3).to(torch.bfloat16), "d29b18a7aca9bfd3"),
        (torch.ones(3, dtype=torch.uint8), "8b5e3c7661a49051"),
        (torch.empty(0), "0000000000000000"),
    ],
)
def test_device_checksum_is_the_gpu_kernels(tensor: torch.Tensor, expected: str) -> None:
    assert device_checksum(tensor) == expected


def weights() -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.full((4, 2), 1.0),
        f"{layer}self_attn.q_proj.weight": torch.full((4, 2), 2.0),
        f"{layer}self_attn.k_proj.weight": torch.full((2, 2), 3.0),
        f"{layer}self_attn.v_proj.weight": torch.full((2, 2), 4.0),
        f"{layer}mlp.gate_proj.weight": torch.full((3, 2), 5.0),
        f"{layer}mlp.up_proj.weight": torch.full((3, 2), 6.0),
    }


NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
]


def test_engine_tensors_fuses_query_key_value_and_gate_up_in_order() -> None:
    held = engine_tensors(weights(), NAMES)
    assert list(held) == NAMES
    assert held[NAMES[1]][:, 0].tolist() == [2, 2, 2, 2, 3, 3, 4, 4]
    assert held[NAMES[2]][:, 0].tolist() == [5, 5, 5, 6, 6, 6]
    assert all(tensor.is_contiguous() for tensor in held.values())


def test_engine_tensors_tied_head_is_the_embedding() -> None:
    held = engine_tensors(weights(), [*NAMES, "lm_head.weight"])
    assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])


def test_engine_tensors_head_that_equals_the_embedding_may_be_left_over() -> None:
    tied = weights() | {"lm_head.weight": torch.full((4, 2), 1.0)}
    assert list(engine_tensors(tied, NAMES)) == NAMES
    untied = weights() | {"lm_head.weight": torch.full((4, 2), 9.0)}
    with pytest.raises(TransferError, match=r"no place for lm_head\.weight"):
        engine_tensors(untied, NAMES)


def test_engine_tensors_missing_weight_is_named() -> None:
    lacking = weights()
    del lacking["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(TransferError, match=r"k_proj\.weight, which the published weights lack"):
        engine_tensors(lacking, NAMES)


def test_engine_tensors_weight_that_the_engine_lacks_is_named() -> None:
    with pytest.raises(TransferError, match=r"no place for model\.layers\.0\.mlp\.gate_proj\.weight"):
        engine_tensors(weights(), NAMES[:2])


def numbered(rows: int, columns: int = 4) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def test_engine_tensors_of_ranks_are_heads_rows_and_columns() -> None:
    layer = "model.layers.0."
    full = {
        "model.embed_tokens.weight": numbered(100),
        f"{layer}self_attn.q_proj.weight": numbered(8),
        f"{layer}self_attn.k_proj.weight": numbered(4),
        f"{layer}self_attn.v_proj.weight": numbered(4) + 100,
        f"{layer}self_attn.o_proj.weight": numbered(4, 8),
        f"{layer}self_attn.q_norm.weight": torch.ones(2),
        f"{layer}mlp.gate_proj.weight": numbered(6),
        f"{layer}mlp.up_proj.weight": numbered(6) + 100,
        f"{layer}mlp.down_proj.weight": numbered(4, 6),
    }
    names = [
        "model.embed_tokens.weight",
        *(f"{layer}self_attn.{name}.weight" for name in ("qkv_proj", "o_proj", "q_norm")),
        *(f"{layer}mlp.{name}.weight" for name in ("gate_up_proj", "down_proj")),
    ]
    held = engine_tensors(full, names, ranks=EngineRanks(count=2, kv_heads=2), rank=1)
    embedding, qkv, out, norm, gate_up, down = held.values()
    assert embedding.shape == (64, 4) and embedding[:36].equal(numbered(100)[64:]) and not embedding[36:].any()
    assert qkv.equal(torch.cat([numbered(8)[4:], numbered(4)[2:], numbered(4)[2:] + 100]))
    assert out.equal(numbered(4, 8)[:, 4:]) and out.is_contiguous()
    assert norm.equal(torch.ones(2))
    assert gate_up.equal(torch.cat([numbered(6)[3:], numbered(6)[3:] + 100]))
    assert down.equal(numbered(4, 6)[:, 3:])
    # Four ranks share two key-value heads: ranks 2 and 3 hold the second one.
    four = EngineRanks(count=4, kv_heads=2)
    qkv = f"{layer}self_attn.qkv_proj.weight"
    attention = {
        name: tensor for name, tensor in full.items() if any(part in name for part in (".q_p", ".k_p", ".v_p"))
    }
    for rank, head in enumerate((0, 0, 1, 1)):
        part = engine_tensors(attention, [qkv], ranks=four, rank=rank)[qkv]
        keys = numbered(4)[2 * head : 2 * head + 2]
        assert part.equal(torch.cat([numbered(8)[2 * rank : 2 * rank + 2], keys, keys + 100]))


def test_engine_tensors_that_ranks_cannot_share_are_refused() -> None:
    two = EngineRanks(count=2, kv_heads=2)
    with pytest.raises(TransferError, match="3 rows or columns, which 2 ranks cannot share"):
        engine_tensors({"a.q_proj.weight": numbered(3)}, ["a.q_proj.weight"], ranks=two)
    with pytest.raises(TransferError, match=r"not known how an engine of 2 ranks splits a\.experts\.weight"):
        engine_tensors({"a.experts.weight": numbered(4)}, ["a.experts.weight"], ranks=two)
    with pytest.raises(TransferError, match="3 key-value heads and 2 ranks"):
        engine_tensors({"a.k_proj.weight": numbered(6)}, ["a.k_proj.weight"], ranks=EngineRanks(count=2, kv_heads=3))


def test_host_tensors_converts_and_refuses_what_is_not_finite() -> None:
    converted = host_tensors([("a", torch.ones(2, dtype=torch.float64))], torch.bfloat16)
    assert converted["a"].dtype is torch.bfloat16
    with pytest.raises(TransferError, match="not finite in b"):
        host_tensors([("a", torch.ones(1)), ("b", torch.tensor([1.0, torch.nan]))], torch.float32)
    with pytest.raises(TransferError, match="a twice"):
        host_tensors([("a", torch.ones(1)), ("a", torch.ones(1))], torch.float32)
