"""What a process is told of tracing: the run's `[tracing]` section, the run's name and folder."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gyre_core.config.models import LaxPath, Section, TracingConfig


class TracingSettings(Section):
    """Where a process's spans go.

    Example: TracingSettings(export="file", run="r1", folder=Path("runs/r1/traces"))
    """

    export: Literal["file", "otlp"]
    endpoint: str = "http://127.0.0.1:4318"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    run: str
    folder: LaxPath  # of the files

    @property
    def collector(self) -> str | None:
        """Where others send theirs, None when spans go to files."""
        return self.endpoint if self.export == "otlp" else None

    @classmethod
    def of(cls, config: TracingConfig, *, run: str, run_folder: Path) -> "TracingSettings | None":
        """None when the run is not traced."""
        if config.export == "none":
            return None
        return cls(
            export=config.export,
            endpoint=config.endpoint,
            sample_ratio=config.sample_ratio,
            run=run,
            folder=run_folder / "traces",
        )
