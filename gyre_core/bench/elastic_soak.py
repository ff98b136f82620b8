"""`gyre bench elastic --soak MINUTES`: one emulated run that goes on for so long, and what grew meanwhile.

Leaves: at equal intervals the resident memory of each kind of process and their number, the bytes of the run's folders
and of Prefect's database, and the steps so far; of each the growth an hour and a step, fitted over the second half,
when caches are full; and how many of its processes outlive the run.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_core.bench.elastic import PROBLEMS, Effort, source_of_emulation
from gyre_core.bench.elastic_run import ProcessWatch, run_config, to_toml, write_inputs
from gyre_core.bench.elastic_scale import scale
from gyre_core.errors import GyreError
from gyre_core.process import ChildProcess, log_tail, python_command
from gyre_core.sim.presets import PRESETS
from gyre_core.sim.world import simulate

_SAMPLES = 60
_STEP_S = 20.0  # wall seconds of a step, roughly: the clock is compressed for it
_STEPS = 100_000  # more than the time allows
_EVENTS_SHARE = 1 / 6  # of the soak: how long Prefect keeps events, so that their number is seen to stop growing
_VACUUM_S = 20.0
_FOLDERS = ("store", "journal", "work", "logs", "checkpoints", "emulated", "metrics.jsonl")


def server_environment(minutes: float) -> dict[str, str]:
    """Settings of the soak's Prefect server: events are kept for a part of it, as for days by a team's server."""
    return {
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"PT{max(30, round(minutes * 60 * _EVENTS_SHARE))}S",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": f"{_VACUUM_S:g}",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_BATCH_SIZE": "5000",
    }


def bench_soak(
    preset: str,
    effort: Effort,
    *,
    minutes: float,
    folder: Path,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the preset under the effort's first policy; raises GyreError when the run ends by itself."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: use {', '.join(PRESETS)}")
    policy = effort.policies[0]
    scaled = scale(PRESETS[preset].scenario, groups=effort.groups, steps=8, compression=1.0, seed=seed)
    hours = simulate(scaled.scenario, policy, source=source_of_emulation(scaled)).hours
    write_inputs(folder, problems=PROBLEMS)
    compression = hours * 3600 / 8 / _STEP_S
    config = run_config(
        folder, scaled, name="soak", policy=policy, train_cells=1, steps=_STEPS, compression=compression
    )
    path, log = folder / "soak.toml", folder / "soak.log"
    path.write_text(to_toml(config))
    child = ChildProcess(
        "soak",
        python_command("gyre_core.cli", "train", str(path), "--run", "soak", "--quiet"),
        log_path=log,
    )
    samples = []
    started = time.monotonic()
    try:
        watch = ProcessWatch(child.pid, folder / "runs")
        while time.monotonic() - started < minutes * 60:
            time.sleep(max(1.0, minutes * 60 / _SAMPLES))
            if not child.running():
                raise GyreError(f"the run ended by itself; its log {log} ends with:\n{log_tail(log)}")
            samples.append({"at_s": time.monotonic() - started, **_sample(folder / "runs", watch)})
            report(" ".join(f"{name}={value:g}" for name, value in samples[-1].items()))
    finally:
        child.stop(grace_s=30.0)
    return {
        "preset": preset,
        "policy": policy,
        "minutes": minutes,
        "schedule_hours": round(minutes / 60 * compression, 1),
        "processes_left": watch.left(),
        "compression": round(compression, 1),
        "growth_per_hour": growth(samples),
        "growth_per_step": growth(samples, against="steps", unit=1.0),
        "cpu_s": watch.cpu_s(),
        "last": samples[-1],
        "samples": samples,
    }


def growth(samples: Sequence[Mapping[str, float]], *, against: str = "at_s", unit: float = 3600.0) -> dict[str, float]:
    """Slope of each value over the second half of the samples, for `unit` of `against`: an hour.

    Example: growth([{"at_s": 0.0, "x": 1.0}, {"at_s": 3600.0, "x": 3.0}])["x"] == 2.0
    """
    half = samples[len(samples) // 2 :] if len(samples) >= 4 else samples
    along = np.array([sample[against] for sample in half]) / unit
    names = [name for name in half[-1] if name not in ("at_s", against)]
    if len(half) < 2 or along[0] == along[-1]:
        return dict.fromkeys(names, 0.0)
    return {
        name: round(float(np.polyfit(along, [sample.get(name, 0.0) for sample in half], 1)[0]), 3) for name in names
    }


def soak_lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    lines = [
        f"{result['preset']}, {result['policy']}, {result['minutes']:g} minutes, clock x {result['compression']:g}: "
        f"{result['schedule_hours']:g} hours of schedule; {result['processes_left']} processes left behind"
    ]
    lines.append(f"{'':28s} {'last':>12s} {'growth an hour':>16s} {'a step':>10s}")
    for name, slope in result["growth_per_hour"].items():
        a_step = result["growth_per_step"].get(name, 1.0)
        lines.append(f"{name:28s} {result['last'].get(name, 0.0):12.2f} {slope:16.2f} {a_step:10.3f}")
    return lines


def _sample(runs: Path, watch: ProcessWatch) -> dict[str, float]:
    run = runs / "soak"
    values = {f"{kind} MB": round(size, 1) for kind, size in sorted(watch.sample().items())}
    values["processes"] = float(watch.alive)
    for name in _FOLDERS:
        values[f"{name} MB"] = round(_size(run / name) / 1e6, 3)
    values["prefect database MB"] = round(_size(runs / "prefect") / 1e6, 3)
    steps = run / "checkpoints"
    versions = [int(path.name.rpartition("-")[2]) for path in steps.glob("version-*")] if steps.is_dir() else []
    values["steps"] = float(max(versions, default=0))
    return values


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):  # folders and files go while it looks
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
