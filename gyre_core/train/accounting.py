"""Where a step's wall time went, as seconds and shares; numbers in, numbers out.

Phases of a step, which add up to its wall time:

    waiting           for rollouts, for the cell's change of role, and for what no other phase covers (hand-off)
    packing           branches read and packed into micro-steps
    forward_backward  micro-steps
    gradients         summed over ranks and replicas, divided, measured
    optimizer         the rest of the optimizer step, and the weights' digest
    checkpoint        what the step stood still for (the copy, and the end of the writing)
    publication       weights to the engine, and the export where one was due
"""

from collections.abc import Mapping

PHASES = ("waiting", "packing", "forward_backward", "gradients", "optimizer", "checkpoint", "publication")


def phase_seconds(stats: Mapping[str, float], *, step_s: float) -> dict[str, float]:
    """`<phase>_s` for each phase: what `stats` measured (else 0), and as waiting what is left of `step_s`."""
    seconds = {phase: max(0.0, float(stats.get(f"{phase}_s", 0.0))) for phase in PHASES if phase != "waiting"}
    waiting = max(0.0, step_s - sum(seconds.values()))
    return {f"{phase}_s": waiting if phase == "waiting" else seconds[phase] for phase in PHASES}


def phase_shares(stats: Mapping[str, float]) -> dict[str, float] | None:
    """Share of the step's wall time by phase; None for a record of a Gyre that did not measure."""
    seconds = [stats.get(f"{phase}_s") for phase in PHASES]
    measured = [value for value in seconds if value is not None]
    total = sum(measured)
    if len(measured) < len(PHASES) or total <= 0:
        return None
    return {phase: value / total for phase, value in zip(PHASES, measured, strict=True)}


def flops_per_s(stats: Mapping[str, float]) -> float:
    """The model's floating-point operations (train/flops.py) in a second of forward and backward; 0 when unknown."""
    seconds = float(stats.get("forward_backward_s", 0.0))
    return float(stats.get("flops", 0.0)) / seconds if seconds > 0 else 0.0
