"""`python -m gyre_core.train.megatron.rank FD | --connect HOST:PORT`: one process of a ParallelTrainer.

Enters: calls as (name, arguments) on an inherited socket, or on one that is opened to the driver (torchrun starts those
on several machines). Leaves: ("answer", value) or ("error", exception) for each.
Ends when the socket does. A call that fails leaves the process ready for the next one.
"""

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.config.models import TrainConfig
from gyre_core.errors import TrainError
from gyre_core.nodes import handshake
from gyre_core.train.checkpoint_manifest import SavedCheckpoint
from gyre_core.train.packing import PackedMicroStep
from gyre_core.train.stats import MicroStepStats


class Rank:
    """Answers the driver's calls with a MegatronTrainer. Method names are the protocol. Example: Rank().open(...)"""

    def open(self, hf_path: Path, config: TrainConfig, seed: int) -> None:
        """Load the weights; every rank reads the whole checkpoint and keeps its part."""
        from gyre_core.train.megatron import ranks, sums
        from gyre_core.train.megatron.backend import MegatronTrainer

        self.trainer = MegatronTrainer(hf_path, config, seed)
        self._sums, self._ranks = sums, ranks  # they import megatron

    def micro_steps(self, work: Sequence[tuple[PackedMicroStep, np.ndarray | None]]) -> list[MicroStepStats]:
        return [self.trainer.micro_step(packed, reference) for packed, reference in work]

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: tensor.cpu().numpy() for name, tensor in self.trainer.gradients().items()}

    def logprobs(self, branches: Any, share_prefixes: bool) -> list[np.ndarray]:
        return self.trainer.logprobs(branches, share_prefixes=share_prefixes)

    def save_hf(self, folder: Path) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            self.trainer.save_hf(folder)
        else:
            for _ in self.trainer.export_hf():  # its half of the gathers
                pass
        dist.barrier()

    def write_checkpoint(self, folder: Path, extra: dict[str, Any], policy_version: int) -> SavedCheckpoint:
        return self.trainer.begin_checkpoint(folder, extra, policy_version).result()

    def load_checkpoint(self, folder: Path) -> tuple[dict[str, Any], int]:
        return self.trainer.load_checkpoint(folder), self.trainer.step

    def compare_checkpoint(self, folder: Path) -> tuple[Any, int]:
        return self.trainer.compare_checkpoint(folder), self.trainer.step

    def layouts(self) -> tuple[Any, Any]:
        """Of this rank's gradient buffers and of its weights."""
        parameters = self._sums.parameters(self.trainer.model)
        return self._sums.layout_of(self.trainer.gradient_buffers()), self._sums.layout_of(parameters)

    def stage_gradients(self, place: tuple[Path, int]) -> None:
        """Write this rank's sums, over all copies, into a staging file."""
        whole = self.trainer.sums.whole()
        if self._ranks.first_copy():
            self._sums.stage(whole, *place)

    def add_staged_gradients(self, place: tuple[Path, int, int]) -> None:
        path, offset, num_micro_steps = place
        others = self._sums.staged(self.trainer.gradient_buffers(), path, offset)
        self.trainer.add_gradients(others, num_micro_steps)

    def stage_weights(self, place: tuple[Path, int]) -> None:
        if self._ranks.first_copy():
            self._sums.stage(self._sums.parameters(self.trainer.model), *place)

    def load_staged_weights(self, place: tuple[Path, int]) -> None:
        values = self._sums.staged(self._sums.parameters(self.trainer.model), *place)
        self._sums.load_parameters(self.trainer.model, values)

    def flat(self, what: str) -> np.ndarray:
        """This rank's "gradients" (over all copies) or "weights" as bytes, for a driver on another machine."""
        tensors = self.trainer.sums.whole() if what == "gradients" else self._sums.parameters(self.trainer.model)
        return self._sums.flat(tensors).numpy() if self._ranks.first_copy() else np.empty(0, np.uint8)

    def add_flat_gradients(self, given: tuple[np.ndarray, int]) -> None:
        data, num_micro_steps = given
        self.trainer.add_gradients(self._sums.unflat(data, self.trainer.gradient_buffers()), num_micro_steps)

    def load_flat_weights(self, data: np.ndarray) -> None:
        model = self.trainer.model
        self._sums.load_parameters(model, self._sums.unflat(data, self._sums.parameters(model)))

    def find(self, name: str) -> Callable[..., Any]:
        """What answers a call: a method here, else the trainer's own."""
        return getattr(self, name, None) or getattr(self.trainer, name)


def serve(connection: Connection) -> None:
    """Answer until the other side closes."""
    rank = Rank()
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            reply = ("answer", rank.find(name)(*arguments))
        except Exception as error:
            reply = ("error", _portable(error))
        with contextlib.suppress(BrokenPipeError):
            connection.send(reply)


def _portable(error: Exception) -> Exception:
    """The error as the driver can read it: its own type where that survives pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainError(f"{type(error).__name__}: {error}")
    return error


def connect(address: str) -> Connection:
    """To the driver, perhaps on another machine; it is told which rank this is (torchrun's RANK)."""
    host, _, port = address.rpartition(":")
    key = os.environ.pop("GYRE_TRAINER_KEY").encode()
    connection = handshake(socket.create_connection((host, int(port)), timeout=60.0), key, deliver_first=False)
    connection.send(int(os.environ["RANK"]))
    return connection


if __name__ == "__main__":
    serve(connect(sys.argv[2]) if sys.argv[1] == "--connect" else Connection(int(sys.argv[1])))
