"""Tasks of the flow `simulate`: one simulated point of a sweep, and the artifacts of the whole."""

import base64

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from gyre_core.sim.pictures import lines_png
from gyre_core.sim.presets import find_preset
from gyre_core.sim.sweep import sweep_point
from gyre_core.types import Json


@task(name="simulate_point", task_run_name="{parameter} = {value}", cache_policy=NO_CACHE)
def simulate_point(preset: str, parameter: str, value: float, *, seed: int, steps: int) -> Json:
    """Every policy at one value of the parameter."""
    return sweep_point(find_preset(preset).scenario, parameter, value, seed=seed, steps=steps)


@task(name="report_sweep", cache_policy=NO_CACHE)
def report_sweep(result: Json) -> None:
    """A table of hours, and the picture of how many times longer the others take."""
    rows = result["rows"]
    key = f"simulate-{result['preset']}-{result['parameter']}".lower().replace(".", "-").replace("_", "-")
    what = f"{result['preset']}: {result['parameter']} moved, {result['steps']} steps, seed {result['seed']}"
    create_table_artifact(
        [{result["parameter"]: row["value"], **row["hours"]} for row in rows],
        key=f"{key}-hours",
        description=f"hours; {what}",
    )
    names = [name for name in rows[0]["hours"] if name != "elastic_predictive"]
    png = lines_png(
        result["values"],
        {name: [row["over_predictive"][name] for row in rows] for name in names},
        title=what,
        xlabel=result["parameter"],
        ylabel="times longer than elastic_predictive",
    )
    image = base64.b64encode(png).decode()
    create_markdown_artifact(
        f"![times longer than elastic_predictive](data:image/png;base64,{image})",
        key=f"{key}-picture",
        description=f"times longer than elastic_predictive; {what}",
    )
