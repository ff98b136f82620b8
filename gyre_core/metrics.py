"""Metric records and where they go: TensorBoard, one JSON line each, and Prometheus and Weights & Biases when
somebody wants that.

Names are `area/name_unit` (`rollout/duration_s`, `train/grad_norm`, `select/tokens_trained_count`). A quantity that was
not there is written as zero, not left out, so that curves have no holes.
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from gyre_core.metrics_endpoint import Sample, serve_metrics
from gyre_core.metrics_samples import scalar_samples


class Sink(Protocol):
    """Where scalars go beside the run's own files."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Appends a run's scalars to `metrics.jsonl` and to TensorBoard event files.

    Example: with MetricsWriter(Path("runs/quickstart")) as metrics: metrics.write(3, {"reward/mean": 0.5})
    """

    def __init__(self, run_dir: Path, *, sinks: Sequence[Sink] = ()) -> None:
        """`sinks` get the finite scalars too, and are closed with it."""
        from torch.utils.tensorboard.writer import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks = sinks
        self._board = SummaryWriter(str(run_dir / "tensorboard"))
        self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._newest: dict[str, float | None] = {}
        self._step = 0
        self._endpoint = ExitStack()
        self._endpoint.enter_context(serve_metrics("flow", self._samples, run=run_dir.name))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars of a step; a non-finite value is kept as null in the JSON line and left out of TensorBoard."""
        clean = {name: (float(value) if math.isfinite(value) else None) for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, **clean}) + "\n")
        self._lines.flush()
        with self._lock:
            self._newest |= clean
            self._step = max(self._step, step)
        finite = {name: value for name, value in clean.items() if value is not None}
        for name, value in finite.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        for sink in self._sinks:
            sink.write(step, finite)

    def close(self) -> None:
        self._endpoint.close()
        self._lines.close()
        self._board.close()
        for sink in self._sinks:
            sink.close()

    def _samples(self) -> list[Sample]:
        """The newest value of each scalar, for a scrape."""
        with self._lock:
            return list(scalar_samples(self._step, self._newest))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """All lines of a run's metrics.jsonl, oldest first; a torn last line (killed run) is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
