"""Group-relative advantages (trajectories.md section 5).

Enters: the rewards of one group, None for an excluded member. Leaves: one advantage a member. Invariants: an excluded
member changes nothing for the others; members may come in any order; equal rewards give exactly 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_core.types import BoolMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupAdvantages:
    """Advantages of one group, aligned with its rewards.

    Example: group_advantages([1.0, 0.0, None], min_group=2, eps=0.0).values -> [1.0, -1.0, nan]
    """

    values: NDArray[np.float64]  # [N], nan where excluded; all nan in a dropped group
    included: BoolMask  # [N], False for every member of a dropped group
    dropped_reason: str | None  # why the whole group is not trained


def group_advantages(rewards: Sequence[float | None], min_group: int, eps: float) -> GroupAdvantages:
    """(r - mean) / (std + eps) over the included members, std of the population (divided by their number).

    Below `min_group` included members the group is dropped with a reason. Raises ValueError for a reward that is not
    finite, min_group < 1 or eps < 0.
    """
    if min_group < 1 or eps < 0:
        raise ValueError(f"min_group must be at least 1 and eps at least 0, not {min_group} and {eps}")
    present = np.array([reward is not None for reward in rewards], np.bool_)
    known = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in known):
        raise ValueError(f"a reward of the group is not finite: {known}")
    values = np.full(len(rewards), np.nan)
    if len(known) < min_group:
        reason = f"{len(known)} of {len(rewards)} members are included, {min_group} are needed (selection.min_group)"
        return GroupAdvantages(values=values, included=np.zeros_like(present), dropped_reason=reason)
    values[present] = _normalised(known, eps)
    return GroupAdvantages(values=values, included=present, dropped_reason=None)


def _normalised(rewards: Sequence[float], eps: float) -> NDArray[np.float64]:
    # By value, not by std: the mean of equal numbers may differ from them in the last bit, and eps makes that large.
    if not rewards or min(rewards) == max(rewards):
        return np.zeros(len(rewards))
    mean = math.fsum(rewards) / len(rewards)  # fsum rounds once: the order of the members does not matter
    deviations = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / len(rewards))
    return np.array(deviations) / (std + eps) if std + eps > 0 else np.zeros(len(rewards))
