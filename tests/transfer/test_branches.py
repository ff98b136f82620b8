"""Training branches over Arrow: exact there and back, foreign bytes refused."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.transfer.branches import branches_from_ipc, branches_to_ipc
from gyre_core.types import Role, TrainingBranch


def make_branch(seed: int, length: int, index: int) -> TrainingBranch:
    rng = np.random.default_rng(seed)
    target = rng.random(length) < 0.4
    return TrainingBranch(
        rollout_id=f"r{seed}",
        group_id="g",
        branch=index,
        role=Role.SUB_AGENT,
        token_ids=rng.integers(0, 500, length).astype(np.int32),
        target=target,
        sampler_logprobs=np.where(target, -rng.random(length), 0).astype(np.float32),
        weights=np.where(target, 0.25, 0).astype(np.float32),
        advantage=float(rng.normal()),
        temperature=0.7,
        min_version=3,
    )


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=5))
def test_branches_round_trip_is_exact(shapes: list[tuple[int, int]]) -> None:
    branches = [make_branch(seed, length, index) for index, (seed, length) in enumerate(shapes)]
    back = branches_from_ipc(branches_to_ipc(branches))
    assert len(back) == len(branches)
    for ours, theirs in zip(branches, back, strict=True):
        for name in TrainingBranch.__dataclass_fields__:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == other.dtype
                np.testing.assert_array_equal(mine, other)
            else:
                assert mine == other


def test_branches_foreign_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="not an Arrow stream"):
        branches_from_ipc(b"PAR1 something else")


def test_branches_other_schema_is_refused() -> None:
    table = pa.table({"a": [1]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="another schema"):
        branches_from_ipc(sink.getvalue().to_pybytes())
