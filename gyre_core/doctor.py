"""What this machine has and lacks, for people: one Check a subject, each with the command that mends it.

Enters: nothing but the machine (and, for tests, a config and probes). Leaves: checks in a fixed order. Nothing is
installed, started for good or changed; the slowest parts are importing Mooncake and running one probe in a sandbox.
`missing` means that a run cannot start; `warn` that it starts with less; `ok` may still tell what is optional.
"""

import ctypes
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from gyre_core.config import EngineConfig, PrefectConfig
from gyre_core.engine.launch import EngineInstall, check_install, find_engine_python, inspect_python, nvidia_gpu_present
from gyre_core.errors import SetupError
from gyre_core.rollout.sandbox import Backend, probe_backend

Status = Literal["ok", "warn", "missing"]

DISTRIBUTION = "gyre-rl"
INSTALL_COMMAND = "make install"
ENGINE_COMMAND = "make engine"
LIBIBVERBS_COMMAND = "apt-get install -y --no-install-recommends libibverbs1"
# A quickstart run leaves about 0.3 GB; the rest is room for pip, logs and a second run.
_WANTED_DISK_GB = 3.0
_LEAST_DISK_GB = 0.5
# Measured on the quickstart: SGLang 1.7 GB, trainer 1 GB, flow, proxy and Prefect server 1 GB, harnesses 1 GB.
_WANTED_MEMORY_GB = 6.0
_LEAST_MEMORY_GB = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding.

    Example: Check(name="disk", ok="warn", detail="1.2 GB free in /data, 3 GB wanted", fix_command="")
    """

    name: str
    ok: Status
    detail: str  # one sentence
    fix_command: str = ""  # exact shell command; "" when nothing needs mending or no command can


def run_checks(folder: Path | None = None) -> list[Check]:
    """Look at everything, in the order a reader mends it. `folder` is where runs would go (default: here)."""
    root = Path(__file__).parents[1]
    return [
        check_python(),
        check_packages(metadata.requires(DISTRIBUTION) or [], _installed_version),
        *check_engine(root),
        check_mooncake(),
        check_sandbox(probe_backend),
        check_disk(folder or Path.cwd()),
        check_memory(psutil.virtual_memory().available / 1e9),
        check_cores(len(os.sched_getaffinity(0))),
        check_gpu(),
        check_port(PrefectConfig().port),
        check_chromium(shutil.which),
    ]


def check_python() -> Check:
    """The interpreter that runs gyre."""
    version = platform.python_version()
    detail = f"{version} in {sys.prefix}"
    state = _marker_state(Path(sys.prefix))
    if state not in {"", "ready"}:
        detail += "; its set-up did not finish"
        return Check(name="python", ok="missing", detail=detail, fix_command=INSTALL_COMMAND)
    return Check(name="python", ok="ok", detail=detail)


def check_packages(requirements: list[str], installed: Callable[[str], str | None]) -> Check:
    """Each requirement of the distribution against what is installed; `installed` gives a version or None."""
    wrong = []
    shown = []
    count = 0
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", "quickstart")
        ):
            continue
        count += 1
        version = installed(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed (wanted: {requirement.specifier or 'any'})")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version} (wanted: {requirement.specifier})")
        elif requirement.name in {"torch", "megatron-core", "prefect", "renderers", "pyarrow"}:
            shown.append(f"{requirement.name} {version}")
    if wrong:
        return Check(name="packages", ok="missing", detail="; ".join(wrong), fix_command=INSTALL_COMMAND)
    return Check(name="packages", ok="ok", detail=f"{count} packages as pinned: {', '.join(shown)}")


def check_engine(
    root: Path, inspect: Callable[[Path], EngineInstall] = inspect_python, config: EngineConfig | None = None
) -> list[Check]:
    """The SGLang server's interpreter, its version, its CPU plugin, and its Mooncake."""
    folder = root / ".venv-engine"
    if _marker_state(folder) not in {"", "ready"}:
        detail = f"{folder}: its set-up did not finish"
        return [Check(name="engine", ok="missing", detail=detail, fix_command=ENGINE_COMMAND)]
    try:
        install = inspect(find_engine_python(config or EngineConfig(), root=root))
        check_install(install)
    except SetupError as error:
        return [Check(name="engine", ok="missing", detail=str(error), fix_command=ENGINE_COMMAND)]
    detail = f"sglang {install.sglang}, torch {install.torch}, serves on {install.device}, {install.python}"
    checks = [Check(name="engine", ok="ok", detail=detail)]
    if install.device == "cpu":
        checks.append(Check(name="engine plugin", ok="ok", detail=f"gyre-sglang-cpu {install.plugin}"))
    if install.mooncake:
        checks.append(Check(name="engine mooncake", ok="ok", detail="loads: weights can be written into the server"))
    else:
        detail = f"does not load ({install.mooncake_error}); weights travel through local files"
        fix = _libibverbs_fix() or ENGINE_COMMAND
        checks.append(Check(name="engine mooncake", ok="warn", detail=detail, fix_command=fix))
    return checks


def check_mooncake(command: list[str] | None = None) -> Check:
    """Whether the transfer engine loads here, tried in a process of its own (it prints, and may abort)."""
    command = command or [sys.executable, "-c", "import mooncake.engine"]
    environ = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
        error = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as problem:
        failed, error = True, [str(problem)]
    if not failed:
        version = _installed_version("mooncake-transfer-engine-non-cuda") or _installed_version(
            "mooncake-transfer-engine"
        )
        return Check(name="mooncake", ok="ok", detail=f"transfer engine {version or ''} loads")
    detail = f"does not load ({' '.join(error) or 'no message'}); transfer.backend auto uses local files instead"
    return Check(name="mooncake", ok="warn", detail=detail, fix_command=_libibverbs_fix() or INSTALL_COMMAND)


def check_sandbox(probe: Callable[[Backend], str]) -> Check:
    """Which back end really runs a process here; `probe` says why one does not, or is empty."""
    bubblewrap, namespaces = probe("bubblewrap"), probe("namespaces")
    if not bubblewrap:
        others = "" if namespaces else "; namespaces work too"
        return Check(name="sandbox", ok="ok", detail=f"bubblewrap works{others}")
    if not namespaces:
        return Check(name="sandbox", ok="ok", detail=f"namespaces work (bubblewrap: {bubblewrap})")
    detail = f"none works. bubblewrap: {bubblewrap}. namespaces: {namespaces}"
    fix = "apt-get install -y bubblewrap" if os.geteuid() == 0 else "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    return Check(name="sandbox", ok="missing", detail=detail, fix_command=fix)


def check_disk(folder: Path) -> Check:
    """Free space where runs go."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    detail = f"{free_gb:.1f} GB free in {folder}"
    if free_gb < _LEAST_DISK_GB:
        return Check(name="disk", ok="missing", detail=f"{detail}; at least {_LEAST_DISK_GB} GB are needed")
    if free_gb < _WANTED_DISK_GB:
        return Check(name="disk", ok="warn", detail=f"{detail}; {_WANTED_DISK_GB:.0f} GB are comfortable")
    return Check(name="disk", ok="ok", detail=detail)


def check_memory(available_gb: float) -> Check:
    """Memory that is free now, for a server and a trainer side by side."""
    detail = f"{available_gb:.1f} GB available"
    if available_gb < _LEAST_MEMORY_GB:
        return Check(name="memory", ok="missing", detail=f"{detail}; a run needs {_LEAST_MEMORY_GB:.0f} GB")
    if available_gb < _WANTED_MEMORY_GB:
        return Check(
            name="memory", ok="warn", detail=f"{detail}; the quickstart is comfortable with {_WANTED_MEMORY_GB:.0f} GB"
        )
    return Check(name="memory", ok="ok", detail=detail)


def check_cores(num_cores: int) -> Check:
    """Cores this process may use."""
    if num_cores < 2:
        return Check(name="cores", ok="warn", detail="1 core: the quickstart takes about twice as long")
    return Check(name="cores", ok="ok", detail=f"{num_cores} cores")


def check_gpu() -> Check:
    """NVIDIA GPU or not; both are fine."""
    if not nvidia_gpu_present():
        return Check(name="gpu", ok="ok", detail="no NVIDIA GPU: engine and trainer run on the CPU")
    return Check(name="gpu", ok="warn", detail="NVIDIA GPU found; the GPU builds are written but untested so far")


def check_port(port: int) -> Check:
    """The Prefect UI's usual port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            detail = f"{port} is taken ({error.strerror}); give another: --set prefect.port=0 takes any free one"
            return Check(name="port", ok="warn", detail=detail)
    return Check(name="port", ok="ok", detail=f"{port} is free for the Prefect UI")


def check_chromium(which: Callable[[str], str | None]) -> Check:
    """A browser without a screen; only the pictures in docs/ are made with it."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))), None)
    detail = f"{found}" if found else "not there; optional (pictures of the UI for the documentation)"
    return Check(name="chromium", ok="ok", detail=detail)


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _libibverbs_fix() -> str:
    """The command for Mooncake's system library, "" when it is there."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return LIBIBVERBS_COMMAND if os.geteuid() == 0 else f"sudo {LIBIBVERBS_COMMAND}"
    return ""


def _marker_state(prefix: Path) -> str:
    """What infra/setup recorded in an environment: building, ready, or "" where it recorded nothing."""
    try:
        return str(json.loads((prefix / ".gyre-env.json").read_text(encoding="utf-8")).get("state", ""))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        return "damaged"
