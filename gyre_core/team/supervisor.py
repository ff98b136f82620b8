"""Services that one process starts, watches, starts again, and ends.

Enters: services in the order in which they need each other. Leaves: nothing running. Invariants: a service is started
when those before it are ready; one that ends is started again after 1, 2, 4 ... 60 s; all end, in reverse order, when
the supervisor ends, whatever ends it (gyre_core/process.py).
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import SetupError
from gyre_core.process import ChildProcess

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STEADY_S = 120.0  # a service that ran so long begins with the first pause again


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One program to keep running.

    Example: Service(name="store", command=weed.command(), log_path=logs / "store.log", ready=weed.ready)
    """

    name: str
    command: list[str]
    log_path: Path
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    boot_timeout_s: float = 120.0
    grace_s: float = 15.0
    started: Callable[[], None] = lambda: None  # called when it is ready, each time


@dataclass(slots=True)
class _Kept:
    service: Service
    process: ChildProcess
    started_s: float
    pause_s: float = _FIRST_PAUSE_S
    again_at_s: float | None = None  # when a service that ended is started again


class Supervisor:
    """Keeps services running; one thread calls it.

    Example: with Supervisor() as team: team.start(store); team.start(server); team.watch(stopping)
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept: list[_Kept] = []
        self.restarts: dict[str, int] = {}

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, service: Service) -> None:
        """Start a service and wait until it is ready; raises SetupError with its log's tail."""
        process = _launch(service)
        self._kept.append(_Kept(service=service, process=process, started_s=self._clock.monotonic_s()))
        process.wait_until(service.ready, timeout_s=service.boot_timeout_s, error=SetupError)
        service.started()
        logger.info("%s is ready (pid %d)", service.name, process.pid)

    def pids(self) -> dict[str, int]:
        """The present processes' ids, by service."""
        return {kept.service.name: kept.process.pid for kept in self._kept}

    def watch(self, stopping: threading.Event, *, poll_s: float = 0.5) -> None:
        """Look after the services until `stopping` is set."""
        while not stopping.wait(poll_s):
            self.tend()

    def tend(self) -> None:
        """Start again what has ended and has paused; called by `watch`."""
        now_s = self._clock.monotonic_s()
        for kept in self._kept:
            if kept.process.running():
                continue
            if kept.again_at_s is None:
                if now_s - kept.started_s >= _STEADY_S:
                    kept.pause_s = _FIRST_PAUSE_S
                kept.again_at_s = now_s + kept.pause_s
                logger.warning("%s ended; started again in %g s", kept.service.name, kept.pause_s)
                kept.pause_s = min(2 * kept.pause_s, _LONGEST_PAUSE_S)
            elif now_s >= kept.again_at_s:
                self._again(kept, now_s)

    def stop(self) -> None:
        """End all, the last one first."""
        while self._kept:
            kept = self._kept.pop()
            kept.process.stop(grace_s=kept.service.grace_s)
            logger.info("%s ended", kept.service.name)

    def _again(self, kept: _Kept, now_s: float) -> None:
        kept.process.stop(grace_s=0)  # what it left of its process group
        kept.process, kept.started_s, kept.again_at_s = _launch(kept.service), now_s, None
        self.restarts[kept.service.name] = self.restarts.get(kept.service.name, 0) + 1
        try:
            kept.process.wait_until(kept.service.ready, timeout_s=kept.service.boot_timeout_s, error=SetupError)
            kept.service.started()
        except SetupError as error:
            logger.error("%s", error)  # the next look finds it ended, or it becomes ready later
            return
        logger.info("%s is ready again (pid %d)", kept.service.name, kept.process.pid)


def _launch(service: Service) -> ChildProcess:
    return ChildProcess(service.name, service.command, log_path=service.log_path, env=service.env)
