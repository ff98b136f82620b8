"""`python -m gyre_core.proxy --settings FILE.json`: one proxy process.

FILE holds ProxySettings as JSON. With port 0 the port is chosen by the system; the url is printed once it is bound.
"""

import argparse
import logging
import socket
import sys
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from gyre_core.errors import GyreError
from gyre_core.process import end_with_parent
from gyre_core.proxy.server import create_app
from gyre_core.proxy.settings import ProxySettings


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; the exit code is 2 for settings or a machine that cannot be served with."""
    parser = argparse.ArgumentParser(prog="python -m gyre_core.proxy", description="Gyre's TITO proxy.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with ProxySettings")
    arguments = parser.parse_args(argv)
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = ProxySettings.model_validate_json(arguments.settings.read_bytes())
        app = create_app(settings)
        listener = _listen(settings.host, settings.port)
    except (OSError, ValidationError, GyreError) as error:
        print(f"the proxy cannot start: {error}", file=sys.stderr)
        return 2
    print(f"proxy on http://{settings.host}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # longer than the clients' pools keep idle connections
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by accepted connections: without it a reply's head and body meet Nagle and delayed ACK (measured 40 ms).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind((host, port))
    listener.listen(1024)
    return listener


if __name__ == "__main__":
    sys.exit(main())
