"""One cell of the fleet over the processes that carry it: started, watched, given up, started again.

Enters: settings, a way to start a host, the rule of heartbeats, what the fleet does when a cell dies or comes back.
Leaves: answers of the process that is meant, never of another. Invariants: a process is given up (its generation
ends) before anything else is done about it, so that whatever it still says is void; there is never more than one; each
has a secret of its own, so that no request for a predecessor reaches it.

The watching thread waits for a heartbeat's time or for the process's end, whichever comes first.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from gyre_core.cells.client import CellClient
from gyre_core.cells.fleet_launch import HostProcess, Launch
from gyre_core.cells.fleet_records import CellLostError, CellRecord
from gyre_core.cells.heartbeat import Pulse, PulseRule, engine_answers
from gyre_core.cells.settings import CellSettings
from gyre_core.clock import Clock
from gyre_core.engine.kv_store import KV_WRITE_S
from gyre_core.errors import EngineError, GyreError
from gyre_core.process import log_tail, new_secret
from gyre_core.proxy.supervisor import RestartBudget, RestartLog
from gyre_core.scheduler.cell import CellState

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.1  # between two looks whether the process has ended
_BOOT_REST_S = 60.0  # beside the engine's boot: imports, the trainer, a checkpoint
_STOP_GRACE_S = 20.0  # the engine's guard has up to 10 s


@dataclass(frozen=True, slots=True, kw_only=True)
class CellHooks:
    """What the fleet does about a cell. Called by its watching thread."""

    settings: Callable[["ManagedCell"], CellSettings]  # for the next process
    withdraw: Callable[["ManagedCell", str | None], None]  # given up: out of the proxies; the url of one that hangs
    buried: Callable[["ManagedCell", str], None]  # its processes are gone
    back: Callable[["ManagedCell", int, str, float], None]  # a new process answers: generation, reason, when it died
    lost: Callable[["ManagedCell", str], None]  # it may not be started again


class ManagedCell:
    """See the module. `start`, `wait_ready`, `watch`, then `ask` from any thread, at last `stop`."""

    def __init__(
        self,
        index: int,
        settings: CellSettings,
        *,
        launch: Launch,
        rule: PulseRule,
        budget: RestartBudget,
        clock: Clock,
        hooks: CellHooks,
    ) -> None:
        self.index = index  # in the fleet's order; 0 is the core
        self.settings = settings
        kv_write_s = KV_WRITE_S if settings.kv_store is not None else 0.0
        self.record = CellRecord(settings.cell_id, settings.slots, kv_write_s=kv_write_s)
        self.reason = ""  # why its last process was given up
        self._launch, self._rule, self._clock, self._hooks = launch, rule, clock, hooks
        self._restarts = RestartLog(budget, clock)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: HostProcess | None = None
        self._client: CellClient | None = None
        self._secret = ""
        self._condemned: tuple[int, str] | None = None

    @property
    def cell_id(self) -> str:
        return self.record.cell_id

    @property
    def generation(self) -> int:
        """Processes given up so far: names the one that is there now."""
        return self.record.generation

    @property
    def pid(self) -> int | None:
        """Process id of the host; None while there is none."""
        process = self._process
        return process.pid if process is not None else None

    def client(self, generation: int | None = None) -> CellClient:
        """A client of this very process, or of the one that is there; raises CellLostError when it was given up."""
        with self.record.lock:
            client = self._client
            if client is None or (generation is not None and generation != self.record.generation):
                raise CellLostError(
                    f"{self.cell_id} will not come back: {self.record.lost}"
                    if self.record.lost
                    else f"{self.cell_id} is being started again: {self.reason}"
                )
            return client

    def ask(self, generation: int, verb: Callable[[CellClient], T]) -> T:
        """A request that may be repeated when its answer is lost; the answer is this very process's.

        Ends when the process answers or is given up: a host that hangs is killed by the watching thread. Raises
        CellLostError, or the GyreError that the host reports.
        """
        with self.engaged():
            while True:
                client = self.client(generation)
                try:
                    answer = verb(client)
                except (GyreError, RuntimeError) as error:  # the latter: closed by `stop`
                    self.client(generation)
                    if not isinstance(error.__cause__, httpx.HTTPError):
                        raise
                    if self._stopping.wait(_POLL_S):
                        raise CellLostError(f"{self.cell_id} is being stopped") from error
                    continue
                self.client(generation)  # a late answer of a process that was given up counts for nothing
                return answer

    def tell(self, verb: Callable[[CellClient], T]) -> T:
        """A request to whichever process is there, given up soon; raises GyreError."""
        self.client()
        with self._looking() as client:
            return verb(client)

    @contextlib.contextmanager
    def engaged(self) -> Iterator[None]:
        """Something of ours is going on with it: heartbeats do not say meanwhile what state it is in."""
        with self.record.lock:
            self.record.verbs += 1
            self.record.busy += 1
            generation = self.record.generation
        try:
            yield
        finally:
            with self.record.lock:
                if generation == self.record.generation:
                    self.record.busy -= 1

    def condemn(self, generation: int, reason: str) -> None:
        """Give this process up: the watching thread kills it and starts another."""
        with self.record.lock:
            if generation == self.record.generation:
                self._condemned = (generation, reason)

    def start(self) -> None:
        """Start a process; returns at once. Raises OSError or GyreError when that is impossible."""
        settings = self._hooks.settings(self).model_copy(update={"secret": new_secret()})
        process = self._launch(settings)
        with self.record.lock:
            self._process, self._secret = process, settings.secret
        logger.info("%s starts (pid %d, log %s)", self.cell_id, process.pid, process.log_path)

    def wait_ready(self) -> None:
        """Wait until the process answers: then it is warm. Raises EngineError with its log's tail."""
        process = self._process
        assert process is not None, "it was not started"
        engine = self.settings.engine
        limit_s = _BOOT_REST_S + (engine.boot_timeout_s if engine is not None else 240.0)
        deadline = self._clock.monotonic_s() + limit_s
        with self._looking() as client:
            while True:
                with contextlib.suppress(GyreError):
                    status = client.status()
                    break
                tail = f"its log {process.log_path} ends with:\n{log_tail(process.log_path)}"
                if not process.running():
                    raise EngineError(f"{self.cell_id} {_ending(process)} while starting; {tail}")
                if self._clock.monotonic_s() > deadline:
                    raise EngineError(f"{self.cell_id} was not ready after {limit_s:g} s; {tail}")
                if self._stopping.wait(_POLL_S):
                    raise CellLostError(f"{self.cell_id} is being stopped")
        with self.record.lock:
            self._client = CellClient(self._url, self._secret)
            self._condemned = None
            # Not in rollout before the fleet has seen to its weights.
            self.record.busy += 1
            self.record.apply(self.record.generation, status, state=self.record.state)

    def brought_in(self, generation: int) -> None:
        """The fleet has seen to its weights, or given up: heartbeats may say again what state it is in."""
        with self.record.lock:
            if generation == self.record.generation:
                self.record.busy -= 1

    def watch(self) -> None:
        """Look after it from now on."""
        self._thread = threading.Thread(target=self._watch, name=f"{self.cell_id}-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it for good; returns when its process is gone."""
        self._stopping.set()
        process = self._process
        if process is not None:
            process.stop(grace_s=_STOP_GRACE_S)
        if self._thread is not None:
            self._thread.join()
        if self._process is not None and self._process is not process:
            self._process.stop(grace_s=_STOP_GRACE_S)
        self._process = None
        with self.record.lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    @contextlib.contextmanager
    def _looking(self) -> Iterator[CellClient]:
        """A client whose requests end soon."""
        with CellClient(self._url, self._secret, timeout_s=self._rule.look_timeout_s) as client:
            yield client

    def _watch(self) -> None:
        while (reason := self._life()) is not None:
            died_s = self._clock.monotonic_s()
            self._bury(reason)
            if not self._revive(died_s):
                return

    def _life(self) -> str | None:
        """Look at the process until it must be given up: returns why, None when all is being stopped."""
        process = self._process
        assert process is not None
        pulse = Pulse(self._rule, self._clock)
        next_look_s = self._clock.monotonic_s()
        http = httpx.Client(timeout=self._rule.look_timeout_s, trust_env=False)
        with self._looking() as client, http:
            while not self._stopping.is_set():
                if not process.running():
                    return None if self._stopping.is_set() else f"its process {_ending(process)}"
                with self.record.lock:
                    condemned, generation, verbs = self._condemned, self.record.generation, self.record.verbs
                    busy = self.record.busy > 0
                if condemned is not None and condemned[0] == generation:
                    return condemned[1]
                if self._clock.monotonic_s() >= next_look_s:
                    next_look_s = self._clock.monotonic_s() + self._rule.heartbeat_s
                    reason = self._look(client, http, pulse, generation, verbs, busy)
                    if reason is not None and process.running():
                        return reason
                    continue
                self._stopping.wait(min(_POLL_S, self._rule.heartbeat_s))
        return None

    def _look(
        self, client: CellClient, http: httpx.Client, pulse: Pulse, generation: int, verbs: int, busy: bool
    ) -> str | None:
        try:
            status = client.status()
        except GyreError:
            return pulse.silent()
        record = self.record
        record.observe(generation, verbs, status)
        with record.lock:
            engine = record.engine if record.state is CellState.ROLLOUT and not record.busy else None
        engine_silent = engine is not None and not engine_answers(http, engine)
        return pulse.answered(status, busy=busy, engine_silent=engine_silent)

    def _bury(self, reason: str) -> None:
        process = self._process
        assert process is not None
        with self.record.lock:
            engine = self.record.engine
            self._client = None  # not closed: others' requests end by themselves when the process does
            self.reason = reason
            self.record.busy = 0
            self.record.give_up()
        hangs = process.running()
        logger.warning(
            "%s (pid %d) is given up: %s; its log is %s", self.cell_id, process.pid, reason, process.log_path
        )
        self._hooks.withdraw(self, engine[0] if engine is not None and hangs else None)
        process.stop(grace_s=0.0)
        self._hooks.buried(self, reason)

    def _revive(self, died_s: float) -> bool:
        """Start it again, as often as the budget allows; False when it is lost or all is being stopped."""
        why = self.reason
        while True:
            pause_s = self._restarts.next_pause_s()
            if pause_s is None:
                self.record.lost = f"{self.cell_id} died once more than it may be started again: {why}"
                self._hooks.lost(self, self.record.lost)
                return False
            if self._stopping.wait(pause_s):
                return False
            try:
                self.start()
                self.wait_ready()
            except (GyreError, OSError) as error:
                if self._process is not None:
                    self._process.stop(grace_s=0.0)
                if self._stopping.is_set():
                    return False
                logger.warning("%s did not come back: %s", self.cell_id, error)
                why = str(error)
                continue
            self._hooks.back(self, self.record.generation, self.reason, died_s)
            return True


def _ending(process: HostProcess) -> str:
    code = process.exit_code
    return "ended" if code is None else f"ended with exit code {code}"


def status_of(client: CellClient) -> dict[str, Any]:
    """`ask(generation, status_of)`."""
    return client.status()
