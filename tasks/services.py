"""The processes a run needs beside itself: its proxies and its cell. Started together, stopped together.

Enters: the run's configuration and folder. Leaves: their addresses and secrets, which never appear in a Prefect
parameter, a log line or the store. All end when this process ends, whatever ends it. A proxy that dies is started again
(gyre_core/proxy/supervisor.py); a cell that dies ends the run.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gyre_core.cells.client import CellClient
from gyre_core.cells.settings import CellSettings
from gyre_core.config import RunConfig
from gyre_core.errors import ConfigError, EngineError, GyreError
from gyre_core.process import ChildProcess, free_port, new_secret, python_command, secret_file
from gyre_core.proxy.pool import Shards
from gyre_core.proxy.settings import ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
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

    proxies: Shards
    cell: CellClient


@contextlib.contextmanager
def running_services(
    config: RunConfig, folder: RunFolder, *, policy_version: int, checkpoint: Path | None
) -> Iterator[Services]:
    """Start the proxies and the cell host; raises ConfigError, EngineError or ProxyError with a log's tail."""
    proxies = proxy_settings(config, folder)
    folder.logs.mkdir(exist_ok=True)
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
    with contextlib.ExitStack() as stack:
        cell = CellClient(f"http://{cell_settings.host}:{cell_settings.port}", cell_settings.secret)
        stack.callback(cell.close)
        cell_file = stack.enter_context(secret_file(folder.work / "cell.json", cell_settings.model_dump_json()))
        host = ChildProcess(
            "cell host",
            python_command("gyre_core.cells", "--settings", str(cell_file)),
            log_path=folder.logs / "cells.log",
            env=CHILD_ENVIRONMENT,
        )
        stack.callback(host.stop, grace_s=20)
        supervisor = stack.enter_context(
            ProxySupervisor(proxies, work=folder.work, logs=folder.logs, env=CHILD_ENVIRONMENT)
        )
        boot_s = config.engine.boot_timeout_s + 60
        host.wait_until(lambda: _answers(cell), timeout_s=boot_s, error=EngineError)
        supervisor.wait_ready()
        yield Services(proxies=supervisor.shards, cell=cell)


def proxy_settings(config: RunConfig, folder: RunFolder) -> list[ProxySettings]:
    """One proxy process's settings each: a secret and a journal of its own. Raises ConfigError."""
    try:
        return [
            ProxySettings(
                admin_secret=new_secret(),
                model_path=config.model.path,
                renderer=config.model.renderer,
                context_length=config.model.context_length,
                journal_dir=folder.journal / str(index),
                journal_sync=config.proxy.journal_sync,
                keepalive_s=config.proxy.keepalive_s,
                engine_call_timeout_s=config.engine.call_timeout_s,
                max_body_bytes=config.proxy.max_body_bytes,
                role_tables=config.proxy.role_tables,
            )
            for index in range(config.proxy.processes)
        ]
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False)]
        raise ConfigError(f"the section [proxy] cannot be used: {'; '.join(problems)}") from error


def _answers(cell: CellClient) -> bool:
    try:
        cell.status()
    except GyreError:
        return False
    return True
