"""Pictures of a run as PNG bytes: the reward curve and the cell timeline. No global matplotlib state."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpan:
    """One stretch of a cell's time.

    Example: CellSpan(cell_id="cell-0", kind="rollout", start_s=0.0, end_s=12.5)
    """

    cell_id: str
    kind: str  # rollout | training | switch | idle | dead
    start_s: float  # since the run's start
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPoint:
    """The water level from this moment on.

    Example: LevelPoint(at_s=3.5, water_level=12, capacity=18)
    """

    at_s: float  # since the run's start
    water_level: int  # rollouts that need an engine
    capacity: int  # slots of the cells that serve


_COLOURS = {
    "rollout": "#3b7dd8",
    "training": "#e07b39",
    "switch": "#8a8f98",
    "idle": "#e4e6ea",
    "dead": "#b3261e",
}


def reward_curve_png(
    steps: Sequence[int], rewards: Sequence[float], heldout: Sequence[tuple[int, float]], *, title: str
) -> bytes:
    """Mean training reward of each step, at the version that sampled it, and held-out reward by policy version."""
    figure = Figure(figsize=(7.2, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    if steps:
        axes.plot(steps, rewards, marker="o", ms=3, lw=1.6, color="#3b7dd8", label="training")
    if heldout:
        versions, values = zip(*heldout, strict=True)
        axes.plot(versions, values, marker="s", ms=6, ls="--", lw=1.2, color="#e07b39", label="held-out")
        for version, value in heldout:
            axes.annotate(f"{value:.2f}", (version, value), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set(xlabel="policy version (optimizer steps)", ylabel="mean reward", ylim=(-0.02, 1.02), title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if steps or heldout:
        axes.legend(loc="lower right", frameon=False)
    return _png(figure)


def cell_timeline_png(spans: Sequence[CellSpan], *, title: str, levels: Sequence[LevelPoint] = ()) -> bytes:
    """One bar a cell: when it served, trained, switched, idled. Below it the water level beside the slots that serve.

    Seconds since the run's start.
    """
    cells = sorted({span.cell_id for span in spans}, reverse=True)  # the first cell on top
    bars = 0.9 + 0.5 * max(1, len(cells))
    figure = Figure(figsize=(7.2, bars + 0.6 + (1.6 if levels else 0.0)), dpi=110, layout="constrained")
    if levels:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(bars, 1.6))
        _draw_levels(below, levels)
    else:
        axes = below = figure.subplots()
    for kind, colour in _COLOURS.items():
        mine = [span for span in spans if span.kind == kind]
        if mine:
            axes.barh(
                [cells.index(span.cell_id) for span in mine],
                [span.end_s - span.start_s for span in mine],
                left=[span.start_s for span in mine],
                height=0.6,
                color=colour,
                label=kind,
            )
    axes.set_yticks(range(len(cells)), cells)
    axes.set_title(title)
    below.set_xlabel("seconds since the start")
    if spans:
        figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return _png(figure)


def _draw_levels(axes: Axes, levels: Sequence[LevelPoint]) -> None:
    at = [point.at_s for point in levels]
    axes.step(at, [point.water_level for point in levels], where="post", lw=1.4, color="#1b4f9c", label="water level")
    axes.step(
        at, [point.capacity for point in levels], where="post", lw=1.0, ls="--", color="#666666", label="serving slots"
    )
    axes.set_ylabel("rollouts", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.grid(alpha=0.3)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
