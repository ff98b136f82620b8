"""Keeps a run's proxy processes alive: one that dies is started again with the same port, settings and journal.

Enters: one ProxySettings a process. Leaves: `Shards`, through which pools find the processes. The supervisor holds the
listening sockets and lends them to the processes, so that connections made while a process is down wait in the socket's
queue until the new one takes them: harnesses see a slow proxy or a broken connection, which their clients retry, never
a refused one. The journal brings the sessions back, the last engines are told again.

Invariant: a process that dies more often than the budget allows is given up; then every verb that needs it, and
`Shards.check`, raise a ProxyError that says why, and its port refuses. One that answers nothing for `hang_s` is killed,
and then it is one that died.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import ProxyError
from gyre_core.process import ChildProcess, listen, log_tail, python_command, secret_file
from gyre_core.proxy.pool import ProxyAddress, ProxyPool, Shards
from gyre_core.proxy.settings import ProxySettings

logger = logging.getLogger(__name__)

BOOT_S = 120.0  # the tokenizer, and the journal's sessions after a restart
HANG_S = 180.0  # without any answer: a million tokens rendered on a busy machine take some tens of seconds
LOOK_S = 5.0  # between two questions whether it lives
FIRST_PAUSE_S = 0.5  # before the second restart in a row; doubles with each


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """How often one process may be started again.

    Example: RestartBudget(restarts=5, window_s=600.0)
    """

    restarts: int = 5
    window_s: float = 600.0


class RestartLog:
    """When one process was restarted lately."""

    def __init__(self, budget: RestartBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._times: deque[float] = deque()

    def next_pause_s(self) -> float | None:
        """Count a restart: how long to wait before it, None when the budget does not allow it."""
        now_s = self._clock.monotonic_s()
        while self._times and now_s - self._times[0] >= self._budget.window_s:
            self._times.popleft()
        recent = len(self._times)
        if recent >= self._budget.restarts:
            return None
        self._times.append(now_s)
        return FIRST_PAUSE_S * 2 ** (recent - 1) if recent else 0.0


class ProxySupervisor:
    """The proxy processes of a run; a context manager.

    Example: with ProxySupervisor([settings], work=Path("work"), logs=Path("logs")) as supervisor: supervisor.shards
    """

    def __init__(
        self,
        settings: Sequence[ProxySettings],
        *,
        work: Path,
        logs: Path,
        env: Mapping[str, str] | None = None,
        budget: RestartBudget | None = None,
        clock: Clock | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        self._settings = settings
        self._hang_s = hang_s
        self._work, self._logs, self._env = work, logs, env
        self._budget = budget or RestartBudget()
        self._clock = clock or SystemClock()
        self._stack = contextlib.ExitStack()
        self._proxies: list[_Supervised] = []
        self.shards: Shards

    def __enter__(self) -> "ProxySupervisor":
        """Start all; `wait_ready` waits for them. Raises ProxyError."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            addresses = []
            for index, given in enumerate(self._settings):
                try:
                    listener = stack.enter_context(listen(given.host, given.port))
                except OSError as error:
                    raise ProxyError(f"no proxy can listen on {given.host}:{given.port}: {error}") from error
                settings = given.model_copy(update={"port": listener.getsockname()[1]})
                host = f"[{settings.host}]" if ":" in settings.host else settings.host
                addresses.append(ProxyAddress(url=f"http://{host}:{settings.port}", secret=settings.admin_secret))
                name = "proxy" if len(self._settings) == 1 else f"proxy-{index}"
                file = stack.enter_context(secret_file(self._work / f"{name}.json", settings.model_dump_json()))
                log_path = self._logs / f"{name}.log"
                log = RestartLog(self._budget, self._clock)
                self._proxies.append(_Supervised(index, name, listener, file, log_path, self._env, log, self._hang_s))
            self.shards = Shards(addresses)
            for proxy in self._proxies:
                proxy.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """The processes' ids now."""
        return [proxy.pid for proxy in self._proxies]

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until all answer, then watch them; raises ProxyError with the log's tail when one does not start."""
        if timeout_s is None:
            timeout_s = 60.0 + 5.0 * len(self._proxies)  # they share the machine's cores
        for proxy in self._proxies:
            proxy.wait_ready(self.shards, timeout_s)
        for proxy in self._proxies:
            proxy.watch(self.shards)

    def _stop(self) -> None:
        if self._proxies:
            with ThreadPoolExecutor(max_workers=len(self._proxies)) as pool:
                list(pool.map(lambda proxy: proxy.stop(), self._proxies))


class _Supervised:
    """One process over its restarts, with a thread that waits for its end."""

    def __init__(
        self,
        index: int,
        name: str,
        listener: socket.socket,
        settings_file: Path,
        log_path: Path,
        env: Mapping[str, str] | None,
        restarts: RestartLog,
        hang_s: float,
    ) -> None:
        self._hang_s = hang_s
        self._index, self._name, self._listener, self._log_path, self._env = index, name, listener, log_path, env
        descriptor = listener.fileno()
        self._command = python_command(
            "gyre_core.proxy", "--settings", str(settings_file), "--listen-fd", str(descriptor)
        )
        self._descriptor = descriptor
        self._restarts = restarts
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start the process, unless all are being stopped."""
        with self._lock:
            if not self._stopping.is_set():
                self._child = ChildProcess(
                    self._name,
                    self._command,
                    log_path=self._log_path,
                    env=self._env,
                    pass_fds=(self._descriptor,),
                )

    def wait_ready(self, shards: Shards, timeout_s: float) -> None:
        """Wait until it answers; raises ProxyError."""
        assert self._child is not None
        url = f"{shards.addresses[self._index].url}/healthz"
        self._child.wait_until(lambda: _healthy(url), timeout_s=timeout_s, error=ProxyError)

    def watch(self, shards: Shards) -> None:
        """Restart it from now on when it ends."""
        self._thread = threading.Thread(
            target=self._watch, args=(shards,), name=f"{self._name}-supervisor", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End it for good."""
        with self._lock:
            self._stopping.set()
        if self._child is not None:
            self._child.stop(grace_s=20)
        self._listener.close()  # what waits in its queue would keep the thread waiting too
        if self._thread is not None:
            self._thread.join()

    def _watch(self, shards: Shards) -> None:
        while True:
            assert self._child is not None
            code = self._end_of(self._child, f"{shards.addresses[self._index].url}/healthz")
            if self._stopping.is_set():
                return
            self._child.stop()  # what it may have left in its process group
            pause_s = self._restarts.next_pause_s()
            if pause_s is None:
                self._give_up(shards, f"ended with exit code {code} once more than it may be restarted")
                return
            logger.warning(
                "%s (pid %d) ended with exit code %d: starting it again%s; its log is %s",
                self._name,
                self._child.pid,
                code,
                f" in {pause_s:g} s" if pause_s else "",
                self._log_path,
            )
            if self._stopping.wait(pause_s):
                return
            self.start()
            shards.restarted(self._index)
            try:
                self.wait_ready(shards, BOOT_S)
                asyncio.run(self._repeat_engines(shards))
                logger.warning("%s is back with its sessions (pid %d)", self._name, self._child.pid)
            except ProxyError as error:
                if not self._stopping.is_set():
                    logger.warning("%s did not come back: %s", self._name, error)
                    self._child.stop()  # the next turn counts it as one more death

    def _end_of(self, child: ChildProcess, url: str) -> int:
        """Wait for the process's end; one that hangs is killed. Returns its exit code."""
        answered_s = time.monotonic()
        while (code := child.wait_for(min(LOOK_S, self._hang_s))) is None:
            if _answers(url):
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s >= self._hang_s and not self._stopping.is_set():
                logger.warning("%s (pid %d) has not answered for %g s: killed", self._name, child.pid, self._hang_s)
                child.stop(grace_s=0)
        return code

    async def _repeat_engines(self, shards: Shards) -> None:
        async with ProxyPool(shards) as pool:
            await pool.repeat_engines(self._index)

    def _give_up(self, shards: Shards, why: str) -> None:
        tail = log_tail(self._log_path)
        reason = f"{self._name} {why}; its log {self._log_path} ends with:\n{tail}"
        logger.error("%s", reason)
        shards.lose(self._index, reason)
        self._listener.close()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _answers(url: str) -> bool:
    """Whether anything comes back: a proxy that refuses because it is busy lives."""
    try:
        httpx.get(url, timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return True
