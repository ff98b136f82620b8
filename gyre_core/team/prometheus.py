"""A private Prometheus, where the program is installed: it scrapes every process of Gyre, and Prefect's server.

Enters: a folder, a port, where Gyre's processes announce themselves (gyre_core/metrics_endpoint.py). Leaves: its
configuration and the command that runs it. Optional: without the program a team is up all the same.
"""

import shutil
import signal
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gyre_core.team.foreign import foreign_command

INSTALL_COMMAND = "apt-get install -y --no-install-recommends prometheus"
_SCRAPE_S = 10
_RETENTION = "30d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """One server, running or not.

    Example: Prometheus(folder=Path("runs/team/prometheus"), port=9090, metrics=Path("runs/team/metrics"), ...)
    """

    folder: Path
    port: int
    metrics: Path  # Gyre's token and target files
    prefect: str  # host:port of Prefect's server
    rules: Path | None = None  # alerting rules

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self) -> dict[str, Any]:
        """What prometheus.yml holds."""
        gyre = {
            "job_name": "gyre",
            "authorization": {"type": "Bearer", "credentials_file": str(self.metrics / "token")},
            "file_sd_configs": [{"files": [str(self.metrics / "targets" / "*.json")], "refresh_interval": "15s"}],
        }
        prefect = {
            "job_name": "prefect",
            "metrics_path": "/api/metrics",
            "static_configs": [{"targets": [self.prefect]}],
        }
        content: dict[str, Any] = {
            "global": {"scrape_interval": f"{_SCRAPE_S}s", "evaluation_interval": "30s"},
            "scrape_configs": [gyre, prefect],
        }
        if self.rules is not None:
            content["rule_files"] = [str(self.rules)]
        return content

    def prepare(self) -> None:
        """Write what the server reads when it starts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.metrics / "targets").mkdir(parents=True, exist_ok=True)
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self.config(), sort_keys=False), encoding="utf-8")

    def command(self, program: Path) -> list[str]:
        """The server in the foreground."""
        return foreign_command(
            [
                str(program),
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--storage.tsdb.retention.time={_RETENTION}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--log.level=warn",
            ],
            stop_signal=signal.SIGTERM,
        )

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


def find_prometheus() -> Path | None:
    """The program, None where it is not installed."""
    found = shutil.which("prometheus")
    return None if found is None else Path(found)
