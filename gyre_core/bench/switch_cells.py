"""What `gyre bench switch` measures: real cell hosts of a tiny random model behind the real proxy and fleet.

Leaves: a fleet of two cells (a core and a satellite, each an SGLang server and a Megatron trainer) whose engines take
calls, with a KV store or without; live calls, each a session of its own, sampled greedily; a batch to train.
"""

import asyncio
import contextlib
import json
import sysconfig
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from gyre_core.bench.proxy_history import Corpus
from gyre_core.bench.tree_train import TreeTrainSize, synthetic_forest, write_random_qwen3
from gyre_core.cells.fleet import CellFleet
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config.models import EngineConfig, SchedulerConfig, TrainConfig
from gyre_core.engine.kv_store import KvStore
from gyre_core.engine.launch import read_vocab_size
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.errors import ProxyError
from gyre_core.process import free_port, new_secret
from gyre_core.proxy.pool import ProxyPool, Shards
from gyre_core.proxy.settings import ProxySettings, SamplingSettings
from gyre_core.proxy.supervisor import ProxySupervisor
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import SamplingParams, TrainingBranch, VersionSpan

CONTEXT_LENGTH = 2048
BOOT_TIMEOUT_S = 600.0  # of each process: other programs may have the cores
CALL_TIMEOUT_S = 600.0  # of one live call, moves included
_SIZE = TreeTrainSize(
    layers=4, hidden=128, heads=4, vocab=0, branch_tokens=CONTEXT_LENGTH, trees=1, budget_tokens=2048, rounds=1
)
TICK_TOKENS = 24  # that each live call has sampled at least when a move begins
_TICK_TOKEN = 5  # any of the vocabulary
_BRANCH_TOKENS = 256  # of the batch that is trained between two role changes
_SCALE = 10.0  # of the weights: outputs then differ by prompt, and the best token is far from the second
_SPECIAL_TOKENS = 9  # the last ids of the corpus' vocabulary: a live call must not end by itself
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCall:
    """A finished call. Example: LiveCall(output_ids=(5, 9), versions=(0, 1), prompt_tokens=640, seconds=2.1)"""

    output_ids: tuple[int, ...]
    versions: tuple[int, ...]  # policy versions that sampled it, in order
    prompt_tokens: int
    seconds: float


def write_model(folder: Path) -> Path:
    """A random Qwen3 with a tokenizer, that never samples the end of its turn when it is greedy."""
    from safetensors.torch import load_file, save_file

    Corpus().save_model(folder)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    write_random_qwen3(folder, replace(_SIZE, vocab=vocab), seed=0)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if not name.endswith("norm.weight"):
            tensor.mul_(_SCALE)
    weights["lm_head.weight"][-_SPECIAL_TOKENS:] = 0.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def training_batch(step: int) -> list[TrainingBranch]:
    """One group of eight branches."""
    return synthetic_forest(0.5, replace(_SIZE, vocab=1024, branch_tokens=_BRANCH_TOKENS), seed=step)


def prompts(tag: str, count: int, num_chars: int) -> list[str]:
    """Texts that differ from their first characters on."""
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")
    return [f"{tag}-{index}: {source[500 * index : 500 * index + num_chars]}" for index in range(count)]


@contextlib.contextmanager
def running_cells(folder: Path, model: Path, engine: EngineConfig, *, slots: int) -> Iterator["Cells"]:
    """Two cells and a proxy; raises EngineError or ProxyError with a log's tail when they do not start."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        store = None
        if engine.kv_store == "mooncake":
            store = stack.enter_context(KvStore(engine, log_path=folder / "logs" / "kv-store.log"))
        members = MembersSettings(port=free_port(), secret=new_secret(), channel="local")
        shared: dict[str, Any] = {
            "model_path": model,
            "context_length": CONTEXT_LENGTH,
            "slots": slots,
            "seed": 0,
            "work_dir": folder,
            "engine": engine,
            "train": TrainConfig(learning_rate=0.0, threads=1, micro_step_tokens=CONTEXT_LENGTH),
            "kv_store": None if store is None else store.address,
        }
        core = CellSettings(cell_id="cell-0", port=free_port(), secret=new_secret(), members=members, **shared)
        satellite = CellSettings(
            cell_id="cell-1",
            port=free_port(),
            secret=new_secret(),
            core_url=f"http://127.0.0.1:{members.port}",
            core_secret=members.secret,
            **shared,
        )
        proxy = ProxySettings(
            admin_secret=new_secret(),
            model_path=model,
            context_length=CONTEXT_LENGTH,
            journal_dir=folder / "journal",
        )
        work, logs = folder / "work", folder / "logs"
        supervisor = stack.enter_context(ProxySupervisor([proxy], work=work, logs=logs, env=_ENVIRONMENT))
        scheduler = SchedulerConfig(cells=2, dead_after_s=120.0)
        fleet = stack.enter_context(
            CellFleet(
                [core, satellite],
                shards=supervisor.shards,
                logs=logs,
                work=work,
                scheduler=scheduler,
                env=_ENVIRONMENT,
            )
        )
        supervisor.wait_ready(BOOT_TIMEOUT_S)
        fleet.open()
        yield Cells(fleet, supervisor.shards, vocab_size=read_vocab_size(model))


class Cells:
    """Two running cells and what asks them."""

    def __init__(self, fleet: CellFleet, shards: Shards, *, vocab_size: int) -> None:
        self.fleet = fleet
        self.shards = shards
        self._vocab_size = vocab_size

    async def call(self, pool: ProxyPool, text: str, *, max_tokens: int) -> LiveCall:
        """One call of a session of its own, through the proxy as a harness makes it; raises ProxyError."""
        started = asyncio.get_running_loop().time()
        sampling = SamplingSettings(temperature=0.0, max_new_tokens=max_tokens)
        session = await pool.create_session(rollout_id=text.partition(":")[0], sampling=sampling)
        try:
            body = {"model": "policy", "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S, trust_env=False) as http:
                reply = await http.post(f"{session.base_url}/v1/chat/completions", json=body, headers=headers)
            if reply.status_code != 200:
                raise ProxyError(f"a live call was refused: {reply.status_code} {reply.text[:500]}")
            seconds = asyncio.get_running_loop().time() - started
            return read_call(await pool.seal(session.session_id), seconds)
        finally:
            await pool.delete(session.session_id)

    def engine_processes(self) -> list[psutil.Process]:
        """All processes of all engines; the trainers are the hosts themselves."""
        hosts = [psutil.Process(pid) for pid in self.fleet.pids.values() if pid is not None]
        return [child for host in hosts for child in host.children(recursive=True)]

    @contextlib.asynccontextmanager
    async def live_calls(
        self, pool: ProxyPool, texts: Sequence[str], *, max_tokens: int
    ) -> AsyncIterator["asyncio.Future[list[LiveCall | BaseException]]"]:
        """Calls that have all sampled some tokens; gather the future for their ends."""
        tasks = [asyncio.create_task(self.call(pool, text, max_tokens=max_tokens)) for text in texts]
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        try:
            while not any(task.done() for task in tasks):
                status = await pool.status()
                if sum(engine["busy"] for engine in status["engines"]) == len(texts):
                    break
                await asyncio.sleep(0.02)
            await asyncio.gather(*(self._tick(*engine) for engine in self.fleet.engines.values()))
            yield gathered
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self, url: str, key: str | None) -> None:
        """A short call: those that came to the engine before it have sampled as many tokens when it is over."""
        async with SGLangClient(url, vocab_size=self._vocab_size, api_key=key) as engine:
            params = SamplingParams(max_new_tokens=TICK_TOKENS, temperature=0.0)
            await engine.generate([_TICK_TOKEN], params, rid=f"tick-{new_secret()}", cache_salt="tick")


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor seconds that they have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def memory_mb(processes: Iterable[psutil.Process]) -> float:
    """Memory that they hold, shared pages counted once; in 10^6 bytes."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def read_call(trajectory: Trajectory, seconds: float) -> LiveCall:
    """The only call of a sealed session."""
    prompt = [node for node in trajectory.tree.nodes if not node.call_id]
    output = [node for node in trajectory.tree.nodes if node.call_id]
    spans: list[VersionSpan] = [span for node in output for span in node.spans]
    return LiveCall(
        output_ids=tuple(int(token) for node in output for token in node.token_ids),
        versions=tuple(dict.fromkeys(span.version for span in spans)),
        prompt_tokens=sum(len(node.token_ids) for node in prompt),
        seconds=seconds,
    )
