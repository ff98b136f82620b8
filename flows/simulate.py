"""The flow `simulate`: a sweep of one parameter of a preset; each value is a task, table and picture are artifacts.

Its parameters are plain values, so a deployment can be run from the UI. Nothing of a run is read or written.
"""

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from gyre_core.sim.presets import find_preset
from gyre_core.sim.sweep import changed
from gyre_core.types import Json
from tasks.simulation import report_sweep, simulate_point

TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=1)  # a simulation is pure Python: threads do not add up


@flow(name="simulate", flow_run_name="{preset} {parameter}", task_runner=TASK_RUNNER, persist_result=False)
def simulate(
    preset: str = "nl2repo-2.4t",
    parameter: str = "tail",
    values: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 3.0),
    steps: int = 12,
    seed: int = 0,
) -> Json:
    """Hours of every policy at each value. ValueError for an unknown preset or parameter, before anything runs."""
    scenario = find_preset(preset).scenario
    for value in values:
        changed(scenario, parameter, value)
    futures = [simulate_point.submit(preset, parameter, value, seed=seed, steps=steps) for value in values]
    result: Json = {
        "preset": preset,
        "parameter": parameter,
        "values": list(values),
        "steps": steps,
        "seed": seed,
        "rows": [future.result() for future in futures],
    }
    report_sweep(result)
    return result
