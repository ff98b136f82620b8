"""In which order rollouts that wait for a slot are admitted. Pure: a key for each, smaller first.

Enters: the step whose training a rollout belongs to, and the length foreseen for its problem. Leaves: keys. An older
step always goes first: its deadline is earlier.
"""

from collections.abc import Callable

Key = tuple[float, float]
Admission = Callable[[int, float], Key]  # (step, predicted length of the problem's rollouts) -> key


def in_order(step: int, predicted: float) -> Key:
    """As dispatched."""
    return (step, 0.0)


def longest_first(step: int, predicted: float) -> Key:
    """Within a step the problems with the longest rollouts first: rollouts of one problem have alike lengths."""
    return (step, -predicted)


ADMISSIONS: dict[str, Admission] = {"elastic_predictive": longest_first}  # by policy; the others admit in order


def admission_of(policy: str) -> Admission:
    """The order that goes with a policy."""
    return ADMISSIONS.get(policy, in_order)
