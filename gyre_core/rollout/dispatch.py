"""Which problems a step works on: a pure function of the seed, so a resumed run dispatches what the killed one did.

Problems are drawn without replacement in epochs: every problem comes once before any comes again.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from gyre_core.types import RolloutSpec


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, equal in every process (unlike `hash`)."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def problems_of_step(problem_ids: Sequence[str], *, seed: int, step: int, groups_per_step: int) -> list[str]:
    """The problems of step `step` (from 0), in dispatch order. Raises ValueError without problems."""
    if not problem_ids:
        raise ValueError("there are no problems to dispatch")
    ordered = sorted(problem_ids)
    chosen = []
    for position in range(step * groups_per_step, (step + 1) * groups_per_step):
        epoch, index = divmod(position, len(ordered))
        rng = np.random.default_rng(stable_seed(seed, "epoch", epoch))
        chosen.append(ordered[int(rng.permutation(len(ordered))[index])])
    return chosen


def plan_groups(
    problem_ids: Sequence[str], *, prefix: str, step: int, group_size: int, seed: int, policy_version: int
) -> list[tuple[RolloutSpec, ...]]:
    """One group of rollouts for each problem. `prefix` names the dispatch, e.g. `s0003` or `heldout-before`.

    A problem that comes twice in one dispatch (more groups than problems) gets two groups with different ids.
    """
    groups = []
    seen: dict[str, int] = {}
    for problem_id in problem_ids:
        seen[problem_id] = seen.get(problem_id, 0) + 1
        suffix = f".{seen[problem_id]}" if seen[problem_id] > 1 else ""
        group_id = f"{prefix}-{problem_id}{suffix}"
        groups.append(
            tuple(
                RolloutSpec(
                    rollout_id=f"{group_id}-{member:02d}",
                    group_id=group_id,
                    problem_id=problem_id,
                    step=step,
                    member=member,
                    dispatch_version=policy_version,
                    seed=stable_seed(seed, group_id, member) % 2**31,
                )
                for member in range(group_size)
            )
        )
    return groups
