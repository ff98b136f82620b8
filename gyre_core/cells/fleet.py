"""The fleet: all cells of a run as one. It starts them, moves them, renews their weights and keeps them alive.

    flow -> fleet -> cell hosts (engine, trainer)      harnesses -> proxies -> engines of the cells that serve
                 -> proxies (who takes calls)

Enters: one CellSettings a cell (the core first), moves, policy versions. Leaves: cells in their roles, engines in the
proxies' list with the version that they serve, events with ids and reasons. Thread-safe.

Invariants: role changes and publications are serial, each fenced by the cell's epoch and process; an engine takes calls
only with weights that were verified; calls of a cell that leaves, dies or hangs go on elsewhere. A cell that died, or
did not answer for so long as is allowed, is started again and serves the newest weights: the core from its last
checkpoint, a satellite from the model's folder and then the core's snapshot. What the core had taken into its gradients
is computed again by its journal, what satellites hold stays good. A cell that dies once more than it may is lost; the
run can go on without satellites, not without the core, nor without any cell that its policy lets serve.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gyre_core.cells.client import CellClient
from gyre_core.cells.fleet_cell import CellHooks, ManagedCell, status_of
from gyre_core.cells.fleet_launch import Launch, LocalLauncher
from gyre_core.cells.fleet_moves import DRAIN_S, CellMoves
from gyre_core.cells.fleet_proxies import EngineBoard, EngineLoad
from gyre_core.cells.fleet_records import CellLostError, CellRefresh, MoveReport, RefreshReport
from gyre_core.cells.heartbeat import PulseRule
from gyre_core.cells.settings import CellSettings
from gyre_core.clock import Clock, SystemClock
from gyre_core.config.models import SchedulerConfig
from gyre_core.errors import ConfigError, EngineError, GyreError, ProxyError
from gyre_core.proxy.pool import Shards
from gyre_core.proxy.settings import EngineEntry
from gyre_core.proxy.supervisor import RestartBudget
from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import CellView, Move

logger = logging.getLogger(__name__)
Listener = Callable[[Mapping[str, Any]], None]

RESCUE_S = 2.0  # to save the calls of an engine whose host hangs: an engine that works gives them back in 36 ms
_WAIT_S = 0.1  # between two looks at a core that is being started again
_LOAD_ATTEMPTS = 3  # of a cell that came back to take the core's weights


class CellFleet:
    """See the module. A context manager: entering starts all cells and waits until they are warm.

    Example: with CellFleet(settings, shards=shards, logs=logs, work=work, scheduler=config) as fleet: fleet.open()
    """

    def __init__(
        self,
        settings: Sequence[CellSettings],
        *,
        shards: Shards,
        logs: Path,
        work: Path,
        scheduler: SchedulerConfig,
        env: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        launch: Launch | None = None,
        budget: RestartBudget | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        """`launch` starts a host's process, on this machine by default. `budget` bounds each cell's restarts.

        Raises ConfigError for settings of cells that cannot work together.
        """
        check_settings(settings)
        self._scheduler = scheduler
        self._clock = clock or SystemClock()
        self._budget = budget or RestartBudget()
        self._serial = threading.RLock()  # one role change or publication at a time
        self._target_lock = threading.Lock()
        self._target = settings[0].policy_version  # version that engines should serve
        self._checkpoint: tuple[Path | None, int] = (settings[0].checkpoint, settings[0].policy_version)
        self._failed = ""
        self._listeners: list[Listener] = []
        self._stopping = threading.Event()
        self._board = EngineBoard(shards, entries=self._entries, version=lambda: self._target)
        self._moves = CellMoves(self._board, newest_version=self._newest_version, clock=self._clock, drain_s=drain_s)
        rule = PulseRule(heartbeat_s=scheduler.heartbeat_s, dead_after_s=scheduler.dead_after_s)
        hooks = CellHooks(
            settings=self._settings_of,
            withdraw=self._withdraw,
            buried=self._buried,
            back=self._back,
            lost=self._lost,
        )
        start = launch or LocalLauncher(work=work, logs=logs, env=env)
        self._cells = [
            ManagedCell(index, own, launch=start, rule=rule, budget=self._budget, clock=self._clock, hooks=hooks)
            for index, own in enumerate(settings)
        ]

    def __enter__(self) -> "CellFleet":
        """Start all cells; raises EngineError with a log's tail, or GyreError when the weights do not arrive."""
        try:
            for cell in self._cells:
                cell.start()
            for cell in self._cells:
                cell.wait_ready()
                cell.watch()
            with ThreadPoolExecutor(max_workers=len(self._cells)) as pool:
                list(pool.map(lambda cell: self._bring_in(cell, cell.generation), self._cells))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def core(self) -> CellClient:
        """The core's control API. Raises GyreError while it is being started again, and when it is lost."""
        self.check()
        return self._cells[0].client()

    @property
    def core_generation(self) -> int:
        """How many of the core's processes have died: a step that was open then must be opened again.

        It asks the core, so that after a request that failed a death counts that nobody had noticed: when it hangs this
        returns once it was killed.
        """
        core = self._cells[0]
        generation = core.generation
        with contextlib.suppress(GyreError):
            core.ask(generation, status_of)
        return core.generation

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids of the hosts now."""
        return {cell.cell_id: cell.pid for cell in self._cells}

    @property
    def engines(self) -> dict[str, tuple[str, str | None]]:
        """URL and key of each cell's engine, of those that have one now. The keys are not to be logged or stored."""
        return {cell.cell_id: cell.record.engine for cell in self._cells if cell.record.engine is not None}

    def check(self) -> None:
        """Raise EngineError when the run cannot go on."""
        if self._failed:
            raise EngineError(self._failed)

    @property
    def load(self) -> EngineLoad:
        """What the engines served when `views` last asked."""
        return self._board.load

    def views(self, *, ask: bool = True) -> tuple[CellView, ...]:
        """The cells in their order, as a policy sees them; `moved_s` on the fleet's monotonic clock.

        `ask=False`: their states now, without asking the proxies for their residents.
        """
        residents = (self._board.look() if ask else self._board.load).residents
        views = []
        for cell in self._cells:
            record = cell.record
            with record.lock:
                url = record.engine[0] if record.engine is not None else ""
                views.append(
                    CellView(
                        cell_id=record.cell_id,
                        state=record.state,
                        slots=record.slots,
                        residents=residents.get(url, 0),
                        moved_s=record.moved_s,
                    )
                )
        return tuple(views)

    def on_event(self, listener: Listener) -> None:
        """Call `listener` with each event, from any thread.

        Events: move, refresh, cell_dead, cell_restarted, cell_lost; each with cell, reason, epoch, seconds.
        """
        self._listeners.append(listener)

    # -- what can be done --------------------------------------------------------------------------------------------

    def set_checkpoint(self, path: Path, policy_version: int) -> None:
        """From now on a core that dies is started again from this checkpoint."""
        self._checkpoint = (path, policy_version)

    def open(self) -> None:
        """Let the proxies send calls to all cells in rollout."""
        self._board.open()

    def move(self, move: Move) -> MoveReport:
        """Make a role change; returns when it is over. What went wrong with the cell is in `failed`.

        Raises ValueError for an unknown cell, EngineError when the run cannot go on.
        """
        cell = next((cell for cell in self._cells if cell.cell_id == move.cell_id), None)
        if cell is None:
            raise ValueError(f"there is no cell {move.cell_id}")
        with self._serial:
            self.check()
            report = self._moves.make(cell, move)
        level = logging.WARNING if report.failed else logging.INFO
        logger.log(
            level,
            "%s to %s (epoch %d): %.3f s, %d calls moved%s",
            cell.cell_id,
            move.to,
            report.epoch,
            report.seconds,
            report.calls_moved,
            f"; failed: {report.failed}" if report.failed else "",
        )
        self._tell(
            "move",
            cell,
            move.reason,
            seconds=report.seconds,
            to=move.to,
            phases=report.phases,
            calls_moved=report.calls_moved,
            failed=report.failed,
        )
        return report

    def refresh(self, policy_version: int) -> RefreshReport:
        """Bring a version that the core's trainer holds into every engine that serves, one cell after the other.

        Cells that train, or are being started, take it when they return. Raises GyreError when the core does not hold
        it: it died, and the step must be done again.
        """
        started_s = self._clock.monotonic_s()
        with self._serial:
            held = self._newest_version()
            if held != policy_version:
                raise GyreError(
                    f"the core holds version {held}, not {policy_version}: it was started again from its checkpoint"
                )
            with self._target_lock:
                self._target = policy_version
            cells = self._roll(policy_version)
        later = tuple(cell.cell_id for cell in self._cells if cell.record.served_version != policy_version)
        seconds = self._clock.monotonic_s() - started_s
        logger.info("version %d is served by %s after %.3f s; later: %s", policy_version, list(cells), seconds, later)
        self._tell("refresh", self._cells[0], f"version {policy_version}", seconds=seconds, cells=list(cells))
        return RefreshReport(policy_version=policy_version, seconds=seconds, cells=cells, later=later)

    def close(self) -> None:
        """End all cells; returns when they are gone."""
        self._stopping.set()
        with ThreadPoolExecutor(max_workers=len(self._cells)) as pool:
            list(pool.map(lambda cell: cell.stop(), self._cells))
        self._board.close()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _newest_version(self) -> int:
        """What the core's trainer holds; waits while it is being started again. Raises GyreError when it is lost."""
        core = self._cells[0]
        while True:
            self.check()
            if self._stopping.is_set():
                raise CellLostError("the fleet is being stopped")
            try:
                return int(core.ask(core.generation, status_of)["policy_version"])
            except CellLostError:
                self._stopping.wait(_WAIT_S)

    def _roll(self, policy_version: int) -> dict[str, CellRefresh]:
        """Renew every serving cell that has another version, those that stay longest first. Call it serially."""
        done = {}
        for cell in reversed(self._cells):
            serves = cell.record.state is CellState.ROLLOUT
            if serves and cell.record.served_version != policy_version:
                done[cell.cell_id] = self._moves.refresh(cell, policy_version)
        return done

    def _bring_in(self, cell: ManagedCell, generation: int) -> None:
        """A new process that is warm serves the newest weights from now on. Raises CellLostError, GyreError."""
        try:
            cell.record.set(generation, state=CellState.RETURNING)
            if cell.index == 0:
                version = int(cell.ask(generation, status_of)["policy_version"])
                with self._target_lock:
                    self._target = version  # lower than before when its last step was not saved
            while True:
                core_generation = self._cells[0].generation
                version = self._newest_version()
                # A satellite's own weights are the model folder's, whatever their version is called: the host compares.
                wanted = cell.index > 0 or cell.record.served_version != version
                if wanted and not self._load(cell, generation, version):
                    continue
                with self._target_lock:
                    if version >= self._target and core_generation == self._cells[0].generation:
                        cell.record.set(generation, state=CellState.ROLLOUT)
                        break
            self._board.tell()
        finally:
            cell.brought_in(generation)

    def _load(self, cell: ManagedCell, generation: int, version: int) -> bool:
        """These weights into its engine; False when the core has others by now."""
        for attempt in range(1, _LOAD_ATTEMPTS + 1):
            core_generation = self._cells[0].generation
            try:
                self._moves.load(cell, generation, version)
                return True
            except CellLostError:
                raise
            except GyreError as error:
                if core_generation != self._cells[0].generation or self._newest_version() != version:
                    return False
                if attempt == _LOAD_ATTEMPTS:
                    raise
                logger.warning("%s, try %d to load version %d: %s", cell.cell_id, attempt, version, error)
                self._stopping.wait(_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _entries(self) -> list[EngineEntry]:
        """The proxies' list. Calls that have to move prefer cells that stay long, and those with the newest weights."""
        number = len(self._cells)
        entries = []
        for cell in self._cells:
            fresh = cell.record.served_version == self._target
            entry = cell.record.entry(rank=cell.index + (number if fresh else 0))
            if entry is not None:
                entries.append(entry)
        return entries

    # -- what the cells' threads call --------------------------------------------------------------------------------

    def _settings_of(self, cell: ManagedCell) -> CellSettings:
        if cell.index:
            return cell.settings
        path, version = self._checkpoint
        return cell.settings.model_copy(update={"checkpoint": path, "policy_version": version})

    def _withdraw(self, cell: ManagedCell, hanging_url: str | None) -> None:
        try:
            self._board.tell()
            if hanging_url is not None:  # the engine may be well: its calls keep what they have sampled
                self._board.drain(hanging_url, timeout_s=RESCUE_S)
        except ProxyError as error:
            logger.warning("the proxies were not told that %s is gone: %s", cell.cell_id, error)

    def _buried(self, cell: ManagedCell, reason: str) -> None:
        if cell.index:
            try:
                self._cells[0].tell(lambda core: core.cut_off(cell.cell_id))
            except GyreError as error:  # its queue sees the connection break, or has died too
                logger.info("the core was not told that %s is dead: %s", cell.cell_id, error)
        self._tell("cell_dead", cell, reason, seconds=0.0)

    def _back(self, cell: ManagedCell, generation: int, reason: str, died_s: float) -> None:
        threading.Thread(
            target=self._rejoin, args=(cell, generation, reason, died_s), name=f"{cell.cell_id}-rejoin", daemon=True
        ).start()

    def _rejoin(self, cell: ManagedCell, generation: int, reason: str, died_s: float) -> None:
        try:
            self._bring_in(cell, generation)
        except CellLostError:
            return  # its watching thread knows
        except GyreError as error:
            cell.condemn(generation, f"it did not come back to rollout: {error}")
            return
        seconds = self._clock.monotonic_s() - died_s
        logger.warning(
            "%s is back in rollout with version %s after %.1f s", cell.cell_id, cell.record.served_version, seconds
        )
        self._tell("cell_restarted", cell, reason, seconds=seconds, pid=cell.pid)
        if cell.index == 0:
            with self._serial:
                if generation == cell.generation:
                    self._roll(self._target)

    def _lost(self, cell: ManagedCell, reason: str) -> None:
        logger.error("%s", reason)
        lost = {one.index for one in self._cells if one.record.lost}
        keeps = self._scheduler.train_cells if self._scheduler.policy.startswith("async") else 0
        if 0 in lost:
            self._failed = f"the core is lost, and the run with it: {reason}"
        elif all(index in lost for index in range(keeps, len(self._cells))):
            self._failed = f"no cell is left that serves: {reason}"
        self._tell("cell_lost", cell, reason, seconds=0.0)

    def _tell(self, event: str, cell: ManagedCell, reason: str, *, seconds: float, **more: Any) -> None:
        record = {
            "event": event,
            "cell": cell.cell_id,
            "reason": reason,
            "epoch": cell.record.epoch,
            "generation": cell.generation,
            "seconds": seconds,
            **more,
        }
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:
                logger.exception("a listener failed on %s of %s", event, cell.cell_id)


def check_settings(settings: Sequence[CellSettings]) -> None:
    """Raise ConfigError for cells that cannot work together."""
    if not settings:
        raise ConfigError("a fleet needs at least one cell")
    names = [one.cell_id for one in settings]
    if len(set(names)) != len(names):
        raise ConfigError(f"cells need names of their own: {', '.join(names)}")
    if len(settings) > 1 and (settings[0].members is None or not settings[0].members.port):
        raise ConfigError("a core with satellites needs members with a fixed port: they find it again after a restart")
    if any(one.members is not None for one in settings[1:]):
        raise ConfigError("only the first cell is a core: the others have no members")
    if any(one.core_url is None for one in settings[1:]):
        raise ConfigError("satellites need core_url: where the core's queue is")
