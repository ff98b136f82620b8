"""The pictures of a comparison, written to a folder: PNGs and one HTML page.

Enters: a preset and its comparison. Leaves: files and their names. Timelines show the first steps of recorded
simulations; the speed-up against tail heaviness is a short sweep.
"""

from dataclasses import replace
from pathlib import Path

from gyre_core.sim.compare import MOVING
from gyre_core.sim.model import Scenario
from gyre_core.sim.pictures import hours_png, lines_png, page_html, timeline_png, utilisation_png
from gyre_core.sim.presets import Preset
from gyre_core.sim.sweep import sweep
from gyre_core.sim.world import simulate
from gyre_core.types import Json

SHOWN_STEPS = 4  # of a timeline
TAILS = (0.25, 0.5, 1.0, 2.0, 3.0)  # times the preset's spread of lengths
TIMELINES = ("elastic", "elastic_predictive", "colocate")


def write_pictures(folder: Path, preset: Preset, comparison: Json, *, seed: int) -> list[str]:
    """Write them; returns the files' names."""
    pictures = draw_pictures(preset, comparison, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, data in pictures.items():
        (folder / f"{name}.png").write_bytes(data)
        names.append(f"{name}.png")
    summary = {name: value for name, value in comparison.items() if isinstance(value, int | float | str)}
    page = page_html(f"Simulated schedules: {preset.title}", {**summary, **comparison["hours"]}, pictures)
    (folder / f"{preset.name}.html").write_text(page, encoding="utf-8")
    return [*names, f"{preset.name}.html"]


def draw_pictures(preset: Preset, comparison: Json, *, seed: int) -> dict[str, bytes]:
    """PNG bytes by name."""
    shares = {name: policy["shares"] for name, policy in comparison["policies"].items()}
    title = preset.title
    found = {
        "hours": hours_png(comparison["hours"], comparison["published"]["hours"], title=title),
        "utilisation": utilisation_png(shares, title=f"{title}: where the cells' time goes"),
        "tail": tail_png(preset.scenario, title=title, seed=seed),
    }
    shown = replace(preset.scenario, steps=SHOWN_STEPS)
    for name in TIMELINES:
        variant = MOVING[name]
        result = simulate(variant.of(shown), variant.policy, seed=seed, record=True)
        found[f"timeline-{name}"] = timeline_png(result, title=f"{name}: the first {SHOWN_STEPS} steps")
    return found


def tail_png(scenario: Scenario, *, title: str, seed: int) -> bytes:
    """How many times longer the others take than elastic_predictive, against the heaviness of the tail."""
    light = replace(scenario, workload=replace(scenario.workload, segments=3))
    rows = sweep(light, "tail", TAILS, seed=seed, steps=8)["rows"]
    names = [name for name in rows[0]["hours"] if name != "elastic_predictive"]
    return lines_png(
        TAILS,
        {name: [row["over_predictive"][name] for row in rows] for name in names},
        title=f"{title}: time beside elastic_predictive's",
        xlabel="spread of rollout lengths, times the preset's",
        ylabel="times longer",
    )
