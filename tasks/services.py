"""The processes a run needs beside itself: its proxies, its cells, and a KV store. Started together, stopped together.

Enters: the run's configuration and folder. Leaves: their addresses and secrets, which never appear in a Prefect
parameter, a log line or the store. All end when this process ends, whatever ends it. A proxy that dies is started again
(gyre_core/proxy/supervisor.py), and so is a cell (gyre_core/cells/fleet.py).
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gyre_core.cells.fleet import CellFleet
from gyre_core.cells.fleet_launch import Launch
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config import RunConfig
from gyre_core.engine.kv_store import KvStore
from gyre_core.errors import ConfigError
from gyre_core.process import free_port, new_secret
from gyre_core.proxy.pool import Shards
from gyre_core.proxy.settings import ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
from gyre_core.run_folder import RunFolder
from gyre_core.tracing.settings import TracingSettings

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"
# The trainer shares its cores with harnesses, engine and Prefect: threads that spin while they wait for each other made
# a micro-step 5-20 times slower when the cores were busy (measured on 2 cores).
CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Where the run's processes are.

    Example: with running_services(config, folder, ...) as services: services.fleet.views()
    """

    proxies: Shards
    fleet: CellFleet


@contextlib.contextmanager
def running_services(
    config: RunConfig, folder: RunFolder, *, policy_version: int, checkpoint: Path | None
) -> Iterator[Services]:
    """Start the proxies and the cells; raises ConfigError, EngineError or ProxyError with a log's tail."""
    proxies = proxy_settings(config, folder)
    folder.logs.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        supervisor = stack.enter_context(
            ProxySupervisor(proxies, work=folder.work, logs=folder.logs, env=CHILD_ENVIRONMENT)
        )
        kv_address = None
        if config.engine.kv_store == "mooncake":
            kv_address = stack.enter_context(KvStore(config.engine, log_path=folder.logs / "kv-store.log")).address
        cells = cell_settings(config, folder, policy_version=policy_version, kv_store=kv_address, checkpoint=checkpoint)
        fleet = stack.enter_context(
            CellFleet(
                cells,
                shards=supervisor.shards,
                logs=folder.logs,
                work=folder.work,
                scheduler=config.scheduler,
                env=CHILD_ENVIRONMENT,
                launch=cell_launcher(config, folder),
            )
        )
        supervisor.wait_ready()
        yield Services(proxies=supervisor.shards, fleet=fleet)


def cell_settings(
    config: RunConfig, folder: RunFolder, *, policy_version: int, kv_store: str | None, checkpoint: Path | None
) -> list[CellSettings]:
    """One cell's settings each: the core first, which alone starts from the checkpoint."""
    hosts = config.scheduler.hosts or (LOCALHOST,) * config.scheduler.cells
    channel: Literal["local", "mooncake"] = "mooncake" if config.scheduler.hosts else "local"
    members = MembersSettings(host=hosts[0], port=free_port(), secret=new_secret(), channel=channel)
    return [
        CellSettings(
            cell_id=f"cell-{index}",
            host=hosts[index],
            port=free_port(),
            secret=new_secret(),
            model_path=config.model.path,
            context_length=config.model.context_length,
            slots=config.slots_per_cell,
            seed=config.seed,
            work_dir=folder.path,
            engine=config.engine,
            train=config.train,
            transfer=config.transfer,
            kv_store=kv_store,
            emulate=config.emulate,
            nodes=config.scheduler.nodes_per_cell,
            nodes_port=config.scheduler.nodes_port + index if config.scheduler.nodes_per_cell > 1 else 0,
            tracing=tracing_settings(config, folder),
            policy_version=policy_version if index == 0 else 0,
            checkpoint=checkpoint if index == 0 else None,
            members=members if index == 0 else None,
            core_url=f"http://{members.host}:{members.port}" if index else None,
            core_secret=members.secret if index else "",
            core_channel=channel,
        )
        for index in range(config.scheduler.cells)
    ]


def cell_launcher(config: RunConfig, folder: RunFolder) -> Launch | None:
    """How cell hosts are started: None for child processes of this one."""
    if config.scheduler.work_pool is None:
        return None
    from tasks.cell_launch import WorkerLauncher

    return WorkerLauncher(pool=config.scheduler.work_pool, run_id=folder.run_id, work=folder.work, logs=folder.logs)


def tracing_settings(config: RunConfig, folder: RunFolder) -> TracingSettings | None:
    """Where every process of the run sends its spans."""
    return TracingSettings.of(config.tracing, run=folder.run_id, run_folder=folder.path)


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
                tracing=tracing_settings(config, folder),
            )
            for index in range(config.proxy.processes)
        ]
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False)]
        raise ConfigError(f"the section [proxy] cannot be used: {'; '.join(problems)}") from error
