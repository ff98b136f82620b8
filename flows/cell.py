"""A cell host as a flow run: what a Prefect worker of another machine runs, for as long as the cell lives.

The run that owns the cell writes its settings, secrets included, into its folder, which all machines share, and passes
only the path. Cancelling the flow run ends the host and all that it started.
"""

from pathlib import Path

from prefect import flow

from tasks.cell_launch import host_cell


@flow(name="cell", flow_run_name="{name}", validate_parameters=False, persist_result=False)
def cell(name: str, settings_file: str, logs: str) -> None:
    """Run the cell host of these settings until it ends or the flow run is cancelled."""
    host_cell(Path(settings_file), Path(logs), name=name)
