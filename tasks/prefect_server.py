"""The Prefect server that shows a run: somebody's, or one of our own on a database beside the runs.

Enters: the Prefect section of the config and the folder of runs. Leaves: an API URL in the environment, set before
`prefect` is imported for the first time. A server of ours is a separate process: it ends with `stop()` or with us.
"""

import json
import logging
import os
import time
from pathlib import Path

import httpx

from gyre_core.config import PrefectConfig
from gyre_core.errors import SetupError
from gyre_core.process import ChildProcess, free_port

logger = logging.getLogger(__name__)

# No telemetry, and larger batches in the server's recorders: with one event a transaction (the default) the server
# costs twice the CPU (measured, labs of October 2026).
SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
}
CLIENT_SETTINGS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "gyre_core,tasks,flows",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the terminal is the progress display's; the UI has all
    "PREFECT_CLIENT_METRICS_ENABLED": "false",
}


class PrefectServer:
    """Where the API is, and the process when it is ours.

    Example: server = ensure_server(config.prefect, Path("runs")); ...; server.stop()
    """

    def __init__(self, api_url: str, process: ChildProcess | None, address_file: Path | None) -> None:
        self.api_url = api_url
        self._process = process
        self._address_file = address_file

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    def wait(self) -> None:
        """Block until a server of ours ends (used by `gyre ui`)."""
        while self._process is not None and self._process.running():
            time.sleep(0.5)

    def stop(self) -> None:
        """End the server if it is ours; somebody else's is left alone."""
        if self._process is not None:
            self._process.stop()
            if self._address_file is not None:
                self._address_file.unlink(missing_ok=True)


def ensure_server(config: PrefectConfig, runs_dir: Path, *, timeout_s: float = 120.0) -> PrefectServer:
    """Find or start a server and point this process's Prefect at it.

    In this order: `prefect.api_url` of the config, PREFECT_API_URL, a live server that another run of the same folder
    started, a new one. Raises SetupError when the named server does not answer or ours does not start.
    """
    home = (runs_dir / "prefect").resolve()
    home.mkdir(parents=True, exist_ok=True)
    os.environ.update({name: os.environ.get(name, value) for name, value in CLIENT_SETTINGS.items()})
    named = config.api_url or os.environ.get("PREFECT_API_URL")
    if named:
        if not _healthy(named, timeout_s=10.0):
            raise SetupError(
                f"the Prefect server at {named} does not answer; start it, or unset prefect.api_url and "
                "PREFECT_API_URL to let the run start its own"
            )
        os.environ["PREFECT_API_URL"] = named
        return PrefectServer(named, None, None)
    os.environ["PREFECT_HOME"] = str(home)
    address_file = home / "server.json"
    running = _running_server(address_file)
    if running:
        os.environ["PREFECT_API_URL"] = running
        return PrefectServer(running, None, None)
    port = config.port if config.port and _is_free(config.port) else free_port()
    server = start_server(home, port, timeout_s=timeout_s)
    os.environ["PREFECT_API_URL"] = server.api_url
    return server


def start_server(home: Path, port: int, *, timeout_s: float = 120.0) -> PrefectServer:
    """A server of ours on a database in `home`, when it answers. Raises SetupError when it does not."""
    address_file = home / "server.json"
    api_url = f"http://127.0.0.1:{port}/api"
    process = ChildProcess(
        "Prefect server",
        [*_prefect_command(), "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        log_path=home / "server.log",
        env={**SERVER_SETTINGS, "PREFECT_HOME": str(home), "PREFECT_API_URL": api_url},
    )
    try:
        process.wait_until(lambda: _healthy(api_url, timeout_s=1.0), timeout_s=timeout_s, error=SetupError)
    except BaseException:
        process.stop()
        raise
    address_file.write_text(json.dumps({"api_url": api_url, "pid": process.pid}), encoding="utf-8")
    logger.info("Prefect server at %s, database in %s", api_url, home)
    return PrefectServer(api_url, process, address_file)


def flush_logs() -> None:
    """Send what Prefect's log handler still holds; call before stopping a server."""
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=5)


def _prefect_command() -> list[str]:
    from gyre_core.process import python_command

    return python_command("tasks.prefect_process")


def _healthy(api_url: str, *, timeout_s: float) -> bool:
    try:
        return httpx.get(f"{api_url}/health", timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def _running_server(address_file: Path) -> str | None:
    try:
        address = json.loads(address_file.read_text(encoding="utf-8"))["api_url"]
    except (OSError, ValueError, KeyError):
        return None
    return address if _healthy(address, timeout_s=2.0) else None


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
