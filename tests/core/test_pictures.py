"""Pictures: valid PNG of the expected size, also for runs with nothing to show yet."""

import struct

import pytest

from gyre_core.pictures import CellSpan, cell_timeline_png, reward_curve_png


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize(("steps", "heldout"), [(0, []), (3, []), (0, [(0, 0.4)]), (5, [(0, 0.4), (5, 0.8)])])
def test_reward_curve_any_run_is_a_png(steps: int, heldout: list[tuple[int, float]]) -> None:
    png = reward_curve_png(range(steps), [0.1 * step for step in range(steps)], heldout, title="t")
    assert size_of(png) == (792, 374)


def test_cell_timeline_grows_with_the_cells() -> None:
    spans = [CellSpan(cell_id=f"cell-{i}", kind="rollout", start_s=0.0, end_s=1.0 + i) for i in range(3)]
    _, one = size_of(cell_timeline_png(spans[:1], title="t"))
    _, three = size_of(cell_timeline_png(spans, title="t"))
    assert three - one == 110  # two bars of half an inch at 110 dots
