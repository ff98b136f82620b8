"""When a run is worth a warning: held-out reward fell, or too many rollouts could not be counted.

Enters: what a run has committed. Leaves: a message, or None. Pure; tasks/alerts.py turns messages into Prefect events,
which automations hear.
"""

import math
from collections.abc import Mapping, Sequence

from gyre_core.types import GRADED_OUTCOMES

# Rewards lie in 0..1, so one has a standard deviation of 0.5 at most, and the difference of two means over n rewards
# each one of 0.5 * sqrt(2 / n) at most. Chance passes twice that in less than one of 40 comparisons.
_DEVIATIONS = 2.0
_LARGEST_DEVIATION = 0.5
_LEAST_DROP = 0.02  # with very many rewards: smaller drops are not worth anybody's time
_BAD_SHARE = 0.25  # of a step's rollouts that were excluded
_LEAST_ROLLOUTS = 4  # below it one bad rollout would be a quarter


def heldout_warning(rewards: Sequence[float], num_rewards: int) -> str | None:
    """The newest of a run's held-out rewards (means over `num_rewards` rollouts each), against the best before it."""
    if len(rewards) < 2 or num_rewards < 1:
        return None
    best, newest = max(rewards[:-1]), rewards[-1]
    allowed = max(_LEAST_DROP, _DEVIATIONS * _LARGEST_DEVIATION * math.sqrt(2 / num_rewards))
    if best - newest <= allowed:
        return None
    return f"held-out reward fell from {best:.3f} to {newest:.3f}; chance explains {allowed:.3f} at most"


def outcomes_warning(outcomes: Mapping[str, int], reasons: Mapping[str, str]) -> str | None:
    """Rollouts by outcome, with the excluded ones' reasons: whether a quarter of them or more could not be counted."""
    total = sum(outcomes.values())
    bad = {name: count for name, count in outcomes.items() if count and name not in GRADED_OUTCOMES}
    if total < _LEAST_ROLLOUTS or sum(bad.values()) < _BAD_SHARE * total:
        return None
    counts = ", ".join(f"{count} {name}" for name, count in sorted(bad.items()))
    example = next((f"; {name}: {reason}" for name, reason in sorted(reasons.items())), "")
    return f"{sum(bad.values())} of {total} rollouts could not be counted ({counts}){example}"
