"""Pictures of simulations as PNG bytes, and one HTML page that holds them all.

Enters: results (recorded ones for timelines). Leaves: bytes. No global matplotlib state.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gyre_core.pictures import LevelPoint, cell_timeline_png
from gyre_core.sim.result import Result

COLOURS = {
    "elastic": "#3b7dd8",
    "elastic_predictive": "#1f4e9c",
    "colocate": "#e07b39",
    "colocate_ahead": "#f0b48a",
    "async_off1": "#b3261e",
    "async_off1_half": "#d98880",
    "async_stream": "#2e8b57",
    "async_stream_half": "#8fbf9f",
}
_KINDS = {
    "serving": "#3b7dd8",
    "training": "#e07b39",
    "optimizer": "#f2b880",
    "switch": "#8a8f98",
    "weights": "#b9bec7",
    "no rollouts": "#e4e6ea",
    "waits for groups": "#d7c9e8",
    "waits for the barrier": "#c3a6de",
    "waits for the optimizer": "#eadff5",
    "dead": "#b3261e",
}


def timeline_png(result: Result, *, title: str, hours: float | None = None) -> bytes:
    """Who served, trained, switched and idled, with the water level below. `result` must have been recorded."""
    if not result.spans:
        raise ValueError("the simulation was not recorded: simulate(..., record=True)")
    end_s = min(result.hours, hours or result.hours) * 3600
    spans = [span for span in result.spans if span.start_s < end_s]
    every = max(1, len(result.levels) // 2000)
    levels = [
        LevelPoint(at_s=at_s, water_level=level, capacity=capacity)
        for at_s, level, capacity in result.levels[::every]
        if at_s < end_s
    ]
    return cell_timeline_png(spans, title=title, levels=levels)


def hours_png(hours: Mapping[str, float], published: Mapping[str, float], *, title: str) -> bytes:
    """A bar for each policy, a mark where a published number is."""
    figure = Figure(figsize=(7.2, 0.9 + 0.42 * len(hours)), dpi=110, layout="constrained")
    axes = figure.subplots()
    names = sorted(hours, key=lambda name: -hours[name])
    axes.barh(names, [hours[name] for name in names], color=[COLOURS.get(name, "#8a8f98") for name in names])
    for row, name in enumerate(names):
        axes.text(hours[name], row, f" {hours[name]:.1f}", va="center", fontsize=8)
        if name in published:
            axes.plot([published[name]], [row], marker="D", color="black", ms=5)
    axes.set(xlabel="hours (diamond: published)", title=title)
    axes.margins(x=0.12)
    return _png(figure)


def utilisation_png(shares: Mapping[str, Mapping[str, float]], *, title: str) -> bytes:
    """Where the cells' time goes under each policy."""
    figure = Figure(figsize=(7.2, 1.6 + 0.42 * len(shares)), dpi=110, layout="constrained")
    axes = figure.subplots()
    names = list(shares)[::-1]
    left = [0.0] * len(names)
    for kind, colour in _KINDS.items():
        values = [shares[name].get(kind, 0.0) for name in names]
        if any(value > 0.002 for value in values):
            axes.barh(names, values, left=left, color=colour, label=kind)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set(xlabel="share of cell time", xlim=(0, 1), title=title)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return _png(figure)


def lines_png(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], *, title: str, xlabel: str, ylabel: str
) -> bytes:
    """Curves over one parameter; a line at 1."""
    figure = Figure(figsize=(7.2, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(x, values, marker="o", ms=3.5, lw=1.6, label=name, color=COLOURS.get(name))
    axes.axhline(1.0, color="#8a8f98", lw=0.8)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def page_html(title: str, summary: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """One page without outside parts: a table of plain values, then the pictures with their captions."""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in summary.items()
    )
    figures = "".join(
        f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, data in pictures.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:15px sans-serif;max-width:820px;margin:2em auto}th{text-align:left;padding-right:1.5em;"
        "font-weight:normal;color:#555}img{max-width:100%}figure{margin:1.5em 0}figcaption{color:#555}</style>"
        f"<h1>{html.escape(title)}</h1><table>{rows}</table>{figures}</html>"
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
