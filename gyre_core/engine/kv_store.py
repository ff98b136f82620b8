"""The store of keys and values that the engines of a run share: a Mooncake master, and what a server needs to join.

Enters: EngineConfig. Leaves: an address on 127.0.0.1 that servers are started with. Each server lends host memory to
the store and writes every full page of a finished or aborted call through to it, so that the call goes on elsewhere
with little to compute anew. Invariants: it is a cache, never a record; a master that dies costs recomputation only,
and is started again at its address, where the servers join it by themselves; it dies with the process that started it.
"""

import contextlib
import logging
import shutil
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from gyre_core.config.models import EngineConfig
from gyre_core.engine.launch import (
    GUARD,
    EngineInstall,
    check_kv_store,
    find_engine_python,
    inspect_python,
)
from gyre_core.errors import ConfigError, EngineError
from gyre_core.process import ChildProcess, free_port

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
KV_WRITE_S = 0.2  # from a call's abort until its pages can be read elsewhere: never missed, 0 s once in two (measured)
READY_TIMEOUT_S = 30.0  # measured 0.1 s idle
STOP_GRACE_S = 15.0  # the guard kills at once and waits up to 10 s for the kernel
SETTLED_S = 60.0  # a master that lived for so long is started again at once when it dies
MAX_DELAY_S = 30.0  # between two starts of a master that dies at once, each time


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreContents:
    """What the master counts.

    Example: KvStoreContents(num_objects=28, size_bytes=57344, capacity_bytes=2147483648, num_engines=2)
    """

    num_objects: int  # keys of a page and values of a page are two
    size_bytes: int  # in use
    capacity_bytes: int  # that the engines lend
    num_engines: int  # processes that joined and answer


class KvStore:
    """One Mooncake master process, as a context. Threads may share it; its owner starts and stops it.

    Example: with KvStore(config, log_path=Path("kv.log")) as store: SGLangServer(config, ..., kv_store=store.address)
    """

    def __init__(self, config: EngineConfig, *, log_path: Path, install: EngineInstall | None = None) -> None:
        """`install` is asked of config's interpreter by default.

        Raises ConfigError when that has no Mooncake, SetupError when there is nothing to serve with.
        """
        install = install or inspect_python(find_engine_python(config))
        check_kv_store(install)
        self._program = master_program(install)
        self._log_path = log_path
        self._port = 0
        self._metrics_port = 0
        self._child: ChildProcess | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self.restarts = 0  # masters that died and were replaced

    @property
    def address(self) -> str:
        """host:port for servers; known from `start` on, and the same after a restart."""
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the master's guard, whose death ends the master."""
        if self._child is None:
            raise EngineError("the KV store was not started")
        return self._child.pid

    def running(self) -> bool:
        """Whether a master lives. It may not be ready yet."""
        with self._lock:
            return self._child is not None and self._child.running()

    def contents(self) -> KvStoreContents:
        """Ask the master; raises EngineError when it does not answer."""
        url = f"http://{HOST}:{self._metrics_port}/metrics"
        try:
            reply = httpx.get(url, timeout=READY_TIMEOUT_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"the KV store did not answer {url}: {error!r}", retryable=True) from error
        return parse_contents(reply.text)

    def start(self) -> None:
        """Start the master and wait until it accepts connections; raises EngineError with its log's tail."""
        if self._watcher is not None:
            raise EngineError(f"the KV store at {self.address} was started already")
        self._port, self._metrics_port = free_port(), free_port()
        self._child = child = self._launch()
        try:
            child.wait_until(self._accepts, timeout_s=READY_TIMEOUT_S, error=EngineError)
        except BaseException:
            child.stop(grace_s=STOP_GRACE_S)
            raise
        self._watcher = threading.Thread(target=self._watch, args=(child,), name="kv-store", daemon=True)
        self._watcher.start()
        logger.info("KV store at %s (pid %d, log %s)", self.address, child.pid, self._log_path)

    def stop(self) -> None:
        """Kill the master; returns when it is gone. Engines that still run lose their shared cache only."""
        with self._lock:
            self._stopping.set()
            child = self._child
        if child is not None:
            child.stop(grace_s=STOP_GRACE_S)
        if self._watcher is not None:
            self._watcher.join()

    def __enter__(self) -> "KvStore":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _launch(self) -> ChildProcess:
        command = master_command(self._program, port=self._port, metrics_port=self._metrics_port)
        return ChildProcess("kv-store", [sys.executable, "-I", "-S", str(GUARD), *command], log_path=self._log_path)

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, self._port), timeout=1.0):
            return True
        return False

    def _watch(self, child: ChildProcess) -> None:
        """Start the master again whenever it ends, until `stop`."""
        quick_deaths = 0
        while True:
            started = time.monotonic()
            code = child.wait()
            quick_deaths = quick_deaths + 1 if time.monotonic() - started < SETTLED_S else 0
            if self._stopping.wait(restart_delay_s(quick_deaths)):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                self.restarts += 1
                logger.warning("KV store ended (exit code %d): restart %d at %s", code, self.restarts, self.address)
                self._child = child = self._launch()


def restart_delay_s(quick_deaths: int) -> float:
    """Seconds until the next start, after so many deaths in a row that each came soon: 0, 0.2, 0.4, ... 30.

    While no master answers, each new call waits some seconds for it (measured: 5 s), so the first start is at once.
    """
    return 0.0 if quick_deaths < 2 else min(MAX_DELAY_S, 0.1 * 2.0 ** min(quick_deaths - 1, 20))


def parse_contents(text: str) -> KvStoreContents:
    """The master's counters, from its metrics in Prometheus' text form."""
    words = (line.split() for line in text.splitlines() if not line.startswith("#"))
    values = {line[0]: int(float(line[1])) for line in words if len(line) == 2 and "{" not in line[0]}
    try:
        return KvStoreContents(
            num_objects=values["master_key_count"],
            size_bytes=values["master_allocated_bytes"],
            capacity_bytes=values["master_total_capacity_bytes"],
            num_engines=values["master_active_clients"],
        )
    except KeyError as error:
        raise EngineError(f"the KV store's metrics lack {error}") from error


def master_program(install: EngineInstall) -> Path:
    """`mooncake_master` of the engine's environment, else of PATH; raises ConfigError when there is none."""
    beside = install.python.parent / "mooncake_master"
    if beside.exists():
        return beside
    found = shutil.which("mooncake_master")
    if found is None:
        raise ConfigError(
            f'engine.kv_store = "mooncake" needs the program mooncake_master, which is neither beside {install.python} '
            'nor in PATH: run `make engine`, or set engine.kv_store = "none"'
        )
    return Path(found)


def master_command(program: Path, *, port: int, metrics_port: int) -> list[str]:
    """The master's command line. It writes nothing to disk and reports nothing by itself."""
    return [
        str(program),
        f"--rpc_address={HOST}",
        f"--rpc_port={port}",
        f"--metrics_host={HOST}",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",
        "--logtostderr",
    ]
