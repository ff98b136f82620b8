"""`python -m gyre_core.cells.satellite --settings FILE`: a trainer that works off a core's micro-steps.

It holds no weights of record and no optimizer state that matters: it pulls the core's snapshot, computes, and hands its
gradient in. It may start and end at any time. A cell host has the same member beside its engine (`SatelliteMember`).
"""

import argparse
import logging
import signal
import threading
from pathlib import Path
from typing import Any, Literal

from gyre_core.config.models import LaxPath, Section, TrainConfig
from gyre_core.errors import GyreError
from gyre_core.train.members import Replica, Satellite
from gyre_core.train.queue_client import QueueClient
from gyre_core.transfer.gradients import BufferReader, OfferedBuffer, flat_bytes

logger = logging.getLogger(__name__)

Channel = Literal["local", "mooncake"]
_AFTER_ERROR_S = 1.0  # after an answer that no satellite understands
_PRESENCE_PAUSE_S = 0.2  # well below the time that the core gives a broken connection
_LEAVE_LIMIT_S = 3.0  # of a process that is told to end


class SatelliteSettings(Section):
    """One satellite.

    Example: SatelliteSettings(name="cell-1", core_url="http://127.0.0.1:8101", secret="...", model_path=Path("policy"))
    """

    name: str  # of the cell; another than the core's
    core_url: str
    secret: str  # bearer token of the core's queue
    model_path: LaxPath  # Hugging Face folder: the architecture; the weights are the core's
    train: TrainConfig = TrainConfig()  # layout, packing and loss: the core's
    seed: int = 0
    channel: Channel = "local"  # how gradients and weights travel; the core's
    host: str = "127.0.0.1"  # under which the core reaches this machine (mooncake)
    wait_s: float = 5.0  # longest wait of one request


def open_reader(channel: Channel, host: str = "127.0.0.1") -> BufferReader:
    """Reads peers' buffers over this channel."""
    if channel == "local":
        from gyre_core.transfer.shared_memory import SharedMemoryReader

        return SharedMemoryReader()
    from gyre_core.transfer.mooncake_buffers import MooncakeReader

    return MooncakeReader(host=host)


def open_buffer(channel: Channel, size_bytes: int, host: str = "127.0.0.1") -> OfferedBuffer:
    """Memory of this process that peers read over this channel; raises TransferError, SetupError."""
    if channel == "local":
        from gyre_core.transfer.shared_memory import SharedMemoryBuffer

        return SharedMemoryBuffer(size_bytes)
    from gyre_core.transfer.mooncake_buffers import MooncakeBuffer

    return MooncakeBuffer(size_bytes, host=host)


class SatelliteMember:
    """A trainer that follows a core: buffers, connection and protocol in one; close it at the end.

    Example: member = SatelliteMember("cell-1", url, secret, MegatronReplica(trainer)); member.run(stop)
    """

    def __init__(
        self,
        name: str,
        core_url: str,
        secret: str,
        replica: Replica,
        *,
        channel: Channel = "local",
        host: str = "127.0.0.1",
        wait_s: float = 5.0,
        answer_s: float = 20.0,
        leave_limit_s: float = 10.0,
    ) -> None:
        """Raises TransferError or SetupError when there is no memory, or no way, to hand gradients in."""
        self.name = name
        size_bytes = flat_bytes(replica.gradient_shapes())
        self._buffer = open_buffer(channel, size_bytes, host)
        self._reader = open_reader(channel, host)
        self._client = QueueClient(core_url, secret, wait_s=wait_s, answer_s=answer_s)
        self._closed = threading.Event()
        self.satellite = Satellite(
            name,
            self._client,
            replica,
            self._buffer,
            self._reader,
            make_buffer=lambda: open_buffer(channel, size_bytes, host),
            leave_limit_s=leave_limit_s,
        )
        threading.Thread(target=self._stay_present, name="presence", daemon=True).start()

    def run(self, stop: threading.Event) -> None:
        """Work for the core until `stop` is set (then call `satellite.interrupt`); not ended by what the core says."""
        while not stop.is_set():
            try:
                self.satellite.run(stop)
            except Exception as error:
                logger.error("%s: %s", self.name, error, exc_info=not isinstance(error, GyreError))
                stop.wait(_AFTER_ERROR_S)

    def describe(self) -> dict[str, Any]:
        """For /status: the session it works in, and counts."""
        return {"session": self.satellite.session, **self.satellite.counts}

    def close(self) -> None:
        """Buffers are given back: a gradient that lies in one is lost."""
        self._closed.set()
        self._client.close()
        self.satellite.close()
        self._reader.close()
        self._buffer.close()

    def _stay_present(self) -> None:
        """The core sees by a connection that this process lives."""
        while not self._closed.is_set():
            try:
                self._client.stay_present(self.name)
            except GyreError as error:
                logger.debug("%s: %s", self.name, error)
            self._closed.wait(_PRESENCE_PAUSE_S)


def run_satellite(settings: SatelliteSettings, stop: threading.Event) -> None:
    """Build the trainer and follow the core; returns after `stop`."""
    from gyre_core.train.megatron.backend import MegatronTrainer
    from gyre_core.train.megatron.replica import MegatronReplica

    trainer = MegatronTrainer(settings.model_path, settings.train, seed=settings.seed)
    try:
        member = SatelliteMember(
            settings.name,
            settings.core_url,
            settings.secret,
            MegatronReplica(trainer),
            channel=settings.channel,
            host=settings.host,
            wait_s=settings.wait_s,
            leave_limit_s=_LEAVE_LIMIT_S,
        )
        try:
            logger.info("%s is ready", settings.name)
            member.run(stop)
            logger.info("%s ends: %s", settings.name, member.satellite.counts)
        finally:
            member.close()
    finally:
        trainer.close()


def main() -> None:
    """Read the settings, work until SIGTERM or the parent's end."""
    parser = argparse.ArgumentParser(prog="gyre satellite", description="Run one satellite trainer.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of SatelliteSettings")
    arguments = parser.parse_args()

    from gyre_core.process import end_with_parent

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    text = arguments.settings.read_text(encoding="utf-8")
    run_satellite(SatelliteSettings.model_validate_json(text, strict=False), stop)


if __name__ == "__main__":
    main()
