"""The further machines of a cell: programs that must run on all of them, started and stopped by the first one.

    cell host (node 0)  NodeHub  <--one authenticated connection a node--  NodeAgent  (nodes 1, 2, ...)
                        run("trainer", argv of each node)                  starts it, says when it ended
                        stop("trainer")                                    ends it

Enters: command lines and variables in which `{python}` is each machine's own interpreter, `{host}` its address. Leaves:
processes. Invariants: an agent without its hub runs nothing; a program is started once for each `run`, whatever
reconnects; no message is a pickle.
Both sides prove the key to each other (HMAC, multiprocessing's handshake); nothing is encrypted: for a cluster's own
network.
"""

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import TracebackType
from typing import Any

from gyre_core.errors import ConfigError, GyreError
from gyre_core.process import ChildProcess

logger = logging.getLogger(__name__)

KEY_VARIABLE = "GYRE_NODE_KEY"  # the same for a cell's host and its nodes: a secret of the cluster
HANDSHAKE_S = 10.0
RETRY_S = 1.0
LOOK_S = 0.5  # of an agent, at its programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every node runs of one thing.

    Example: Program(key="trainer-1", argv={1: ["{python}", "-m", "..."]}, env={"RANK": "1"})
    """

    key: str  # another one for each start
    argv: Mapping[int, Sequence[str]]  # by node, from 1
    env: Mapping[str, str] = field(default_factory=dict)


class NodeHub:
    """The first node's side; a context. Example: with NodeHub("10.0.0.1", 8200, key, count=2) as hub: hub.wait(60.0)"""

    def __init__(self, host: str, port: int, key: str, *, count: int) -> None:
        """`count`: nodes of the cell, this one included. Raises OSError for an address that cannot be bound."""
        self.host = host
        self.count = count
        self._key = key.encode()
        self._socket = socket.create_server((host, port), backlog=count)
        self.port: int = self._socket.getsockname()[1]
        self._nodes: dict[int, Connection] = {}
        self._programs: dict[str, Program] = {}
        self._starts = 0
        self._changed = threading.Condition()
        self._closed = False
        self.ended: dict[str, str] = {}  # program's key -> what a node said of its end
        self._accepting = threading.Thread(target=self._accept, name="nodes", daemon=True)
        self._accepting.start()

    def wait(self, timeout_s: float) -> None:
        """Until every node is there; raises GyreError with those that are not."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) == self.count - 1, timeout_s)
            missing = sorted(set(range(1, self.count)) - set(self._nodes))
        if missing:
            raise GyreError(
                f"node(s) {missing} of the cell did not come to {self.host}:{self.port} within {timeout_s:g} s: "
                "`gyre cell-node` runs there, with the cell's key?"
            )

    def run(self, name: str, argv: Callable[[int], Sequence[str]], env: Mapping[str, str] | None = None) -> str:
        """Start a program on every node, in place of one of this name; returns its key."""
        with self._changed:
            self._starts += 1
            commands = {node: list(argv(node)) for node in range(1, self.count)}
            program = Program(key=f"{name}-{self._starts}", argv=commands, env=dict(env or {}))
            self._programs[name] = program
            for node in list(self._nodes):
                self._tell(node)
            return program.key

    def stop(self, name: str) -> None:
        """End a program on every node."""
        with self._changed:
            self._programs.pop(name, None)
            for node in list(self._nodes):
                self._tell(node)

    def close(self) -> None:
        """Every node ends what it runs."""
        with self._changed:
            self._closed = True
            for connection in self._nodes.values():
                _cut(connection)
            self._nodes.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closed alone it would go on listening while a thread accepts
        self._socket.close()
        self._accepting.join(HANDSHAKE_S)

    def __enter__(self) -> "NodeHub":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, node: int) -> None:
        wanted = {
            name: {"key": program.key, "argv": list(program.argv[node]), "env": dict(program.env)}
            for name, program in self._programs.items()
        }
        with contextlib.suppress(OSError):
            self._nodes[node].send_bytes(json.dumps({"run": wanted}).encode())

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="node", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        node = 0
        connection: Connection | None = None
        try:
            connection = handshake(client, self._key, deliver_first=True)
            node = int(json.loads(connection.recv_bytes(1024))["node"])
            if not 1 <= node < self.count:
                raise ValueError(f"node {node} of {self.count}")
            with self._changed:
                if (before := self._nodes.get(node)) is not None:
                    _cut(before)
                self._nodes[node] = connection
                self._tell(node)
                self._changed.notify_all()
            while True:
                said = json.loads(connection.recv_bytes(65536))
                logger.warning("node %d: %s ended: %s", node, said["key"], said["reason"])
                with self._changed:
                    self.ended[said["key"]] = f"node {node}: {said['reason']}"
                    self._changed.notify_all()
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError, TypeError) as error:
            if not self._closed:
                logger.warning("node %s: %s", node or "?", error or type(error).__name__)
        finally:
            with self._changed:
                if connection is not None and self._nodes.get(node) is connection:
                    del self._nodes[node]
                self._changed.notify_all()
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.close()


class NodeAgent:
    """A further node's side: does what the hub says until `stop` is set.

    Example: NodeAgent(1, "10.0.0.1", 8200, key, Path("logs")).run()
    """

    def __init__(self, node: int, host: str, port: int, key: str, logs: Path) -> None:
        self._node = node
        self._address = (host, port)
        self._key = key.encode()
        self._logs = logs
        self._host = ""  # this machine's address, as the hub sees it
        self._running: dict[str, tuple[str, ChildProcess]] = {}  # name -> key and process
        self._told: set[str] = set()  # keys whose end was told
        self.stop = threading.Event()

    def run(self) -> None:
        """Follow the hub; connects again when it is gone."""
        try:
            while not self.stop.is_set():
                try:
                    client = socket.create_connection(self._address, timeout=HANDSHAKE_S)
                    self._host = str(client.getsockname()[0])
                    connection = handshake(client, self._key, deliver_first=False)
                except AuthenticationError as error:
                    raise ConfigError(f"the cell at {self._address[0]} has another {KEY_VARIABLE}") from error
                except (OSError, EOFError) as error:
                    logger.info("node %d: no hub at %s:%d yet: %s", self._node, *self._address, error)
                    self.stop.wait(RETRY_S)
                    continue
                try:
                    self._follow(connection)
                except (OSError, EOFError) as error:  # the hub is gone, or a program cannot be started
                    logger.warning("node %d: %s", self._node, error or type(error).__name__)
                connection.close()
                self._end_all()
                self.stop.wait(RETRY_S)
        finally:
            self._end_all()

    def _follow(self, connection: Connection) -> None:
        connection.send_bytes(json.dumps({"node": self._node}).encode())
        while not self.stop.is_set():
            if connection.poll(LOOK_S):
                self._match(json.loads(connection.recv_bytes(2**20))["run"])
            for key, process in self._running.values():
                if not process.running() and key not in self._told:
                    self._told.add(key)
                    reason = f"exit code {process.wait()}"
                    connection.send_bytes(json.dumps({"key": key, "reason": reason}).encode())

    def _match(self, wanted: Mapping[str, Any]) -> None:
        for name in list(self._running):
            if name not in wanted or wanted[name]["key"] != self._running[name][0]:
                self._running.pop(name)[1].stop(grace_s=5.0)
        for name, program in wanted.items():
            if name not in self._running:
                own = {"{python}": sys.executable, "{host}": self._host}
                argv = [_filled(word, own) for word in program["argv"]]
                env = {key: _filled(value, own) for key, value in program["env"].items()}
                log = self._logs / f"node-{self._node}-{name}.log"
                logger.info("node %d: starting %s (log %s)", self._node, program["key"], log)
                process = ChildProcess(f"{name} of node {self._node}", argv, log_path=log, env=env)
                self._running[name] = (program["key"], process)

    def _end_all(self) -> None:
        while self._running:
            self._running.popitem()[1][1].stop(grace_s=5.0)
        self._told.clear()  # a hub that was started again counts its keys from 1 again


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def node_key() -> str:
    """The key of this environment; raises ConfigError when there is none."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < 16:
        raise ConfigError(f"cells of several nodes need {KEY_VARIABLE}, a secret of 16 letters or more, on every node")
    return key


def _cut(connection: Connection) -> None:
    """End a connection that another thread reads: closing it alone would leave it open until that returns."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def handshake(client: socket.socket, key: bytes, *, deliver_first: bool) -> Connection:
    """A connection whose two sides know the key; raises AuthenticationError (an OSError is the network's)."""
    client.settimeout(None)
    connection = Connection(client.detach())
    watch = threading.Timer(HANDSHAKE_S, _cut, (connection,))  # a stranger who says nothing
    watch.start()
    try:
        for step in (deliver_challenge, answer_challenge) if deliver_first else (answer_challenge, deliver_challenge):
            step(connection, key)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise
    finally:
        watch.cancel()
    return connection
