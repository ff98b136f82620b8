"""Pictures of the Prefect UI for docs/: `python infra/screenshots.py [RUN]` with a finished run under runs/.

Needs Chromium (`apt-get install chromium`). Serves the runs' own database, opens the pages headless, writes PNG files
to docs/images/. Ends what it started.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from gyre_core.config import PrefectConfig
from gyre_core.errors import SetupError
from gyre_core.store.run_store import newest_run
from tasks.prefect_server import ensure_server

ROOT = Path(__file__).resolve().parents[1]
# Only what a closed network allows, and no first-run pages.
CHROMIUM_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def main() -> int:
    """Take the pictures; exit code 1 with a message when Chromium or the run is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", help="a run under --runs-dir (default: the newest)")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("error: no Chromium; install it with: apt-get install --no-install-recommends chromium", file=sys.stderr)
        return 1
    run_id = newest_run(arguments.runs_dir, arguments.run).run_id
    server = ensure_server(PrefectConfig(port=0), arguments.runs_dir)
    try:
        for name, page in pages(server.api_url, run_id).items():
            target = arguments.out / f"{name}.png"
            shoot(chromium, server.ui_url + page, target)
            print(target)
    finally:
        server.stop()
    return 0


def pages(api_url: str, run_id: str) -> dict[str, str]:
    """Picture name -> path in the UI, for the newest flow run of a run."""
    query = {"flow_runs": {"name": {"any_": [run_id]}}, "sort": "START_TIME_DESC", "limit": 1}
    found = httpx.post(f"{api_url}/flow_runs/filter", json=query, timeout=30).json()
    if not found:
        raise SetupError(f"the database knows no flow run {run_id}")
    flow_run_id = found[0]["id"]
    paths = {"ui-runs": "/runs", "ui-run": f"/runs/flow-run/{flow_run_id}", "ui-artifacts": "/artifacts"}
    for name in ("reward", "steps", "outcomes", "cells"):
        query = {
            "artifacts": {"key": {"like_": f"%-{name}"}, "flow_run_id": {"any_": [flow_run_id]}},
            "sort": "CREATED_DESC",
            "limit": 1,
        }
        for artifact in httpx.post(f"{api_url}/artifacts/filter", json=query, timeout=30).json():
            paths[f"ui-{name}"] = f"/artifacts/artifact/{artifact['id']}"
    return paths


def shoot(chromium: str, url: str, target: Path) -> None:
    """One page as a PNG of 1500 x 1000 points."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium,
            *CHROMIUM_FLAGS,
            f"--user-data-dir={profile}",
            "--window-size=1500,1000",
            "--virtual-time-budget=20000",
            f"--screenshot={target}",
            url,
        ]
        subprocess.run(command, check=True, timeout=120, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
