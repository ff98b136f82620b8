"""One trainer made of several processes of this host: work in on the leader's side, the same results out.

`ParallelTrainer` looks like `MegatronTrainer` and drives tensor_parallel x data_parallel rank processes
(train/megatron/rank.py), each a MegatronTrainer. The ranks meet through a file and talk to each other over gloo or
nccl; each has one socket pair to the driver, which sends every rank the same call and waits for all answers.

    driver --call--> rank 0 .. rank N-1      (TP groups of consecutive ranks; group i takes micro-steps i, i + DP, ...)
    driver <--answer or error-- each rank    (values of rank 0, or of each group's first rank)

Invariants: a call ends with an answer from every rank, or the trainer is broken and says so from then on; an error in
any rank drops the step's gradients in all of them; no rank outlives the driver. The sockets are private to these
processes, so their pickles come from this program alone.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_core.config.models import TrainConfig
from gyre_core.errors import ConfigError, TrainError
from gyre_core.nodes import NodeHub, handshake
from gyre_core.process import WATCH_FLAG, free_port, new_secret
from gyre_core.train.checkpoint_manifest import SavedCheckpoint
from gyre_core.train.packing import PackedMicroStep
from gyre_core.train.stats import MicroStepStats, StateDifference, StepStats
from gyre_core.types import TrainingBranch

if TYPE_CHECKING:
    from torch import Tensor

    from gyre_core.train.megatron.backend import MegatronTrainer

_START_S = 300.0  # imports of torch and megatron, on busy cores
_CALL_S = 3600.0  # of the longest call: no micro-step takes this long; beyond it the ranks are taken for dead
_AFTER_ERROR_S = 60.0
_END_S = 10.0


def open_trainer(
    hf_path: Path, config: TrainConfig, seed: int = 0, *, nodes: NodeHub | None = None
) -> "MegatronTrainer | ParallelTrainer":
    """A trainer in this process, or with train.tensor_parallel or data_parallel above 1 one of several processes, which
    `nodes` share evenly.
    """
    if config.tensor_parallel * config.data_parallel > 1:
        return ParallelTrainer(hf_path, config, seed, nodes=nodes)
    from gyre_core.train.megatron.backend import MegatronTrainer

    return MegatronTrainer(hf_path, config, seed)


class ParallelTrainer:
    """Starts the ranks and waits until all have loaded the weights. Use from one thread at a time; `close` ends them.

    Example: ParallelTrainer(Path("policy"), TrainConfig(tensor_parallel=2, threads=1)).micro_step(packed)
    """

    def __init__(self, hf_path: Path, config: TrainConfig, seed: int = 0, *, nodes: NodeHub | None = None) -> None:
        """Raises what a rank's MegatronTrainer raises (ConfigError for a model that cannot be split or trained).

        With `nodes` the ranks are shared out among machines that see the same files; torchrun starts them on each.
        """
        self.config = config
        self.hf_path = hf_path
        self.step = 0
        self._micro_steps = 0
        self._broken: str | None = None
        self._saved: SavedCheckpoint | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-trainer-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes = nodes if nodes is not None and nodes.count > 1 else None
        try:
            if self._nodes is not None:
                self._start_nodes(self._nodes)
            else:
                for rank in range(self.num_ranks):
                    self._start_rank(rank)
            threads = config.threads or max(1, (os.cpu_count() or 1) // self.num_ranks)
            self._call("open", hf_path, config.model_copy(update={"threads": threads}), seed, timeout_s=_START_S)
        except BaseException:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.config.tensor_parallel * self.config.data_parallel

    @property
    def broken(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        return self._broken or ""

    def micro_step(self, packed: PackedMicroStep, reference_logprobs: np.ndarray | None = None) -> MicroStepStats:
        """As MegatronTrainer's. With data_parallel the first copy computes it; `micro_steps` uses all copies."""
        return self.micro_steps([packed], None if reference_logprobs is None else [reference_logprobs])[0]

    def micro_steps(
        self, packed: Sequence[PackedMicroStep], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> list[MicroStepStats]:
        """Several at once, dealt to the data-parallel copies in turn; their statistics in the order given.

        Raises TrainError when one is refused: then the gradients of the step are dropped in every rank.
        """
        copies = self.config.data_parallel
        references = [None] * len(packed) if reference_logprobs is None else list(reference_logprobs)
        work = list(zip(packed, references, strict=True))
        answers = self._call("micro_steps", each=[work[self._copy(rank) :: copies] for rank in range(self.num_ranks)])
        self._micro_steps += len(packed)
        by_copy = answers[:: self.config.tensor_parallel]
        return [by_copy[index % copies][index // copies] for index in range(len(packed))]

    def optimizer_step(self, num_rollouts: int, learning_rate: float | None = None) -> StepStats:
        """As MegatronTrainer's; gradients are summed over the data-parallel copies."""
        stats: StepStats = self._call("optimizer_step", num_rollouts, learning_rate)[0]
        self.step, self._micro_steps = stats.step, 0
        return stats

    @property
    def accumulated_micro_steps(self) -> int:
        """Micro-steps since the last optimizer step or reset, over all copies."""
        return self._micro_steps

    def reset_gradients(self) -> None:
        """Forget what the current step accumulated."""
        self._micro_steps = 0
        self._call("reset_gradients")

    def put_gradients_aside(self) -> None:
        """As MegatronTrainer's, in every rank."""
        self._call("put_gradients_aside")

    def take_gradients_back(self) -> None:
        """As MegatronTrainer's: what was summed since is summed over the copies first, as a member hands it in."""
        self._call("take_gradients_back")

    def layouts(self) -> list[tuple[Any, Any]]:
        """Shapes and types of gradient buffers and weights, for each rank of the first copy."""
        return self._call("layouts")[: self.config.tensor_parallel]

    def stage(self, what: str, path: Path, offsets: Sequence[int]) -> None:
        """Write "gradients" (summed over the copies) or "weights" into a file of this machine: a part for each rank of
        a copy, from its offset in bytes on.
        """
        if self._nodes is not None:  # the others do not see this machine's memory
            parts = self._call("flat", what)[: self.config.tensor_parallel]
            _write(path, [part.data for part in parts], offsets)
            return
        self._call(f"stage_{what}", each=[(path, offsets[self._part(rank)]) for rank in range(self.num_ranks)])

    def add_staged_gradients(self, path: Path, offsets: Sequence[int], num_micro_steps: int) -> None:
        """Add the sums that stand there."""
        if self._nodes is not None:
            parts = _read(path, offsets)
            given = [(parts[self._part(rank)], num_micro_steps) for rank in range(self.num_ranks)]
            self._call("add_flat_gradients", each=given)
        else:
            places = [(path, offsets[self._part(rank)], num_micro_steps) for rank in range(self.num_ranks)]
            self._call("add_staged_gradients", each=places)
        self._micro_steps += num_micro_steps

    def load_staged_weights(self, path: Path, offsets: Sequence[int]) -> None:
        """Take the weights that stand there, in every copy. For a trainer that only sums."""
        if self._nodes is not None:
            parts = _read(path, offsets)
            self._call("load_flat_weights", each=[parts[self._part(rank)] for rank in range(self.num_ranks)])
            return
        self._call("load_staged_weights", each=[(path, offsets[self._part(rank)]) for rank in range(self.num_ranks)])

    def logprobs(self, branches: Sequence[TrainingBranch], *, share_prefixes: bool = True) -> list[np.ndarray]:
        """As MegatronTrainer's."""
        return self._call("logprobs", list(branches), share_prefixes)[0]

    def gradients(self) -> "dict[str, Tensor]":
        """The step's whole gradient: summed over copies, gathered from the parts."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self._call("gradients")[0].items()}

    def export_hf(self) -> "Iterator[tuple[str, Tensor]]":
        """The weights under Hugging Face names, read from a file that the ranks write."""
        from gyre_core.train.megatron.hf import load_hf_tensors

        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            self.save_hf(Path(folder) / "hf")
            tensors = load_hf_tensors(Path(folder) / "hf")
        yield from tensors.items()

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder; rank 0 writes what all ranks gather."""
        if folder.exists():
            raise TrainError(f"{folder} exists already; exports are never overwritten")
        self._call("save_hf", folder)

    def weights_digest(self) -> str:
        """Of the whole weights: the same as a single process' with equal weights."""
        return self._call("weights_digest")[0]

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> SavedCheckpoint:
        """As MegatronTrainer's; each rank writes its part."""
        self.begin_checkpoint(folder, extra)
        saved = self.finish_checkpoint()
        assert saved is not None
        return saved

    def begin_checkpoint(self, folder: Path, extra: dict[str, Any], policy_version: int = -1) -> None:
        """As MegatronTrainer's, but written when this returns: the ranks' collectives must not meet training's."""
        if self._micro_steps:
            raise TrainError("a checkpoint in the middle of a step would lose its gradients; step or reset first")
        self._saved = self._call("write_checkpoint", folder, extra, policy_version)[0]

    def finish_checkpoint(self) -> SavedCheckpoint | None:
        """The checkpoint that was begun last, if it was not asked for."""
        saved, self._saved = self._saved, None
        return saved

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """As MegatronTrainer's; the checkpoint may be of another tensor_parallel."""
        self._micro_steps = 0
        extra, self.step = self._call("load_checkpoint", folder)[0]
        return extra

    def compare_checkpoint(self, folder: Path) -> StateDifference:
        """As MegatronTrainer's, for the part of rank 0; the digests are of all."""
        self._micro_steps = 0
        difference, self.step = self._call("compare_checkpoint", folder)[0]
        return difference

    def back_end(self) -> dict[str, Any]:
        """As MegatronTrainer's, with the layout."""
        layout = {"tensor_parallel": self.config.tensor_parallel, "data_parallel": self.config.data_parallel}
        return {**self._call("back_end")[0], **layout}

    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the ranks: asked first, killed after some seconds. Calling it twice is harmless."""
        self._broken = self._broken or "it is closed"
        for connection in self._connections:
            connection.close()  # a rank ends when its socket does
        if self._nodes is not None:
            self._nodes.stop("trainer")
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    def _copy(self, rank: int) -> int:
        return rank // self.config.tensor_parallel

    def _part(self, rank: int) -> int:
        """Which part of the weights a rank holds."""
        return rank % self.config.tensor_parallel

    def _start_nodes(self, nodes: NodeHub) -> None:
        """torchrun on every node; each rank comes to a socket of this process."""
        if self.num_ranks % nodes.count:
            raise ConfigError(
                f"{self.num_ranks} processes (train.tensor_parallel x train.data_parallel) are not shared evenly by "
                f"{nodes.count} nodes"
            )
        nodes.wait(_START_S)
        key = new_secret()
        master = free_port()
        with socket.create_server((nodes.host, 0), backlog=self.num_ranks) as listener:
            address = f"{nodes.host}:{listener.getsockname()[1]}"

            def command(node: int) -> list[str]:
                torchrun = ["{python}", "-m", "torch.distributed.run", "--nnodes", str(nodes.count)]
                torchrun += ["--node-rank", str(node), "--nproc-per-node", str(self.num_ranks // nodes.count)]
                torchrun += ["--master-addr", nodes.host, "--master-port", str(master)]
                return [*torchrun, "-m", "gyre_core.train.megatron.rank", "--connect", address]

            environment = {"GYRE_TRAINER_KEY": key, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            if nodes.host.startswith("127."):
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            nodes.run("trainer", command, environment)
            own = [word.replace("{python}", sys.executable) for word in command(0)]
            kept = {name: value for name, value in os.environ.items() if name != WATCH_FLAG}
            self._processes.append(subprocess.Popen(own, env=kept | environment, stdin=subprocess.DEVNULL))
            ranks: dict[int, Connection] = {}
            listener.settimeout(1.0)
            deadline = time.monotonic() + _START_S
            while len(ranks) < self.num_ranks:
                with contextlib.suppress(TimeoutError, AuthenticationError, EOFError):
                    client, _ = listener.accept()
                    connection = handshake(client, key.encode(), deliver_first=True)
                    ranks[int(connection.recv())] = connection
                if self._processes[0].poll() is not None or time.monotonic() > deadline:
                    raise TrainError(
                        f"{len(ranks)} of {self.num_ranks} trainer processes came to {address}: see the logs of the "
                        f"cell and of its nodes ({'; '.join(nodes.ended.values()) or 'no node reports an end'})"
                    )
        self._connections = [ranks[rank] for rank in sorted(ranks)]

    def _start_rank(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **{name: value for name, value in os.environ.items() if name != WATCH_FLAG},  # its watch is the socket
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(rank),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with split weights
            "GYRE_TRAINER_STORE": str(Path(self._folder.name) / "store"),
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on this host
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "gyre_core.train.megatron.rank", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                )
            )
        self._connections.append(Connection(ours.detach()))

    def _call(self, name: str, *arguments: Any, each: Sequence[Any] | None = None, timeout_s: float = _CALL_S) -> list:
        """The same call in every rank (with `each`, one argument for each); their answers, by rank."""
        if self._broken:
            raise RuntimeError(f"the trainer cannot be used: {self._broken}")
        errors: list[BaseException] = []
        answers: dict[int, Any] = {}
        waiting = dict(zip(self._connections, range(self.num_ranks), strict=True))
        deadline_s = time.monotonic() + timeout_s
        try:
            for connection, rank in waiting.items():
                connection.send((name, arguments if each is None else (each[rank],)))
            while waiting:
                ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    why = f"; another failed: {errors[0]}" if errors else ""
                    raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer {name} in time{why}")
                for connection in ready:
                    assert isinstance(connection, Connection)
                    kind, value = connection.recv()
                    rank = waiting.pop(connection)
                    if kind == "answer":
                        answers[rank] = value
                    else:
                        errors.append(value)
                        # The others fail alike, or wait in a collective for the one that has failed.
                        deadline_s = min(deadline_s, time.monotonic() + _AFTER_ERROR_S)
        except (EOFError, OSError, TimeoutError) as error:
            self._broken = f"a rank of it is gone ({error or type(error).__name__})"
            for process in self._processes:
                process.kill()  # the others wait in a collective for the one that is gone
            raise TrainError(f"{name}: {self._broken}; start the trainer anew from a checkpoint") from error
        if not errors:
            return [answers[rank] for rank in sorted(answers)]
        if name not in ("open", "reset_gradients"):
            with contextlib.suppress(TrainError):
                self.reset_gradients()
        raise errors[0]


def _write(path: Path, parts: Sequence[Any], offsets: Sequence[int]) -> None:
    """Bytes into a staging file, each part from its offset on."""
    with path.open("r+b") as file:
        for part, offset in zip(parts, offsets, strict=True):
            file.seek(offset)
            file.write(part)


def _read(path: Path, offsets: Sequence[int]) -> list[np.ndarray]:
    """The parts of a staging file."""
    whole = np.fromfile(path, np.uint8)
    return [whole[begin:end] for begin, end in zip(offsets, [*offsets[1:], len(whole)], strict=True)]
