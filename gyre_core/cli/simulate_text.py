"""Tables of `gyre simulate` and `gyre plan` for a terminal."""

from typing import Any


def comparison_text(result: dict[str, Any]) -> str:
    """A comparison of policies, one line each."""
    published = result["published"]["hours"]
    several = len(result["seeds"]) > 1
    spread = {name: f"{value:6.2f}" if several else " " * 6 for name, value in result["hours_plus_minus"].items()}
    lines = [
        f"{result['title']}: {result['steps']} steps, staleness {result['staleness']}, seeds {result['seeds']}",
        f"{'policy':22s} {'hours':>8s} {'+-' if several else '':>6s} {'published':>10s} {'of bound':>9s} {'busy':>6s} "
        f"{'idle, largest cause':28s}",
    ]
    for name, hours in result["hours"].items():
        policy = result["policies"][name]
        idle = {kind: share for kind, share in policy["shares"].items() if kind not in _BUSY}
        cause = max(idle, key=lambda kind: idle[kind], default="")
        lines.append(
            f"{name + _split(result, name):22s} {hours:8.2f} {spread[name]} {published.get(name, float('nan')):10.2f} "
            f"{policy['fraction_of_bound']:9.3f} {policy['utilisation']:6.1%} "
            f"{cause + f' {idle[cause]:.1%}' if cause else '':28s}".replace("nan", "  -")
        )
    for name in _RATIOS:
        if name in result:
            by_seed = result["ratios_by_seed"][name]
            shown = f"  ({min(by_seed):.3f} to {max(by_seed):.3f} over the seeds)" if several else ""
            lines.append(f"{name:36s} {result[name]:.3f}{shown}")
    lines.append(f"one simulation {result['wall_s']} s at most, all {result['total_wall_s']} s")
    return "\n".join(lines)


_BUSY = {"serving", "training", "optimizer"}
_RATIOS = (
    "elastic_over_colocate",
    "elastic_over_colocate_ahead",
    "elastic_over_async",
    "elastic_over_async_half",
    "elastic_over_async_stream",
    "elastic_over_async_stream_half",
    "predictive_over_elastic",
)


def _split(result: dict[str, Any], name: str) -> str:
    found = result["splits"].get(name)
    return f" ({found['train_cells']} train)" if found else ""


def trace_text(result: dict[str, Any]) -> str:
    """A run's measured speed beside its simulated one, then every policy on its trace."""
    lines = [
        f"trace of {result['run']}: {result['steps']} steps under {result['policy']}",
        f"measured   {result['measured_steps_per_hour']:10.2f} steps/h",
        f"simulated  {result['simulated_steps_per_hour']:10.2f} steps/h (ratio {result['ratio']})",
    ]
    lines += [f"{name:20s} {speed:10.2f} steps/h" for name, speed in result["steps_per_hour"].items()]
    return "\n".join(lines)


def sweep_text(result: dict[str, Any]) -> str:
    """One line a value: hours, and how many times longer each takes than elastic_predictive."""
    names = list(result["rows"][0]["hours"])
    lines = [f"{result['parameter']:>10s} " + " ".join(f"{name:>19s}" for name in names)]
    for row in result["rows"]:
        cells = [f"{row['hours'][name]:8.2f} h {row['over_predictive'][name]:6.3f} x" for name in names]
        lines.append(f"{row['value']:10g} " + " ".join(f"{cell:>19s}" for cell in cells))
    return "\n".join(lines)


def plan_text(result: dict[str, Any]) -> str:
    """The ranked table."""
    lines = [
        f"{result['workload']} on {result['gpus']} GPUs: {result['candidates']} candidates, seeds {result['seeds']}",
        f"{'policy':19s} {'cells':>5s} {'split':>5s} {'slots':>6s} {'phi':>3s} {'mu':>3s} {'k':>2s} "
        f"{'steps/h':>9s} {'+-':>7s} {'busy':>6s} {'limited by':14s}",
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['policy']:19s} {row['cells']:5d} {row['train_cells'] or '-':>5} {row['slots']:6d} {row['phi']:3d} "
            f"{row['mu']:3d} {row['staleness']:2d} {row['steps_per_hour']:9.3f} {row['plus_minus']:7.3f} "
            f"{row['utilisation']:6.1%} {row['limited_by']} ({row['its_removal_gains']:.2f}x)"
        )
    return "\n".join(lines)
