"""The role changes of one cell and its way to new weights, phase by phase.

    rollout -> train   drain: no new calls   calls: those in flight go on elsewhere   train: the host switches
    train -> rollout   return: gradient handed in, weights loaded and verified        open: it takes calls
    refresh            calls: those in flight go on elsewhere   load: weights, verified   open: it takes calls

Enters: one cell and the process of it that is meant. Leaves: the cell in its new role, or where it was, or given up;
the seconds of each phase. One at a time (the fleet's lock). Nothing that a process says after it was given up counts.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gyre_core.cells.fleet_cell import ManagedCell, status_of
from gyre_core.cells.fleet_proxies import EngineBoard
from gyre_core.cells.fleet_records import CellLostError, CellRefresh, MoveReport
from gyre_core.clock import Clock
from gyre_core.errors import GyreError, ProxyError
from gyre_core.proxy.drains import DrainReport
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import Move

logger = logging.getLogger(__name__)

_DRAIN_ATTEMPTS = 3  # each waits for a proxy that is being started again (ProxyPool)
DRAIN_S = 60.0  # an abort returns in 7-36 ms; an engine that has not let go of its calls by then is not well


@dataclass(slots=True, kw_only=True)
class _Course:
    """What happened so far."""

    phases: dict[str, float]
    moved: int = 0
    partial_tokens: int = 0

    def count(self, drained: DrainReport) -> None:
        self.moved += drained.moved
        self.partial_tokens += drained.partial_tokens


class CellMoves:
    """See the module. Example: moves = CellMoves(board, newest_version=fleet_version, clock=clock)"""

    def __init__(
        self, board: EngineBoard, *, newest_version: Callable[[], int], clock: Clock, drain_s: float = DRAIN_S
    ) -> None:
        """`newest_version` waits for a core that is being started again, and says which weights there are."""
        self._board, self._newest_version, self._clock, self._drain_s = board, newest_version, clock, drain_s

    def make(self, cell: ManagedCell, move: Move) -> MoveReport:
        """A whole role change. Never raises for what goes wrong with the cell: `failed` says it."""
        started_s = self._clock.monotonic_s()
        generation, course, failed = cell.generation, _Course(phases={}), ""
        expected = CellState.ROLLOUT if move.to == "train" else CellState.TRAINING
        epoch = cell.record.epoch
        if cell.record.state is not expected:
            failed = f"{cell.cell_id} is {cell.record.state}, not {expected}"
        else:
            try:
                with cell.engaged():
                    if move.to == "train":
                        failed = self._leave(cell, generation, course)
                    else:
                        self._return(cell, generation, course)
                    epoch = cell.record.epoch
            except CellLostError as error:
                failed = cell.reason if generation != cell.generation else str(error)
            except GyreError as error:
                failed = str(error)
                self._mend(cell, generation, move, failed)
        ended_s = self._clock.monotonic_s()
        if not failed:
            cell.record.moved_s = ended_s
        return MoveReport(
            cell_id=cell.cell_id,
            to=move.to,
            reason=move.reason,
            epoch=epoch,
            seconds=ended_s - started_s,
            phases=course.phases,
            calls_moved=course.moved,
            partial_tokens=course.partial_tokens,
            served_version=cell.record.served_version,
            failed=failed,
        )

    def refresh(self, cell: ManagedCell, policy_version: int) -> CellRefresh:
        """New weights into a cell that serves; its calls go on elsewhere, or wait when it is the only one."""
        started_s = self._clock.monotonic_s()
        generation, course, failed = cell.generation, _Course(phases={}), ""
        report: dict[str, Any] = {}
        serves = True
        try:
            with cell.engaged():
                cell.record.set(generation, held_back=True)
                with self._phase(course, "calls"):
                    self._empty(cell, course)
                with self._phase(course, "load"):
                    report = self.load(cell, generation, policy_version)
        except CellLostError:
            failed = cell.reason
        except GyreError as error:
            failed = str(error)
            # Not its fault when the proxies do not answer, or the core has other weights by now.
            if not isinstance(error, ProxyError) and self._newest_version() == policy_version:
                cell.condemn(generation, f"it did not take version {policy_version}: {failed}")
                serves = False
        if serves:
            with contextlib.suppress(CellLostError), self._phase(course, "open"):
                cell.record.set(generation, held_back=False)
                self._board.tell()
        return CellRefresh(
            seconds=self._clock.monotonic_s() - started_s,
            phases=course.phases,
            calls_moved=course.moved,
            partial_tokens=course.partial_tokens,
            report=report,
            failed=failed,
        )

    def load(self, cell: ManagedCell, generation: int, policy_version: int) -> dict[str, Any]:
        """These weights into its engine, verified; it takes no calls now. Returns the host's report."""
        report = cell.ask(generation, lambda client: client.weights_refresh(policy_version=policy_version))
        cell.record.apply(generation, cell.ask(generation, status_of), state=cell.record.state)
        served = cell.record.served_version
        if served != policy_version:
            raise GyreError(f"{cell.cell_id} serves version {served} after it was told to load {policy_version}")
        return report

    def _leave(self, cell: ManagedCell, generation: int, course: _Course) -> str:
        record = cell.record
        record.set(generation, state=CellState.DRAINING)
        with self._phase(course, "drain"):
            self._role(cell, generation, "drain", course)
        with self._phase(course, "calls"):
            try:
                self._empty(cell, course)
            except GyreError as error:
                self._mend(cell, generation, Move(cell_id=cell.cell_id, to="train", reason=""), str(error))
                return str(error)
        with self._phase(course, "train"):
            self._role(cell, generation, "train", course)
        return ""

    def _return(self, cell: ManagedCell, generation: int, course: _Course) -> None:
        record = cell.record
        record.set(generation, state=CellState.RETURNING)
        with self._phase(course, "return"):
            version = self._ask_back(cell, generation, course)
        if record.served_version != version:
            with self._phase(course, "load"):
                self.load(cell, generation, version)
        with self._phase(course, "open"):
            record.set(generation, state=CellState.ROLLOUT)
            self._board.tell()

    def _ask_back(self, cell: ManagedCell, generation: int, course: _Course) -> int:
        """Back to rollout with the newest weights; returns their version."""
        while True:
            version = self._newest_version()
            try:
                self._role(cell, generation, "rollout", course, version=version, state=CellState.RETURNING)
                return version
            except CellLostError:
                raise
            except GyreError as error:
                if self._newest_version() == version:
                    raise
                logger.info("%s asks again, the core has stepped meanwhile: %s", cell.cell_id, error)

    def _role(
        self,
        cell: ManagedCell,
        generation: int,
        to: str,
        course: _Course,
        *,
        version: int | None = None,
        state: CellState | None = None,
    ) -> None:
        """Tell the host, and believe its answer."""
        epoch = cell.record.epoch
        answer = cell.ask(generation, lambda client: client.role(to, epoch=epoch, policy_version=version))
        if not cell.record.apply(generation, answer, state=state):
            raise CellLostError(f"{cell.cell_id} answers from another epoch than the move's")
        if to == "rollout":  # its engine may be a new one, with another key, which only /status names
            cell.record.apply(generation, cell.ask(generation, status_of), state=state)
        parts = answer.get("phases") or {}
        course.phases.update({f"{to}/{name}": float(seconds) for name, seconds in parts.items()})

    def _empty(self, cell: ManagedCell, course: _Course) -> None:
        """No call is left on the cell's engine; raises GyreError when some do not go."""
        engine = cell.record.engine
        assert engine is not None, "a cell in rollout has an engine"
        attempts = _DRAIN_ATTEMPTS
        while True:
            try:
                drained = self._board.drain(engine[0], timeout_s=self._drain_s)
                break
            except ProxyError as error:
                attempts -= 1
                if not attempts:
                    raise
                logger.warning("calls of %s do not leave yet: %s", cell.cell_id, error)
        course.count(drained)
        if drained.left:
            raise GyreError(f"{drained.left} calls on {cell.cell_id} did not end within {self._drain_s:g} s")
        self._board.tell()

    def _mend(self, cell: ManagedCell, generation: int, move: Move, failed: str) -> None:
        """A move that the host or the proxies refused: the cell serves as before, or else it is started again."""
        logger.warning("%s did not move to %s: %s", cell.cell_id, move.to, failed)
        try:
            if move.to != "train":
                raise GyreError(failed)
            answer = cell.ask(generation, status_of)
            cell.record.apply(generation, answer)
            if cell.record.state is not CellState.ROLLOUT:
                self._role(cell, generation, "rollout", _Course(phases={}))
            self._board.tell()
        except CellLostError:
            pass
        except GyreError as error:
            cell.condemn(generation, f"it did not move to {move.to} and not back: {error}")

    @contextlib.contextmanager
    def _phase(self, course: _Course, name: str) -> Iterator[None]:
        started_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            course.phases[name] = self._clock.monotonic_s() - started_s
