"""How old a rollout may be when it is trained.

Enters: policy versions. Leaves: a reason to drop, or none. Staleness is the trainer's version at use minus the version
the rollout was dispatched with.
"""


def staleness(*, trainer_version: int, dispatch_version: int) -> int:
    """Optimizer steps since dispatch. Raises ValueError for a rollout from the future."""
    if dispatch_version > trainer_version:
        raise ValueError(f"dispatched with version {dispatch_version}, but the trainer is at {trainer_version}")
    return trainer_version - dispatch_version


def stale_reason(*, trainer_version: int, dispatch_version: int, max_staleness: int) -> str | None:
    """Why a rollout is too old to be trained, None when it is not."""
    age = staleness(trainer_version=trainer_version, dispatch_version=dispatch_version)
    if age <= max_staleness:
        return None
    return (
        f"staleness {age} exceeds {max_staleness} (dispatched with version {dispatch_version}, now {trainer_version})"
    )
