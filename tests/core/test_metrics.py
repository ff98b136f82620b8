"""Metric lines and TensorBoard files of a run."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.metrics import MetricsWriter, read_metrics


def test_metrics_lines_come_back_and_event_file_has_the_scalars(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"reward/mean": 0.25})
        metrics.write(1, {"reward/mean": 0.5, "train/loss": float("nan")})
    assert read_metrics(tmp_path) == [
        {"step": 0, "reward/mean": 0.25},
        {"step": 1, "reward/mean": 0.5, "train/loss": None},
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]
    assert "train/loss" not in events.Tags()["scalars"]


def test_metrics_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    assert read_metrics(tmp_path) == [{"step": 0, "a": 1.0}]


def test_metrics_none_written_is_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def wandb_records(file: bytes) -> Iterator[bytes]:
    """The records of W&B's transaction log (LevelDB's format behind a header of 7 bytes), one joined from its parts."""
    at, whole = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:  # the end of a block is padded
            at += 32768 - at % 32768
        size, kind = struct.unpack_from("<HB", file, at + 4)
        whole += file[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def test_metrics_go_to_wandb_when_its_project_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    from gyre_core.metrics_wandb import WandbScalars

    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbScalars("agents", run_id="r-1", folder=tmp_path, config={"seed": 7})
    with MetricsWriter(tmp_path, sinks=[sink]) as metrics:
        metrics.write(0, {"reward/mean": 0.25, "train/loss": float("nan")})
        metrics.write(1, {"reward/mean": 0.5})
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, runs = [], []
    for data in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
        if record.HasField("run"):
            runs.append((record.run.run_id, record.run.project))
    assert runs == [("r-1", "agents")]
    assert rows == [{"step": "0", "reward/mean": "0.25"}, {"step": "1", "reward/mean": "0.5"}]


def test_metrics_wandb_without_a_key_says_what_to_do(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from gyre_core.errors import SetupError
from gyre_core.metrics_wandb import WandbScalars
try:
    WandbScalars("agents", run_id="r-1", folder=Path(sys.argv[1]), config={})
except SetupError as error:
    print(error)
"""  # a process of its own: W&B keeps the first run's settings
    environment = os.environ | {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert "WANDB_MODE=offline" in done.stdout, done.stderr
