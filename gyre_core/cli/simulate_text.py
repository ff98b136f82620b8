"""Tables of `gyre simulate` and `gyre plan` for a terminal."""

from typing import Any


def comparison_text(result: dict[str, Any]) -> str:
    """A comparison of policies, one line each."""
    published = result["published"]["hours"]
    lines = [
        f"{result['title']}: {result['steps']} steps, staleness {result['staleness']}, seeds {result['seeds']}",
        f"{'policy':22s} {'hours':>8s} {'published':>10s} {'of bound':>9s} {'busy':>6s} {'idle, largest cause':28s}",
    ]
    for name, hours in result["hours"].items():
        policy = result["policies"][name]
        idle = {kind: share for kind, share in policy["shares"].items() if kind not in _BUSY}
        cause = max(idle, key=lambda kind: idle[kind], default="")
        lines.append(
            f"{name + _split(result, name):22s} {hours:8.2f} {published.get(name, float('nan')):10.2f} "
            f"{policy['fraction_of_bound']:9.3f} {policy['utilisation']:6.1%} "
            f"{cause + f' {idle[cause]:.1%}' if cause else '':28s}".replace("nan", "  -")
        )
    for name in _RATIOS:
        if name in result:
            lines.append(f"{name:36s} {result[name]:.3f}")
    lines.append(f"one simulation {result['wall_s']} s at most, all {result['total_wall_s']} s")
    return "\n".join(lines)


_BUSY = {"serving", "training", "optimizer"}
_RATIOS = (
    "elastic_over_colocate",
    "elastic_over_async",
    "elastic_over_async_half",
    "elastic_over_async_stream",
    "elastic_over_async_stream_half",
    "predictive_over_elastic",
)


def _split(result: dict[str, Any], name: str) -> str:
    found = result["splits"].get(name)
    return f" ({found['train_cells']} train)" if found else ""
