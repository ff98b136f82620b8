"""The outcome of one simulation, as plain data."""

from dataclasses import dataclass, field

from gyre_core.pictures import CellSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a policy did with a scenario.

    Example: result.hours, result.steps_per_hour, result.fraction_of_bound
    """

    policy: str
    seed: int
    steps: int
    hours: float
    steps_per_hour: float
    bound_hours: float  # max(work / devices, critical path / (k + 1)), no policy can be faster
    work_hours: float  # the first of the two: every device busy at full load
    path_hours: float  # the second: each rollout alone on an engine, steps as close as staleness lets them be
    utilisation: float  # share of cell time in serving, training or the optimizer
    useful_share: float  # share of cell time that the least possible work would take
    shares: dict[str, float]  # kind of cell time -> share, idle by cause
    rollouts: int
    clipped_share: float  # rollouts ended by the time limit
    tokens_per_step: float  # sampled
    mean_execution_h: float
    mean_query_h: float
    queries_4h_share: float
    staleness_mean: float
    staleness_max: int
    moves_per_step: float
    relocated_calls: int
    wall_s: float
    spans: list[CellSpan] = field(default_factory=list)
    levels: list[tuple[float, int, int]] = field(default_factory=list)
    published_s: list[float] = field(default_factory=list)

    @property
    def fraction_of_bound(self) -> float:
        """1: as fast as anything can be."""
        return self.bound_hours / self.hours if self.hours else 0.0

    def as_json(self) -> dict[str, object]:
        """Everything but the pictures' data."""
        skip = {"spans", "levels", "published_s", "wall_s"}
        names = [name for name in Result.__dataclass_fields__ if name not in skip]
        values = {name: getattr(self, name) for name in names}
        return {**_rounded(values), "fraction_of_bound": round(self.fraction_of_bound, 4)}


def _rounded(values: dict[str, object]) -> dict[str, object]:
    return {
        name: round(value, 4) if isinstance(value, float) else _rounded(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
