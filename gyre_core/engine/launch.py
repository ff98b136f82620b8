"""What to run for an SGLang server: which interpreter, which flags, which environment.

Pure but for `inspect_python`, which asks an interpreter what it has. CPU flags are measured on the reference machine;
GPU flags are written from SGLang's documentation and untested here.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gyre_core.config.models import EngineConfig
from gyre_core.engine.serve import KEY_VARIABLE
from gyre_core.errors import ConfigError, EngineError, SetupError
from gyre_core.transfer.mooncake import mooncake_environment, transport_protocol

SGLANG_VERSION = "0.5.23"  # also in infra/engine/plugin, which replaces internals of exactly this version
INSTALL_COMMAND = "make engine"
SERVE = Path(__file__).with_name("serve.py")
GUARD = Path(__file__).with_name("guard.py")
INSPECT_TIMEOUT_S = 60.0  # a cold disk; 0.1 s when warm

Device = Literal["cpu", "cuda"]

_INSPECT = """
import json
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
found = {"sglang": version("sglang"), "plugin": version("gyre-sglang-cpu"), "torch": version("torch")}
try:
    import mooncake.engine
    found["mooncake"], found["mooncake_error"] = True, ""
except Exception as error:
    found["mooncake"], found["mooncake_error"] = False, repr(error)
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInstall:
    """An interpreter and what it can serve with.

    Example: EngineInstall(python=Path(".venv-engine/bin/python"), sglang="0.5.23", plugin="0.1.0", ...)
    """

    python: Path
    sglang: str | None  # version, None when absent
    plugin: str | None  # version of gyre-sglang-cpu
    torch: str | None
    mooncake: bool  # importable, system libraries included
    mooncake_error: str  # why not, for people

    @property
    def device(self) -> Device:
        """What this installation serves on: a CPU build of torch says so in its version."""
        return "cpu" if self.torch is None or "+cpu" in self.torch or not nvidia_gpu_present() else "cuda"


def nvidia_gpu_present() -> bool:
    """Whether the machine has an NVIDIA GPU that its driver knows."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or shutil.which("nvidia-smi") is not None


def find_engine_python(config: EngineConfig, *, root: Path | None = None) -> Path:
    """The interpreter that serves: config.python, else `.venv-engine` beside the package, else this one with sglang.

    Raises SetupError with the command that mends it.
    """
    if config.python is not None:
        if not config.python.exists():
            raise SetupError(f"engine.python is {config.python}, which does not exist; leave it out, or correct it")
        return config.python
    candidate = (root or Path(__file__).parents[2]) / ".venv-engine" / "bin" / "python"
    if candidate.exists():
        return candidate
    own = Path(sys.executable)
    if inspect_python(own).sglang is not None:
        return own
    raise SetupError(f"no SGLang server is installed ({candidate} is absent): run `{INSTALL_COMMAND}`")


def inspect_python(python: Path) -> EngineInstall:
    """Ask an interpreter which of the packages it has; raises SetupError when it does not run."""
    command = [str(python), "-c", _INSPECT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise SetupError(f"{python} does not run ({error}): run `{INSTALL_COMMAND}`") from error
    return EngineInstall(python=python, **found)


def check_install(install: EngineInstall) -> None:
    """Raise SetupError unless the installation can serve."""
    if install.sglang is None:
        raise SetupError(f"{install.python} has no sglang: run `{INSTALL_COMMAND}`")
    if install.device == "cpu" and install.sglang != SGLANG_VERSION:
        raise SetupError(
            f"{install.python} has sglang {install.sglang}; the CPU platform plugin works with {SGLANG_VERSION} only: "
            f"run `{INSTALL_COMMAND}`"
        )
    if install.device == "cpu" and install.plugin is None:
        raise SetupError(
            f"{install.python} lacks the CPU platform plugin gyre-sglang-cpu (infra/engine/plugin): run "
            f"`{INSTALL_COMMAND}`"
        )


def check_kv_store(install: EngineInstall) -> None:
    """Raise ConfigError unless servers of this installation can share keys and values through Mooncake."""
    if not install.mooncake:
        raise ConfigError(
            f'engine.kv_store = "mooncake" needs Mooncake, which does not load in {install.python} '
            f"({install.mooncake_error}): run `{INSTALL_COMMAND}` and `apt-get install -y --no-install-recommends "
            'libibverbs1`, or set engine.kv_store = "none"'
        )


def read_vocab_size(model_path: Path) -> int:
    """Rows of a model's embedding, from its config.json; raises EngineError when that is not readable."""
    path = model_path / "config.json"
    try:
        size = json.loads(path.read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} is not a model's configuration ({error!r}): correct model.path") from error
    if not isinstance(size, int) or size < 1:
        raise EngineError(f"{path} has vocab_size {size!r}: correct model.path")
    return size


def read_kv_heads(model_path: Path) -> int:
    """Key-value heads of a model, from its config.json; raises EngineError when that is not readable."""
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("num_key_value_heads") or config["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} does not tell its attention heads ({error!r}): correct model.path") from error


def launch_command(
    install: EngineInstall,
    config: EngineConfig,
    *,
    model_path: Path,
    context_length: int,
    slots: int,
    seed: int,
    policy_version: int,
    port: int,
    memory_port: int | None,
    kv_store: str | None = None,
    host: str = "127.0.0.1",
    otlp_endpoint: str | None = None,
    meeting: str = "",
    node: int = 0,
) -> list[str]:
    """The server's command line. `memory_port` opens the weights' memory to one-sided writes; None leaves them closed.

    `kv_store` (host:port of a Mooncake master) shares keys and values with the other engines there.
    `otlp_endpoint` (a collector's URL) lets the server add its own spans to the traces of the calls that it gets.
    `meeting` (host:port) is where the ranks of `config.nodes` machines meet, `node` which of them the command is for.
    `slots` bounds the running calls, so that the router's count and the engine's agree. The prefix cache stays on.
    """
    command = [str(install.python), "-P", str(SERVE)]
    command += ["--model-path", str(model_path), "--host", host, "--port", str(port)]
    command += ["--dtype", config.dtype, "--context-length", str(context_length)]
    command += ["--max-total-tokens", str(config.max_total_tokens), "--max-running-requests", str(slots)]
    command += ["--random-seed", str(seed), "--weight-version", str(policy_version)]
    command += ["--grammar-backend", "none", "--skip-server-warmup"]
    # An idle server would poll its sockets and burn a core that the trainer needs (measured: 1.0 against 0.01 cores).
    command += ["--sleep-on-idle"]
    command += ["--log-level-http", "warning", "--decode-log-interval", "400"]
    if install.device == "cpu":
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--disable-cuda-graph", "--mem-fraction-static", "0.5"]
    else:
        command += ["--device", "cuda", "--enable-memory-saver"]  # the KV pool's memory is the trainer's meanwhile
    if config.tensor_parallel > 1:
        command += ["--tp-size", str(config.tensor_parallel)]
    if config.nodes > 1:
        command += ["--nnodes", str(config.nodes), "--node-rank", str(node), "--dist-init-addr", meeting]
    if memory_port is not None:
        command += ["--remote-instance-weight-loader-start-seed-via-transfer-engine"]
        command += ["--engine-info-bootstrap-port", str(memory_port)]
    if kv_store is not None:
        command += kv_store_arguments(install, config, kv_store)
    if otlp_endpoint is not None:
        command += ["--enable-trace", "--otlp-service-name", "sglang"]
        command += ["--otlp-traces-endpoint", f"{otlp_endpoint.rstrip('/')}/v1/traces"]
    return [*command, *config.extra_args]


def kv_store_arguments(install: EngineInstall, config: EngineConfig, address: str) -> list[str]:
    """Flags of the hierarchical cache with the Mooncake master at `address` below it.

    Written through at once, because a call may move at any time; read for any missing page (SGLang's own threshold is
    256 tokens), waiting until all of it has come. Keys carry the served name, not a folder; weights are told apart by
    each call's `cache_salt`.
    """
    # GPU: SGLang's documentation for Mooncake; untested here.
    backend, layout = ("direct", "page_first_direct") if install.device == "cpu" else ("kernel", "page_first")
    host, _, _ = address.rpartition(":")
    store = {
        "master_server_address": address,
        "local_hostname": host,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": transport_protocol(),
        "device_name": "",
        "global_segment_size": config.kv_store_bytes,
        "prefetch_threshold": config.kv_page_tokens,
    }
    arguments = ["--served-model-name", "policy", "--page-size", str(config.kv_page_tokens)]
    arguments += ["--enable-hierarchical-cache", "--hicache-ratio", str(config.kv_host_ratio)]
    arguments += ["--hicache-io-backend", backend, "--hicache-mem-layout", layout]
    arguments += ["--hicache-write-policy", "write_through", "--hicache-storage-backend", "mooncake"]
    arguments += ["--hicache-storage-prefetch-policy", "wait_complete"]
    return [*arguments, "--hicache-storage-backend-extra-config", json.dumps(store)]


def launch_environment(install: EngineInstall, config: EngineConfig, *, api_key: str) -> Mapping[str, str]:
    """Variables that the server needs beside the inherited ones; `api_key` is what requests must bring."""
    environment = {
        KEY_VARIABLE: api_key,  # here and not on the command line, which every user of the machine can read
        "HF_HUB_OFFLINE": "1",  # a missing file is an error at once, not minutes of retries
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_HOST_IP": "127.0.0.1",  # of the weights' memory, which the trainer of the same machine writes
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # of --enable-trace
        **mooncake_environment(),
    }
    if install.device == "cpu":
        environment |= {
            "SGLANG_PLATFORM": "gyre_cpu",
            "SGLANG_USE_CPU_ENGINE": "0",  # the built-in CPU engine needs AMX kernels
            "OMP_NUM_THREADS": str(config.threads),
            # Inductor would compile C++ on the first request: a stall of 10 s and more, and a compiler is needed.
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if config.tensor_parallel > 1:  # it counts all ranks, those of other machines too
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(config.tensor_parallel)
    return environment


def cores_of_ranks(count: int) -> str:
    """Which of this process' cores each rank takes, as SGLang reads it; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    size = max(1, len(cores) // count)
    shares = [[cores[(rank * size + index) % len(cores)] for index in range(size)] for rank in range(count)]
    return "|".join(",".join(map(str, share)) for share in shares)
