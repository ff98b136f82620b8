"""`python -m gyre_core.cells.satellite --settings FILE`: a trainer that works off a core's micro-steps.

It holds no weights of record and no optimizer state that matters: it pulls the core's snapshot, computes, and hands its
gradient in. It may start and end at any time.
"""

import argparse
import logging
import signal
import threading
from pathlib import Path
from typing import Literal

from gyre_core.config.models import LaxPath, Section, TrainConfig
from gyre_core.transfer.gradients import BufferReader, OfferedBuffer

logger = logging.getLogger(__name__)

Channel = Literal["local", "mooncake"]


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


def run_satellite(settings: SatelliteSettings, stop: threading.Event) -> None:
    """Build the trainer and follow the core; returns after `stop`."""
    from gyre_core.train.megatron.backend import MegatronTrainer
    from gyre_core.train.megatron.replica import MegatronReplica
    from gyre_core.train.members import Satellite
    from gyre_core.train.queue_client import QueueClient
    from gyre_core.transfer.gradients import flat_bytes

    trainer = MegatronTrainer(settings.model_path, settings.train, seed=settings.seed)
    replica = MegatronReplica(trainer)
    buffer = open_buffer(settings.channel, flat_bytes(replica.gradients()), settings.host)
    reader = open_reader(settings.channel, settings.host)
    try:
        with QueueClient(settings.core_url, settings.secret, wait_s=settings.wait_s) as client:
            logger.info("%s is ready", settings.name)
            satellite = Satellite(settings.name, client, replica, buffer, reader)
            satellite.run(stop)
            logger.info("%s ends: %s", settings.name, satellite.counts)
    finally:
        reader.close()
        buffer.close()
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
