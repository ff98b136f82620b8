"""`python -m gyre_core.cells --settings FILE`: run one cell host until it is told to stop or its parent ends."""

import argparse
import logging
from pathlib import Path


def main() -> None:
    """Read the settings, serve the control API; ends with SIGTERM."""
    parser = argparse.ArgumentParser(prog="gyre cell", description="Run one cell: an SGLang engine and its trainer.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of CellSettings")
    arguments = parser.parse_args()

    from gyre_core.process import end_with_parent

    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    import uvicorn

    from gyre_core.cells.app import create_app
    from gyre_core.cells.settings import read_cell_settings
    from gyre_core.metrics_endpoint import add_metrics
    from gyre_core.metrics_samples import cell_samples

    settings = read_cell_settings(arguments.settings)
    app = create_app(settings)
    run = settings.work_dir.name
    add_metrics(app, settings.cell_id, lambda: cell_samples(app.state.host.describe()), run=run)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # longer than the client keeps idle connections
    )


if __name__ == "__main__":
    main()
