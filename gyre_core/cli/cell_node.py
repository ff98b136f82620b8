"""`gyre cell-node`: a further machine of a cell, beside its host."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="cell-node")(cell_node)


def cell_node(
    leader: Annotated[str, typer.Argument(help="address of the cell's first machine", show_default=False)],
    node: Annotated[int, typer.Option("--node", min=1, help="number of this machine in the cell, from 1")],
    port: Annotated[int, typer.Option("--port", help="scheduler.nodes_port plus the cell's number")] = 8300,
    logs: Annotated[Path, typer.Option("--logs", help="folder for the logs of what it runs")] = Path("logs"),
) -> None:
    """Run what a cell of several machines wants run on this one, until it is told to stop (SIGTERM).

    It needs GYRE_NODE_KEY, the same as the cell's, and sees the cell's files under the same paths.
    """
    import logging
    import signal

    from gyre_core.nodes import NodeAgent, node_key

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logs.mkdir(parents=True, exist_ok=True)
    agent = NodeAgent(node, leader, port, node_key(), logs)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop.set())
    agent.run()
