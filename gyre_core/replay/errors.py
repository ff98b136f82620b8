"""The one error of a replay that has a result."""

from gyre_core.errors import GyreError
from gyre_core.types import Json


class ReplayMismatchError(GyreError):
    """What was computed again is not what is stored; `result` says where, as the replay would have returned it."""

    def __init__(self, message: str, result: Json) -> None:
        super().__init__(message)
        self.result = result
