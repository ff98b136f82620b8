"""Pictures of a run as PNG bytes: the reward curve and the cell timeline. No global matplotlib state."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpan:
    """One stretch of a cell's time.

    Example: CellSpan(cell_id="cell-0", kind="rollout", start_s=0.0, end_s=12.5)
    """

    cell_id: str
    kind: str  # rollout | training | switch | idle
    start_s: float  # since the run's start
    end_s: float


_COLOURS = {"rollout": "#3b7dd8", "training": "#e07b39", "switch": "#8a8f98", "idle": "#e4e6ea"}


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


def cell_timeline_png(spans: Sequence[CellSpan], *, title: str) -> bytes:
    """One bar a cell: when it served, trained, switched, idled. Seconds since the run's start."""
    cells = sorted({span.cell_id for span in spans})
    figure = Figure(figsize=(7.2, 1.5 + 0.5 * max(1, len(cells))), dpi=110, layout="constrained")
    axes = figure.subplots()
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
    axes.set(xlabel="seconds since the start", title=title)
    if spans:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
