"""A team's services on one machine: PostgreSQL, an S3 store, Prefect's server on that PostgreSQL, process workers, and
Prometheus where it is installed.

Enters: a folder of runs. Leaves: `<runs>/team/team.json` with addresses and process ids while it is up, and the
environment that gyre's commands and Prefect's need. Ports, passwords and keys are made once and kept, so that what was
deployed stays valid; they lie in `<runs>/team/secrets.json`, for its owner alone. One team a folder (a lock).
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gyre_core.errors import SetupError
from gyre_core.metrics_endpoint import VARIABLE as METRICS_VARIABLE
from gyre_core.metrics_endpoint import metrics_token
from gyre_core.process import python_command
from gyre_core.team.postgres import Postgres, find_postgres, init_postgres
from gyre_core.team.prometheus import Prometheus, find_prometheus
from gyre_core.team.seaweedfs import PORT_NAMES, SeaweedFS
from gyre_core.team.supervisor import Service, Supervisor
from tasks.prefect_server import CLIENT_SETTINGS, SERVER_SETTINGS

logger = logging.getLogger(__name__)

DATABASE = "prefect"
BUCKET = "gyre"

# What a database that lives for months needs: finished flow runs (their logs and artifacts with them) and events go
# after a time, and a lease on a deployment's place outlives the server's restart.
TEAM_SERVER_SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(30 * 86400),
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
    "PREFECT_SERVER_METRICS_ENABLED": "true",
}
# Flow runs tell that they live; infra/automations.yaml marks silent ones as crashed.
WORKER_SETTINGS = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_LOGGING_LEVEL": "INFO",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPlan:
    """Everything that is decided before anything starts; the same at each start of one folder.

    Example: plan_team(Path("runs"), port=4200).api_url
    """

    folder: Path
    postgres: Postgres
    seaweedfs: SeaweedFS
    api_port: int
    prometheus_port: int

    @property
    def prometheus(self) -> Prometheus:
        return Prometheus(
            folder=self.folder / "prometheus",
            port=self.prometheus_port,
            metrics=self.metrics,
            prefect=f"127.0.0.1:{self.api_port}",
        )

    @property
    def metrics(self) -> Path:
        """Where Gyre's processes announce their Prometheus endpoints."""
        return self.folder / "metrics"

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}/api"

    def store_url(self, run: str) -> str:
        """What `[store] url` takes for a run of this team."""
        return self.seaweedfs.url(BUCKET, f"{run}/store")

    def client_environment(self) -> dict[str, str]:
        """What gyre's commands, Prefect's, workers and flow runs need."""
        return {
            **CLIENT_SETTINGS,
            **self.seaweedfs.credentials(),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "DO_NOT_TRACK": "1",
            METRICS_VARIABLE: str(self.metrics),
        }


def plan_team(runs_dir: Path, *, port: int = 0) -> TeamPlan:
    """Read what an earlier start decided, or decide it; `port` is the UI's (0: any free one, the first time).

    Raises SetupError when a program is missing.
    """
    folder = (runs_dir / "team").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)  # PostgreSQL's user must pass through it when we are root
    known = folder / "secrets.json"
    if not known.exists():
        _write_private(known, _decide())
    decided = json.loads(known.read_text(encoding="utf-8"))
    if port and port != decided["api_port"]:
        decided["api_port"] = port
        _write_private(known, decided)
    return TeamPlan(
        folder=folder,
        postgres=Postgres(
            programs=find_postgres(),
            data=folder / "postgres",
            port=decided["postgres_port"],
            password=decided["postgres_password"],
        ),
        seaweedfs=SeaweedFS(
            folder=folder / "seaweedfs",
            ports=tuple(decided["seaweedfs_ports"]),
            access_key=decided["access_key"],
            secret_key=decided["secret_key"],
        ),
        api_port=decided["api_port"],
        prometheus_port=decided["prometheus_port"],
    )


@contextlib.contextmanager
def running_team(plan: TeamPlan, *, pool: str, workers: int = 1) -> Iterator[Supervisor]:
    """Start everything, then the workers, who make their pool; all end with the block. Raises SetupError."""
    with _only_one(plan.folder), Supervisor() as team:
        logs = plan.folder / "logs"
        init_postgres(plan.postgres, scratch=plan.folder)
        team.start(
            Service(
                name="postgres",
                command=plan.postgres.command(),
                log_path=logs / "postgres.log",
                ready=plan.postgres.ready,
                started=lambda: plan.postgres.create_database(DATABASE),
            )
        )
        plan.seaweedfs.prepare()
        team.start(
            Service(
                name="seaweedfs",
                command=plan.seaweedfs.command(),
                log_path=logs / "seaweedfs.log",
                ready=plan.seaweedfs.ready,
                started=lambda: plan.seaweedfs.make_bucket(BUCKET),
            )
        )
        team.start(_server(plan, logs))
        metrics_token(plan.metrics)
        prometheus = find_prometheus()
        if prometheus is not None:
            plan.prometheus.prepare()
            team.start(
                Service(
                    name="prometheus",
                    command=plan.prometheus.command(prometheus),
                    log_path=logs / "prometheus.log",
                    ready=plan.prometheus.ready,
                )
            )
        for index in range(workers):
            team.start(_worker(plan, logs, pool=pool, name=f"worker-{index}"))
        state = plan.folder / "team.json"
        state.write_text(json.dumps(describe_team(plan, team), indent=1), encoding="utf-8")
        try:
            yield team
        finally:
            state.unlink(missing_ok=True)


def describe_team(plan: TeamPlan, team: Supervisor) -> dict[str, Any]:
    """Addresses and process ids, without secrets."""
    return {
        "api_url": plan.api_url,
        "ui_url": plan.api_url.removesuffix("/api"),
        "store_endpoint": plan.seaweedfs.endpoint,
        "bucket": BUCKET,
        "metrics": str(plan.metrics),
        "prometheus_url": plan.prometheus.url if "prometheus" in team.pids() else None,
        "database": f"127.0.0.1:{plan.postgres.port}/{DATABASE}",
        "pids": team.pids(),
        "restarts": team.restarts,
    }


def team_environment(runs_dir: Path) -> dict[str, str]:
    """The environment of a team that is up; raises SetupError when none is."""
    if not (runs_dir / "team" / "team.json").is_file():
        raise SetupError(f"no team is up in {runs_dir}; start one with `gyre up --profile team --runs-dir {runs_dir}`")
    return plan_team(runs_dir).client_environment()


def _server(plan: TeamPlan, logs: Path) -> Service:
    environment = {
        **SERVER_SETTINGS,
        **TEAM_SERVER_SETTINGS,
        "PREFECT_HOME": str(plan.folder / "prefect"),
        "PREFECT_API_URL": plan.api_url,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": plan.postgres.url(DATABASE),
    }
    return Service(
        name="prefect-server",
        command=python_command(
            "tasks.prefect_process", "server", "start", "--host", "127.0.0.1", "--port", str(plan.api_port)
        ),
        log_path=logs / "prefect-server.log",
        env=environment,
        ready=lambda: _answers(f"{plan.api_url}/health"),
        boot_timeout_s=600.0,  # the first start makes the tables: 12 s, but minutes on a machine that is very busy
    )


def _worker(plan: TeamPlan, logs: Path, *, pool: str, name: str) -> Service:
    def ready() -> bool:
        try:
            reply = httpx.post(f"{plan.api_url}/work_pools/{pool}/workers/filter", json={}, timeout=2.0)
            return any(worker["name"] == name and worker["status"] == "ONLINE" for worker in reply.json())
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    return Service(
        name=name,
        command=python_command(
            "tasks.prefect_process", "worker", "start", "--pool", pool, "--type", "process", "--name", name
        ),
        log_path=logs / f"{name}.log",
        env={**plan.client_environment(), **WORKER_SETTINGS},
        ready=ready,
        boot_timeout_s=300.0,
        grace_s=30.0,  # its flow runs end with it
    )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _decide() -> dict[str, Any]:
    free = _free_ports(3 + 2 * len(PORT_NAMES))
    return {
        "api_port": free[0],
        "postgres_port": free[1],
        "prometheus_port": free[2],
        "seaweedfs_ports": free[3:],
        "postgres_password": secrets.token_hex(16),
        "access_key": f"gyre{secrets.token_hex(6)}",
        "secret_key": secrets.token_hex(20),
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _write_private(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
    temporary.rename(path)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(
                f"a team is up in {folder.parent} already; its addresses are in {folder}/team.json"
            ) from None
        yield
    finally:
        os.close(descriptor)
