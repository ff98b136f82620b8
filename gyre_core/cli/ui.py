"""`gyre ui`: the Prefect UI on a folder of runs, whether a run is going on or not."""

import contextlib
import sys
from pathlib import Path

from gyre_core.config import PrefectConfig


def serve_ui(runs_dir: Path, port: int) -> None:
    """Serve until interrupted; when a run's server is up already, say where and return."""
    from tasks.prefect_server import ensure_server

    runs_dir.mkdir(parents=True, exist_ok=True)
    server = ensure_server(PrefectConfig(port=port), runs_dir)
    sys.stdout.write(f"Prefect UI: {server.ui_url}\n")
    sys.stdout.flush()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    finally:
        server.stop()
