"""Pictures of simulations and their page."""

import itertools

import pytest

from gyre_core.sim.pictures import hours_png, page_html, timeline_png, utilisation_png
from gyre_core.sim.world import simulate
from tests.support.worlds import small

PNG = b"\x89PNG"


def test_recorded_simulation_has_a_timeline_and_others_are_refused() -> None:
    result = simulate(small(steps=2), "elastic", record=True)
    assert timeline_png(result, title="t").startswith(PNG)
    # Spans of a cell follow each other without a gap from the start to the end.
    mine = [span for span in result.spans if span.cell_id == "cell-0"]
    assert mine[0].start_s == 0.0
    assert all(left.end_s == right.start_s for left, right in itertools.pairwise(mine))
    assert mine[-1].end_s == pytest.approx(result.hours * 3600)
    with pytest.raises(ValueError, match="not recorded"):
        timeline_png(simulate(small(steps=2), "elastic"), title="t")


def test_page_holds_its_pictures_and_escapes_what_it_is_given() -> None:
    shares = {"elastic": {"serving": 0.7, "training": 0.3}}
    page = page_html("a <b>", {"hours": 1.5}, {"u": utilisation_png(shares, title="u")})
    assert "a &lt;b&gt;" in page
    assert "data:image/png;base64," in page
    assert hours_png({"elastic": 2.0}, {"elastic": 2.1}, title="h").startswith(PNG)
