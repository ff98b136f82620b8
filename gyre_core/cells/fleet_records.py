"""What the fleet knows of its cells, and what it reports: plain records and the fence around them.

Enters: answers of cell hosts, each with the process (generation) that gave it. Leaves: the fleet's belief. Invariants:
an answer of a process that was given up, or of an older epoch than one that is known, changes nothing; a cell is in the
proxies' list only while it is in rollout, not held back, and serves verified weights.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre_core.errors import GyreError
from gyre_core.proxy.settings import EngineEntry
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import Target


class CellLostError(GyreError):
    """The process that a request was for has been given up; the cell is being started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What became of a role change.

    Example: MoveReport(cell_id="cell-1", to="train", reason="...", epoch=3, seconds=0.4, phases={"drain": 0.01, ...})
    """

    cell_id: str
    to: Target
    reason: str  # the policy's
    epoch: int
    seconds: float
    phases: dict[str, float]  # seconds by phase, in order; `train/...` and `rollout/...` are the host's own parts
    calls_moved: int = 0  # calls in flight that went on elsewhere
    partial_tokens: int = 0  # sampled before, kept
    served_version: int | None = None  # policy version in the cell's engine
    failed: str = ""  # why the cell is not where it should be; it serves again, or is being started again


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRefresh:
    """How one cell's engine came to a policy version. Example: CellRefresh(seconds=0.3, phases={"calls": 0.1})"""

    seconds: float
    phases: dict[str, float]
    calls_moved: int = 0
    partial_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)  # the host's PublishReport
    failed: str = ""  # the cell is being started again


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshReport:
    """A publication to all cells that serve. Example: RefreshReport(policy_version=3, seconds=0.9, cells={...})"""

    policy_version: int
    seconds: float
    cells: dict[str, CellRefresh]
    later: tuple[str, ...] = ()  # cells that train or are being started: they take it when they return


class CellRecord:
    """One cell over the processes that carry it. Thread-safe."""

    def __init__(self, cell_id: str, slots: int, *, kv_write_s: float = 0.0) -> None:
        """`kv_write_s`: until an aborted call's keys and values are where the other engines find them."""
        self.cell_id = cell_id
        self.slots = slots
        self.kv_write_s = kv_write_s
        self.lock = threading.RLock()
        self.generation = 0  # processes given up so far
        self.state = CellState.DEAD
        self.epoch = 0
        self.policy_version: int | None = None  # that the trainer holds
        self.served_version: int | None = None  # that the engine holds, verified
        self.engine: tuple[str, str | None] | None = None  # url and key
        self.held_back = False  # from the proxies, although in rollout
        self.moved_s = -1e9  # when its last role change ended
        self.verbs = 0  # requests of ours that ran or run on it
        self.busy = 0  # of these, running now
        self.lost = ""  # why it will not come back

    def apply(self, generation: int, answer: Mapping[str, Any], *, state: CellState | None = None) -> bool:
        """Believe an answer of a host; `state` puts the fleet's own view in the place of the host's.

        False, and nothing changed, for one of a process that was given up or of an older epoch.
        """
        with self.lock:
            if generation != self.generation or int(answer["epoch"]) < self.epoch:
                return False
            self.epoch = int(answer["epoch"])
            self.policy_version = answer.get("policy_version")
            self.served_version = answer.get("served_version", answer.get("published_version"))
            url = answer.get("engine_url")
            if url is not None and ("engine_key" in answer or self.engine is None or self.engine[0] != url):
                self.engine = (url, answer.get("engine_key"))  # only /status names the key
            self.state = CellState(answer["state"]) if state is None else state
            return True

    def observe(self, generation: int, verbs: int, answer: Mapping[str, Any]) -> bool:
        """Believe a heartbeat's answer, unless a request of ours ran since it was asked for: then it may be older."""
        with self.lock:
            if verbs != self.verbs or self.busy or answer.get("state") == CellState.DEAD:
                return False
            return self.apply(generation, answer)

    def give_up(self) -> int:
        """Its process is dead or must die: from now on nothing that it says counts. Returns the new generation."""
        with self.lock:
            self.generation += 1
            self.state = CellState.DEAD
            self.epoch = 0  # of the next process
            self.policy_version = self.served_version = self.engine = None
            self.held_back = False
            return self.generation

    def set(self, generation: int, **values: Any) -> None:
        """Change what the fleet itself decides; raises CellLostError for a process that was given up."""
        with self.lock:
            if generation != self.generation:
                raise CellLostError(f"{self.cell_id} is being started again")
            for name, value in values.items():
                setattr(self, name, value)

    def entry(self, rank: int) -> EngineEntry | None:
        """How the proxies should know it; None while it takes no calls."""
        with self.lock:
            if self.state is not CellState.ROLLOUT or self.held_back or self.engine is None:
                return None
            if self.served_version is None:
                return None
            url, key = self.engine
            return EngineEntry(
                url=url,
                slots=self.slots,
                api_key=key,
                version=self.served_version,
                rank=rank,
                kv_write_s=self.kv_write_s,
            )
