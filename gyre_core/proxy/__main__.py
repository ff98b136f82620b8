"""`python -m gyre_core.proxy --settings FILE.json`: one proxy process.

FILE holds ProxySettings as JSON. With port 0 the port is chosen by the system; the url is printed once it is bound.
"""

import argparse
import logging
import resource
import socket
import sys
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from gyre_core.errors import GyreError
from gyre_core.metrics_endpoint import add_metrics
from gyre_core.metrics_samples import proxy_samples
from gyre_core.process import end_with_parent, listen
from gyre_core.proxy.http import server_config
from gyre_core.proxy.server import create_app
from gyre_core.proxy.settings import ProxySettings


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; the exit code is 2 for settings or a machine that cannot be served with."""
    parser = argparse.ArgumentParser(prog="python -m gyre_core.proxy", description="Gyre's TITO proxy.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with ProxySettings")
    parser.add_argument(
        "--listen-fd", type=int, help="an inherited listening socket to serve, whatever the settings say"
    )
    arguments = parser.parse_args(argv)
    end_with_parent()
    _raise_file_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = ProxySettings.model_validate_json(arguments.settings.read_bytes())
        app = create_app(settings)
        given = arguments.listen_fd
        listener = listen(settings.host, settings.port) if given is None else socket.socket(fileno=given)
    except (OSError, ValidationError, GyreError) as error:
        print(f"the proxy cannot start: {error}", file=sys.stderr)
        return 2
    run = settings.journal_dir.parent.parent.name if settings.journal_dir is not None else ""
    add_metrics(app, settings.name, lambda: proxy_samples(app.state.proxy.status()), run=run)
    print(f"proxy on http://{settings.host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(server_config(app)).run(sockets=[listener])
    return 0


def _raise_file_limit() -> None:
    """A connection is a file: take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
