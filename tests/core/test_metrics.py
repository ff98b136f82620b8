"""Metric lines and TensorBoard files of a run."""

from pathlib import Path

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
