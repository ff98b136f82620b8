"""When a time-boxed run stops."""

import pytest

from gyre_core.clock import ManualClock
from gyre_core.time_box import TimeBox


def steps_that_begin(max_wall_s: float | None, durations_s: list[float], *, before_s: float = 0.0) -> int:
    clock = ManualClock()
    box = TimeBox(max_wall_s, clock=clock)
    clock.advance(before_s)  # start-up and the first evaluation count
    for begun, duration_s in enumerate(durations_s):
        if not box.has_room():
            return begun
        clock.advance(duration_s)
    return len(durations_s)


@pytest.mark.parametrize(
    ("max_wall_s", "durations_s", "before_s", "begun"),
    [
        (None, [10, 10, 10], 0, 3),  # no box
        (30, [10, 10, 10, 10], 0, 3),  # the third ends at 30, a fourth would end at 40
        (35, [10, 10, 10, 10], 10, 2),  # 10 of start-up: two end at 30, a third would end at 40
        (30, [4, 15, 4, 4], 0, 2),  # after 19 s another step of 15 s would end at 34
        (5, [60, 60], 0, 1),  # longer than its box: one step all the same
        (5, [1, 1], 20, 1),  # start-up alone took the box: one step all the same
    ],
)
def test_time_box_begins_only_steps_that_end_inside_but_always_one(
    max_wall_s: float | None, durations_s: list[float], before_s: float, begun: int
) -> None:
    assert steps_that_begin(max_wall_s, durations_s, before_s=before_s) == begun


def test_time_box_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="max_wall_s is 0"):
        TimeBox(0.0)
