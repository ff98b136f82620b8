"""What a cell host is told at its start, as one JSON file."""

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from gyre_core.config.emulation import EmulationConfig
from gyre_core.config.models import EngineConfig, LaxPath, Section, TrainConfig, TransferConfig
from gyre_core.tracing.settings import TracingSettings


class MembersSettings(Section):
    """Where satellites reach the core's queue.

    Example: MembersSettings(port=8102, secret="...")
    """

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one; the cell's status names it
    secret: str  # bearer token of the queue, not the control API's
    channel: Literal["local", "mooncake"] = "local"  # of weights and gradients


class CellSettings(Section):
    """One cell: an engine and a trainer on the same devices, or a trainer alone.

    Example: CellSettings(cell_id="cell-0", port=8101, secret="...", model_path=Path("policy"), work_dir=Path("w"), ...)
    """

    cell_id: str
    host: str = "127.0.0.1"
    port: int
    secret: str  # bearer token of the control API
    model_path: LaxPath  # Hugging Face folder: architecture, tokenizer, first weights
    context_length: int
    slots: int  # calls the engine runs at once
    seed: int
    work_dir: LaxPath  # logs and staged weights
    engine: EngineConfig | None = EngineConfig()  # None: a trainer alone (replay)
    kv_store: str | None = None  # address of the run's KvStore (engine/kv_store.py)
    train: TrainConfig = TrainConfig()
    transfer: TransferConfig = TransferConfig()
    members: MembersSettings | None = None  # a core: satellites may share this trainer's steps
    core_url: str | None = None  # a satellite: where the core's queue is (its `members`, at a port that stays)
    core_secret: str = ""  # bearer token of that queue
    core_channel: Literal["local", "mooncake"] = "local"  # of weights and gradients: the core's
    emulate: EmulationConfig | None = None  # engine and trainer take the time of a cost model
    nodes: int = 1  # machines that share the trainer; the further ones run `gyre cell-node`
    nodes_port: int = 0  # where they come, on `host`; their key is in the environment (gyre_core/nodes.py)
    tracing: TracingSettings | None = None
    policy_version: int = 0  # version of the first weights
    checkpoint: LaxPath | None = None  # resume: the trainer starts from it, and publishes it before serving

    @property
    def kind(self) -> Literal["core", "satellite", "alone"]:
        """What this cell is to others."""
        if self.core_url is not None:
            return "satellite"
        return "core" if self.members is not None else "alone"

    @model_validator(mode="after")
    def _check(self) -> "CellSettings":
        if self.members is not None and self.core_url is not None:
            raise ValueError(f"{self.cell_id} has members and a core_url: a cell is a core or a satellite")
        return self


def read_cell_settings(path: Path) -> CellSettings:
    """Read settings written by the launcher; raises pydantic.ValidationError (a ValueError) for a bad file."""
    return CellSettings.model_validate_json(path.read_text(encoding="utf-8"), strict=False)
