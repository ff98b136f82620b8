"""A further node of a cell, as a thread of the test's process."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from gyre_core.nodes import NodeAgent, NodeHub


@contextlib.contextmanager
def running_agent(hub: NodeHub, folder: Path, *, key: str, node: int = 1) -> Iterator[NodeAgent]:
    """Follow the hub; what the agent runs is gone at the end."""
    agent = NodeAgent(node, hub.host, hub.port, key, folder)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        agent.stop.set()
        thread.join(20.0)
        assert not thread.is_alive()
