"""The processes that `gyre bench proxy` measures: the engine, Gyre's proxy, LiteLLM's proxy.

Enters: a folder for settings and logs. Leaves: servers on ports of this machine, one process each, ended with the
block. LiteLLM lives in an environment of its own that is made on demand (pip, from the configured index) at the version
below; its process gets no environment variable of ours.
"""

import contextlib
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from gyre_core.bench.proxy_engine import FixedReply
from gyre_core.errors import ProxyError, SetupError
from gyre_core.process import ChildProcess, free_port, new_secret, python_command
from gyre_core.proxy.settings import ProxySettings

# Not the newest: the `proxy` extra of the next ones (1.108.14, 1.110.2) names releases that the index does not have.
LITELLM = "litellm[proxy]==1.106.12"
CONTEXT_LENGTH = 500_000
BOOT_TIMEOUT_S = 180.0  # LiteLLM imports for half a minute on a slow disk

_LITELLM_CONFIG = """\
model_list:
  - model_name: policy
    litellm_params:
      model: openai/policy
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
litellm_settings:
  telemetry: false
general_settings:
  master_key: {key}
"""
_LITELLM_ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION",  # its guide to production asks for these two
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a price list when it starts
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server."""

    name: str
    port: int
    pid: int
    secret: str = ""  # of Gyre's admin API, LiteLLM's key

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def memory_mb(self) -> float:
        """Resident memory, in 10^6 bytes."""
        return psutil.Process(self.pid).memory_info().rss / 1e6


@contextlib.contextmanager
def engine_server(folder: Path, reply: FixedReply) -> Iterator[Server]:
    """The fake engine."""
    path = folder / "reply.json"
    path.write_bytes(reply.to_json())
    port = free_port()
    command = python_command("gyre_core.bench.proxy_engine", "--port", str(port), "--reply", str(path))
    with _running("engine", command, folder, port, "/health") as server:
        yield server


@contextlib.contextmanager
def gyre_server(folder: Path, model_path: Path, engine: Server, *, slots: int) -> Iterator[Server]:
    """Gyre's proxy with the settings of a run: a journal that is synced before each reply goes out."""
    settings = ProxySettings(
        port=free_port(),
        admin_secret=new_secret(),
        model_path=model_path,
        context_length=CONTEXT_LENGTH,
        journal_dir=folder / "journal",
    )
    path = folder / "proxy.json"
    path.write_text(settings.model_dump_json())
    command = python_command("gyre_core.proxy", "--settings", str(path))
    with _running("gyre", command, folder, settings.port, "/healthz", secret=settings.admin_secret) as server:
        body = {"engines": [{"url": f"http://127.0.0.1:{engine.port}", "slots": slots}], "policy_version": 0}
        reply = httpx.put(
            f"http://127.0.0.1:{server.port}/admin/engines", json=body, headers=admin_headers(server), trust_env=False
        )
        reply.raise_for_status()
        yield server


@contextlib.contextmanager
def litellm_server(folder: Path, environment: Path, engine: Server) -> Iterator[Server]:
    """LiteLLM's proxy in front of the engine's OpenAI-compatible side; one worker, its key, no database."""
    config, key = folder / "litellm.yaml", f"sk-{new_secret()}"
    config.write_text(_LITELLM_CONFIG.format(port=engine.port, key=key))
    port = free_port()
    variables = {**_LITELLM_ENVIRONMENT, "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    command = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    command += [str(environment.absolute() / "bin/litellm"), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--keepalive_timeout", "75"]
    with _running("litellm", command, folder, port, "/health/liveliness", secret=key) as server:
        yield server


def install_litellm(environment: Path) -> None:
    """Make the environment unless it is there; raises SetupError with pip's last words."""
    marker = environment / "installed"
    if marker.is_file() and marker.read_text().strip() == LITELLM:
        return
    sys.stderr.write(f"installing {LITELLM} into {environment} (some minutes, once)\n")
    if not (environment / "bin/python").exists():
        venv.create(environment, with_pip=True)
    command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", LITELLM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(
            f"{LITELLM} cannot be installed (measure without it: --without-litellm):\n{done.stderr[-1500:]}"
        )
    marker.write_text(LITELLM + "\n")


def admin_headers(server: Server) -> dict[str, str]:
    """What Gyre's admin API asks for."""
    return {"authorization": f"Bearer {server.secret}"}


@contextlib.contextmanager
def _running(
    name: str, command: list[str], folder: Path, port: int, health: str, *, secret: str = ""
) -> Iterator[Server]:
    child = ChildProcess(name, command, log_path=folder / f"{name}.log")
    try:
        url = f"http://127.0.0.1:{port}{health}"
        child.wait_until(lambda: _answers(url), timeout_s=BOOT_TIMEOUT_S, error=ProxyError)
        yield Server(name=name, port=port, pid=child.pid, secret=secret)
    finally:
        child.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
