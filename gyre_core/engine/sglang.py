"""Starting and ending an SGLang server.

Enters: EngineConfig and a model folder. Leaves: a server, on 127.0.0.1 by default, that is ready for calls, or an
EngineError with the telling lines of its log and what to do. Invariants: the server's processes die with the process
that started it, however that ends (engine/guard.py), also in the middle of booting; `stop` returns when they are gone.
A server asks every request for its random key (engine/serve.py): agents share the machine's network.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from gyre_core.config.models import EngineConfig
from gyre_core.engine.launch import (
    GUARD,
    INSTALL_COMMAND,
    EngineInstall,
    check_install,
    check_kv_store,
    find_engine_python,
    inspect_python,
    launch_command,
    launch_environment,
    read_kv_heads,
    read_vocab_size,
)
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.errors import EngineError
from gyre_core.nodes import NodeHub
from gyre_core.process import ChildProcess, free_port, new_secret
from gyre_core.transfer.layout import WHOLE, EngineRanks

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between readiness checks
STOP_GRACE_S = 15.0  # the guard kills at once and waits up to 10 s for the kernel

# Words of a failed start's log and what mends it, first match first.
HINTS: tuple[tuple[str, str], ...] = (
    ("gyre-sglang-cpu:", f"run `{INSTALL_COMMAND}`"),
    ("not found in discovered platform plugins", f"the CPU platform plugin is missing: run `{INSTALL_COMMAND}`"),
    ("No module named", f"the engine's environment is incomplete: run `{INSTALL_COMMAND}`"),
    ("address already in use", "another program took the port: start again, a new one is chosen"),
    ("is already in use", "another program took the port: start again, a new one is chosen"),
    ("out of memory", "lower engine.max_total_tokens or end other programs"),
    ("Not enough memory", "lower engine.max_total_tokens or end other programs"),
    ("Failed to setup Mooncake store", "the KV store's master did not answer: see its log, or set engine.kv_store"),
    ("Cannot allocate memory", "lower engine.max_total_tokens or end other programs"),
    ("opentelemetry package is not installed", f'tracing.export = "otlp" needs it: run `{INSTALL_COMMAND}`'),
    ("unrecognized arguments", "engine.extra_args holds an option that this SGLang does not have"),
    ("No space left on device", "free disk space (the log, /tmp or /dev/shm is full)"),
    ("greater than the derived context_length", "lower model.context_length to what the model's config.json allows"),
    ("Can't load the configuration", "model.path is no Hugging Face model folder"),
    ("Cannot find any model weights", "model.path has no *.safetensors"),
)


class SGLangServer:
    """One server process. Threads may share it; `start`, `wait_ready` and `stop` are called by its owner.

    Example: server = SGLangServer(EngineConfig(), Path("policy"), context_length=4096, slots=16, log_path=Path("log"))
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        context_length: int,
        slots: int,
        log_path: Path,
        seed: int = 0,
        policy_version: int = 0,
        port: int = 0,
        remote_weights: bool = True,
        kv_store: str | None = None,
        host: str = "127.0.0.1",
        otlp_endpoint: str | None = None,
        nodes: NodeHub | None = None,
    ) -> None:
        """`port` 0 takes a free one, `host` is the address on which it is reached. `remote_weights` opens the weights'
        memory to Mooncake where it loads.

        `kv_store` is the address of a KvStore (engine/kv_store.py), or None; `otlp_endpoint` that of a collector that
        gets the server's own spans, `nodes` the cell's further machines. Raises SetupError when there is nothing to
        serve with, ConfigError for a KV store without Mooncake, EngineError for a model folder that is none.
        """
        self.config = config
        self.host = host
        self.model_path = model_path.absolute()
        self.log_path = log_path
        self.policy_version = policy_version
        self.vocab_size = read_vocab_size(self.model_path)
        self.install = self._inspect()
        if kv_store is not None:
            check_kv_store(self.install)
        self.kv_store = kv_store
        self.otlp_endpoint = otlp_endpoint
        self.nodes = nodes
        self.remote_weights = remote_weights and self.install.mooncake
        self.slots = slots
        self.api_key = new_secret()  # what requests must bring: `client` does
        self._context_length = context_length
        self._seed = seed
        self._fixed_port = port
        self.port = port
        self._memory_port: int | None = None
        self._child: ChildProcess | None = None
        self._log_start = 0

    def _inspect(self) -> EngineInstall:
        install = inspect_python(find_engine_python(self.config))
        check_install(install)
        return install

    @property
    def ranks(self) -> EngineRanks:
        """How its weights are split."""
        count = self.config.tensor_parallel
        return EngineRanks(count=count, kv_heads=read_kv_heads(self.model_path)) if count > 1 else WHOLE

    @property
    def dtype(self) -> str:
        """Type of the weights."""
        return self.config.dtype

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.install.device

    @property
    def shares_memory(self) -> bool:
        """Whether engine and trainer take turns with the device's memory: the KV pool is given back while it trains."""
        return self.device != "cpu"

    @property
    def url(self) -> str:
        """Where the server answers; known from `start` on."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server's guard, whose death ends the server."""
        if self._child is None:
            raise EngineError("the engine was not started")
        return self._child.pid

    def running(self) -> bool:
        """Whether the server's process lives. It may not be ready yet."""
        return self._child is not None and self._child.running()

    def client(self, *, timeout_s: float | None = None) -> SGLangClient:
        """A client for the calling event loop; close it there."""
        return SGLangClient(
            self.url,
            vocab_size=self.vocab_size,
            api_key=self.api_key,
            timeout_s=timeout_s or self.config.call_timeout_s,
        )

    def start(self) -> None:
        """Start the processes and return at once; `wait_ready` says when calls can come."""
        if self.running():
            raise EngineError(f"the engine at {self.url} is running already")
        self.port = self._fixed_port or free_port()
        self._memory_port = free_port() if self.remote_weights else None
        meeting = f"{self.host}:{free_port()}" if self.config.nodes > 1 else ""
        environment = launch_environment(self.install, self.config, api_key=self.api_key)
        if self.config.nodes > 1:
            if self.nodes is None or self.nodes.count != self.config.nodes:
                raise EngineError(f"engine.nodes is {self.config.nodes}, but the cell has no such number of machines")
            if self.host.startswith("127."):
                environment = {**environment, "GLOO_SOCKET_IFNAME": "lo"}
            # A further node serves nothing, but its weights' memory is reached at its own address.
            theirs = {**environment, "SGLANG_HOST_IP": "{host}"}
            port = free_port()
            self.nodes.run(
                "engine", lambda node: ["{python}", *self._guarded(meeting, node, host="{host}", port=port)], theirs
            )
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._child = ChildProcess(
            "engine",
            [sys.executable, *self._guarded(meeting)],
            log_path=self.log_path,
            env=environment,
        )
        logger.info("engine starting at %s (pid %d, log %s)", self.url, self._child.pid, self.log_path)

    def _guarded(self, meeting: str, node: int = 0, *, host: str = "", port: int = 0) -> list[str]:
        """The guard's arguments and the server's command line for a machine of the cell."""
        command = launch_command(
            self.install,
            self.config,
            model_path=self.model_path,
            context_length=self._context_length,
            slots=self.slots,
            seed=self._seed,
            policy_version=self.policy_version,
            port=port or self.port,
            memory_port=self._memory_port,
            kv_store=self.kv_store,
            host=host or self.host,
            otlp_endpoint=self.otlp_endpoint,
            meeting=meeting,
            node=node,
        )
        return ["-I", "-S", str(GUARD), *command]

    def wait_ready(self, timeout_s: float | None = None) -> float:
        """Wait until the server answers; returns the seconds that it took from here.

        `timeout_s` is config.boot_timeout_s by default. Raises EngineError when the server ends, time runs out, or it
        answers without its key; the server is stopped then.
        """
        timeout_s = timeout_s or self.config.boot_timeout_s
        started = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while not _answers(lambda: http.get("/model_info", headers={"authorization": f"Bearer {self.api_key}"})):
                if not self.running():
                    raise EngineError(f"the engine ended while it started. {self._explain()}")
                if time.monotonic() - started > timeout_s:
                    self.stop()
                    raise EngineError(
                        f"the engine was not ready after {timeout_s:g} s (raise engine.boot_timeout_s on a busy "
                        f"machine). {self._explain()}"
                    )
                time.sleep(POLL_S)
            self._check_locked(http, deadline=started + timeout_s)
        return time.monotonic() - started

    def stop(self) -> None:
        """Kill the server and all its processes; returns when they are gone. Calls in flight are lost."""
        if self._child is not None:
            self._child.stop(grace_s=STOP_GRACE_S)
        if self.nodes is not None and self.config.nodes > 1:
            self.nodes.stop("engine")

    def __enter__(self) -> "SGLangServer":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _check_locked(self, http: httpx.Client, *, deadline: float) -> None:
        """Stop the server when it answers a request without its key: a change of SGLang could open it silently.

        A port that does not answer yet (the memory's opens on its own, a busy machine is slow) is asked again until
        `deadline`.
        """
        urls = ["/health", "/model_info"]
        if self._memory_port is not None:
            urls.append(f"http://127.0.0.1:{self._memory_port}/get_transfer_engine_info?rank=0")
        for url in urls:
            while True:
                try:
                    status = http.get(url).status_code
                    break
                except httpx.HTTPError as error:
                    if time.monotonic() < deadline and self.running():
                        time.sleep(POLL_S)
                        continue
                    self.stop()
                    raise EngineError(f"the engine did not answer {url} when it was ready: {error!r}") from error
            if status != 401:
                self.stop()
                raise EngineError(
                    f"the engine answers {url} without its key (status {status}), so that an agent could use it; it "
                    f"was stopped. Leave out engine.extra_args, and run `{INSTALL_COMMAND}`"
                )

    def _explain(self) -> str:
        return explain_log(read_log(self.log_path, self._log_start), self.log_path)


def _answers(get: Callable[[], httpx.Response]) -> bool:
    try:
        return get().status_code == 200
    except httpx.HTTPError:
        return False


def read_log(path: Path, start: int) -> str:
    """The log from byte `start` on, at most its last megabyte; empty when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - 2**20))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def explain_log(text: str, path: Path) -> str:
    """What a failed start's log says, in a few lines, and what to do about it.

    Example: "do: run `make engine`. Log e.log: ModuleNotFoundError: No module named 'zmq'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and "server_args=" not in line]
    telling = [line for line in lines if _is_telling(line)] or lines
    hint = next((advice for words, advice in HINTS if any(words.lower() in line.lower() for line in telling)), None)
    shown = "\n".join(line[:400] for line in dict.fromkeys(telling[-6:]))
    return (f"What to do: {hint}. " if hint else "") + f"Log {path}:\n{shown or '(empty)'}"


def _is_telling(line: str) -> bool:
    head = line.split(":", 1)[0].rsplit(".", 1)[-1].rsplit(" ", 1)[-1]
    return head.endswith(("Error", "Exception", "Killed")) or "error:" in line or line.startswith("gyre-sglang-cpu:")
