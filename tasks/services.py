"""The processes a run needs beside itself: the proxy and its cell. Started together, stopped together.

Enters: the run's configuration and folder. Leaves: their addresses and secrets, which never appear in a Prefect
parameter, a log line or the store. Both end when this process ends, whatever ends it.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from gyre_core.cells.client import CellClient
from gyre_core.cells.settings import CellSettings
from gyre_core.config import RunConfig
from gyre_core.errors import EngineError, GyreError, ProxyError
from gyre_core.process import ChildProcess, free_port, new_secret, python_command
from gyre_core.proxy.settings import ProxySettings
from gyre_core.run_folder import RunFolder

logger = logging.getLogger(__name__)

# The trainer shares its cores with harnesses, engine and Prefect: threads that spin while they wait for each other made
# a micro-step 5-20 times slower when the cores were busy (measured on 2 cores).
CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Where the run's processes are.

    Example: with running_services(config, folder, ...) as services: services.cell.status()
    """

    proxy_url: str
    proxy_secret: str
    cell: CellClient


@contextlib.contextmanager
def running_services(
    config: RunConfig, folder: RunFolder, *, policy_version: int, checkpoint: Path | None
) -> Iterator[Services]:
    """Start the proxy and the cell host; raises EngineError or ProxyError with a log's tail."""
    folder.logs.mkdir(exist_ok=True)
    proxy_settings = ProxySettings(
        port=free_port(),
        admin_secret=new_secret(),
        model_path=config.model.path,
        renderer=config.model.renderer,
        context_length=config.model.context_length,
        journal_dir=folder.journal,
        engine_call_timeout_s=config.engine.call_timeout_s,
    )
    cell_settings = CellSettings(
        cell_id="cell-0",
        port=free_port(),
        secret=new_secret(),
        model_path=config.model.path,
        context_length=config.model.context_length,
        slots=config.rollout.slots,
        seed=config.seed,
        work_dir=folder.path,
        engine=config.engine,
        train=config.train,
        transfer=config.transfer,
        policy_version=policy_version,
        checkpoint=checkpoint,
    )
    proxy_url = f"http://{proxy_settings.host}:{proxy_settings.port}"
    cell = CellClient(f"http://{cell_settings.host}:{cell_settings.port}", cell_settings.secret)
    children: list[ChildProcess] = []
    with _settings_files(folder, proxy_settings, cell_settings) as (proxy_file, cell_file):
        try:
            for name, module, settings_file in (
                ("cell host", "gyre_core.cells", cell_file),
                ("proxy", "gyre_core.proxy", proxy_file),
            ):
                log_path = folder.logs / f"{module.rpartition('.')[2]}.log"
                command = python_command(module, "--settings", str(settings_file))
                children.append(ChildProcess(name, command, log_path=log_path, env=CHILD_ENVIRONMENT))
            boot_s = config.engine.boot_timeout_s + 60
            children[0].wait_until(lambda: _answers(cell), timeout_s=boot_s, error=EngineError)
            children[1].wait_until(lambda: _healthy(f"{proxy_url}/healthz"), timeout_s=60, error=ProxyError)
            yield Services(proxy_url=proxy_url, proxy_secret=proxy_settings.admin_secret, cell=cell)
        finally:
            cell.close()
            for child in reversed(children):
                child.stop(grace_s=20)


@contextlib.contextmanager
def _settings_files(folder: RunFolder, proxy: ProxySettings, cell: CellSettings) -> Iterator[tuple[Path, Path]]:
    """The children's settings on disk, readable by us alone, gone afterwards: they hold secrets."""
    paths = (folder.work / "proxy.json", folder.work / "cell.json")
    folder.work.mkdir(exist_ok=True)
    try:
        for path, settings in zip(paths, (proxy, cell), strict=True):
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(settings.model_dump_json())
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _answers(cell: CellClient) -> bool:
    try:
        cell.status()
    except GyreError:
        return False
    return True


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
