"""What has to be built, decided from files alone: no process is started and nothing is written here.

Enters: the repository's folder and whether there is an NVIDIA GPU. Leaves: for each environment the pip steps, a hash
of everything that determines them, and the decision keep, update or rebuild. Python 3.11 standard library only.
"""

import hashlib
import json
import sys
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

TORCH = "torch==2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SGLANG = "sglang==0.5.23"  # the plugin's hooks patch internals: exact
TORCHVISION = "torchvision==0.28.0"  # the one built for torch 2.13; SGLang imports it
XGRAMMAR = "xgrammar==0.2.7"  # SGLang imports it; without its dependencies (they pull another torch)
MARKER = ".gyre-env.json"  # inside each environment, so that deleting the folder deletes the record


@dataclass(frozen=True)
class Step:
    """One pip call. `alternatives`: further argument lists, tried in order when the one before fails."""

    title: str
    args: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Environment:
    """A virtual environment that Gyre needs. Sizes and times were measured on 2 cores without a GPU."""

    name: str
    folder: Path
    what: str
    disk_gb: float
    minutes: float
    steps: tuple[Step, ...]
    check: str  # python code that proves the environment
    inputs: str  # hash: another value means that the steps have to run again


class Decision(StrEnum):
    KEEP = "keep"  # up to date
    UPDATE = "update"  # whole, but inputs changed: run the steps over it
    REBUILD = "rebuild"  # missing, half built, moved, or another Python: from scratch
    REFUSE = "refuse"  # not ours: never touched


def torch_step(gpu: bool) -> Step:
    """torch first, so that nothing else picks its build: the CPU one without a GPU, the default (CUDA) one with one."""
    if gpu or sys.platform != "linux":
        return Step("torch 2.13.0", ("install", TORCH))
    return Step(
        "torch 2.13.0 (CPU build)",
        ("install", f"{TORCH}+cpu"),  # where the configured index or folder has it
        (
            ("install", f"{TORCH}+cpu", "--extra-index-url", PYTORCH_CPU_INDEX),
            ("install", TORCH),  # some index has a CPU build under the plain version; PyPI's works too but is large
        ),
    )


def gyre_environment(root: Path, gpu: bool) -> Environment:
    """`.venv`: gyre itself, its tests and its linters."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    constraints = root / "infra/setup/constraints.txt"
    extra = "gpu" if gpu else "cpu"
    steps = (
        Step("pip", ("install", "--upgrade", "pip>=25.1")),  # dependency groups
        torch_step(gpu),
        Step(
            f"gyre with [{extra},quickstart] and the development tools",
            (
                "install",
                "-c",
                str(constraints),
                "-e",
                f"{root}[{extra},quickstart]",
                "--group",
                f"{root}/pyproject.toml:dev",
            ),
        ),
    )
    packaging = {
        "project": project["project"],
        "groups": project.get("dependency-groups", {}),
        "build": project["build-system"],
        "hatch": project.get("tool", {}).get("hatch", {}),
    }
    return Environment(
        name="gyre",
        folder=root / ".venv",
        what="gyre, Megatron-core, Prefect, test tools" + ("; CUDA builds: untested so far" if gpu else ""),
        disk_gb=12.0 if gpu else 2.0,
        minutes=10.0 if gpu else 2.5,
        steps=steps,
        check="import torch, gyre_core, flows, tasks",
        inputs=_hash(root, steps, [json.dumps(packaging, sort_keys=True), constraints.read_text(encoding="utf-8")]),
    )


def engine_environment(root: Path, gpu: bool) -> Environment:
    """`.venv-engine`: the SGLang server, which pins other versions of torch's neighbours than gyre does."""
    folder = root / "infra/engine"
    mooncake = _mooncake_requirement(root, gpu)
    if gpu:
        steps = (
            Step("pip", ("install", "--upgrade", "pip>=25.1")),
            Step("SGLang with its CUDA kernels", ("install", SGLANG.replace("==", "[tracing]=="))),
            Step("Mooncake transfer engine", ("install", mooncake)),
        )
        return Environment(
            name="engine",
            folder=root / ".venv-engine",
            what="the SGLang server with CUDA kernels: untested so far",
            disk_gb=12.0,
            minutes=10.0,
            steps=steps,
            check=_versions_check(SGLANG),
            inputs=_hash(root, steps, []),
        )
    requirements = folder / "requirements-cpu.txt"
    constraints = folder / "constraints-cpu.txt"
    plugin = folder / "plugin"
    steps = (
        Step("pip", ("install", "--upgrade", "pip>=25.1")),
        torch_step(gpu=False),
        Step("SGLang 0.5.23", ("install", "--no-deps", SGLANG, TORCHVISION)),
        Step("what a CPU server imports", ("install", "-c", str(constraints), "-r", str(requirements))),
        Step("xgrammar", ("install", "--no-deps", XGRAMMAR)),
        Step("the CPU platform plugin", ("install", "--no-deps", "--force-reinstall", str(plugin))),
        Step("Mooncake transfer engine", ("install", "-c", str(constraints), mooncake)),
    )
    files = [requirements, constraints, *_sources(plugin)]
    return Environment(
        name="engine",
        folder=root / ".venv-engine",
        what="the SGLang server on CPU",
        disk_gb=2.7,
        minutes=1.5,
        steps=steps,
        check=_versions_check(SGLANG, TORCHVISION, XGRAMMAR),
        inputs=_hash(root, steps, [path.read_text(encoding="utf-8") for path in files]),
    )


def decide(environment: Environment, root: Path) -> tuple[Decision, str]:
    """What to do with an environment, and why. Reads its marker only."""
    folder = environment.folder
    if not folder.exists() or not any(folder.iterdir()):
        return Decision.REBUILD, "not there"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Decision.REFUSE, "was not made by this script"
    except ValueError:
        return Decision.REBUILD, "its record is damaged"
    if marker.get("state") != "ready":
        return Decision.REBUILD, "an earlier set-up did not finish"
    if marker.get("root") != str(root):
        return Decision.REBUILD, f"was built in {marker.get('root')}; environments cannot be moved"
    if not (folder / "bin/python").exists():
        return Decision.REBUILD, "its Python is gone"
    if marker.get("python") != python_version():
        return Decision.REBUILD, f"was built with Python {marker.get('python')}, now {python_version()}"
    if marker.get("inputs") != environment.inputs:
        return Decision.UPDATE, "requirements changed"
    return Decision.KEEP, "up to date"


def marker_text(environment: Environment, root: Path, state: str) -> str:
    """The environment's record: `building` before the first pip call, `ready` after the check."""
    record = {"state": state, "inputs": environment.inputs, "root": str(root), "python": python_version()}
    return json.dumps(record, indent=1) + "\n"


def python_version() -> str:
    """Major and minor version of the running Python, which is the one that builds."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _sources(folder: Path) -> list[Path]:
    """A package's own files: what pip leaves beside them while building (build/, *.egg-info) changes nothing."""
    paths = (path for path in folder.rglob("*") if path.suffix in {".py", ".toml"})
    return sorted(path for path in paths if "build" not in path.relative_to(folder).parts)


def _mooncake_requirement(root: Path, gpu: bool) -> str:
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return next(line for line in extras["gpu" if gpu else "cpu"] if line.startswith("mooncake-transfer-engine"))


def _versions_check(*pins: str) -> str:
    wanted = dict(pin.split("==") for pin in pins)
    return (
        "import sys; from importlib.metadata import version; "
        f"wrong = [n + ' ' + version(n) for n, v in {wanted!r}.items() if version(n).split('+')[0] != v]; "
        "sys.exit('not as pinned: ' + ', '.join(wrong) if wrong else 0)"
    )


def _hash(root: Path, steps: tuple[Step, ...], texts: list[str]) -> str:
    described = json.dumps([[step.args, step.alternatives] for step in steps]).replace(str(root), "")
    return hashlib.sha256("\0".join([described, *texts]).encode()).hexdigest()
