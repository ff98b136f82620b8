"""What an emulated rollout does, drawn from the workload's seed and the rollout's id: pure, equal in every process.

Enters: the workload and a rollout's id (`<group>-<member>`). Leaves: tokens of each call, tokens and seconds of each
tool, the reward. Rollouts of one group share a factor of their length. The distributions are those of the simulator.
Or: a file of plans, those of a stored run (gyre_core/bench/elastic_trace.py).
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gyre_core.config.emulation import Workload
from gyre_core.rollout.dispatch import stable_seed

TURN_TOKENS = 8  # what the template puts around two messages; part of the tools' tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """One rollout, on the cluster's clock.

    Example: RolloutPlan(call_tokens=(7, 9), tool_tokens=(20, 12), tools_s=(30.0, 41.0), reward=1.0)
    """

    call_tokens: tuple[int, ...]  # sampled by each call
    tool_tokens: tuple[int, ...]  # of what the tool after each call answers
    tools_s: tuple[float, ...]  # how long it takes
    reward: float
    failed: bool = False  # ends early for reasons outside; nobody grades it
    start_s: float = 0.0  # before the first call
    prompt_tokens: int | None = None  # of the first call; None: the workload's
    grade_s: float | None = None  # of the verifier; None: the workload's

    @property
    def sampled_tokens(self) -> int:
        return sum(self.call_tokens)


def plan_rollout(workload: Workload, rollout_id: str) -> RolloutPlan:
    """The rollout's work. Raises ValueError for an id without a member number, or one that no plan is there for."""
    if workload.plans is not None:
        plans = read_plans(workload.plans)
        if rollout_id not in plans:
            raise ValueError(f"{workload.plans} has no plan of rollout {rollout_id}: its seed or problems are others")
        return plans[rollout_id]
    group_id, found, number = rollout_id.rpartition("-")
    if not found or not number.isdigit():
        raise ValueError(f"rollout id {rollout_id!r} does not end with a member's number")
    w = workload
    of_group = np.random.default_rng(stable_seed(w.seed, "group", group_id))
    rng = np.random.default_rng(stable_seed(w.seed, "rollout", rollout_id))
    z = w.sigma_group * of_group.standard_normal() + w.sigma_rollout * rng.standard_normal()
    signal = bool(of_group.random() < w.signal_share)
    tokens = min(w.sampled_tokens * float(np.exp(z - (w.sigma_group**2 + w.sigma_rollout**2) / 2)), w.max_tokens)
    tool_noise = float(np.exp(w.tool_sigma * rng.standard_normal() - w.tool_sigma**2 / 2))
    tool_s = w.tool_s * (tokens / w.sampled_tokens) * tool_noise
    shares = rng.exponential(1.0, w.segments) + 0.25
    tool_shares = rng.pareto(1.6, w.segments) + 0.05
    calls = _whole(tokens * shares / shares.sum())
    others = _whole(tokens * (w.unique_ratio - 1.0) * shares / shares.sum())
    failed = bool(rng.random() < w.failing_share)
    end = int(rng.integers(1, w.segments + 1)) if failed else w.segments
    return RolloutPlan(
        call_tokens=tuple(calls[:end]),
        tool_tokens=tuple(max(1, count - TURN_TOKENS) for count in others[:end]),
        tools_s=tuple(float(value) for value in (tool_s * tool_shares / tool_shares.sum())[:end]),
        reward=float(int(number) % 2) if signal else 1.0,
        failed=failed,
    )


@functools.lru_cache(maxsize=4)
def read_plans(path: Path) -> dict[str, RolloutPlan]:
    """The plans of a file that `write_plans` wrote, by rollout."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    lists = ("call_tokens", "tool_tokens", "tools_s")
    return {name: RolloutPlan(**(row | {key: tuple(row[key]) for key in lists})) for name, row in rows.items()}


def write_plans(path: Path, plans: Mapping[str, RolloutPlan]) -> None:
    """For `emulate.workload.plans`."""
    path.write_text(json.dumps({name: asdict(plan) for name, plan in plans.items()}), encoding="utf-8")


def _whole(values: np.ndarray) -> list[int]:
    """Whole numbers of at least 1 whose sums stay as near to the values' as that allows."""
    ends = np.maximum.accumulate(np.round(np.cumsum(values))).astype(int)
    return [max(1, int(count)) for count in np.diff(ends, prepend=0)]
