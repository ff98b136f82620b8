"""A proxy for tests of the rollout runner: a real HTTP server that answers harnesses, with admin verbs that can fail.

It records one sampled token for each call and counts what it was asked; it needs no engine and no tokenizer.
"""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass

from gyre_core.errors import ProxyError
from gyre_core.proxy.settings import HarnessName, LimitSettings, SamplingSettings
from gyre_core.trajectory.tree import NO_PARENT, Trajectory, TrajectoryTree
from tests.support.rollouts import call, output_node, prompt_node

# In bash, because a harness of a test should start at once.
CALL_SH = """
call() {
  local rest=${1#http://}; local address=${rest%%/*}
  exec 3<>"/dev/tcp/${address%:*}/${address#*:}"
  printf 'POST /%s/v1/messages HTTP/1.0\\r\\nx-api-key: %s\\r\\nContent-Length: 0\\r\\n\\r\\n' "${rest#*/}" "$2" >&3
  cat <&3
}
"""


@dataclass
class FakeSession:
    session_id: str
    api_key: str
    base_url: str


class FakeProxy:
    """Example: async with FakeProxy() as proxy: await execute_rollout(..., proxy=proxy)"""

    def __init__(self, *, refuse_sessions: bool = False, failing_seals: int = 0, hang_seals: bool = False) -> None:
        self.refuse_sessions = refuse_sessions
        self.failing_seals = failing_seals
        self.hang_seals = hang_seals
        self.settings: dict[str, tuple[int, SamplingSettings, LimitSettings, HarnessName]] = {}
        self.calls: Counter[str] = Counter()
        self.seals = 0
        self.deleted: list[str] = []
        self.seal_as: str | None = None  # another rollout's id

    async def __aenter__(self) -> "FakeProxy":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def create_session(
        self,
        *,
        rollout_id: str,
        policy_version: int,
        sampling: SamplingSettings,
        limits: LimitSettings,
        harness: HarnessName,
    ) -> FakeSession:
        if self.refuse_sessions:
            raise ProxyError("the proxy does not answer")
        self.settings[rollout_id] = (policy_version, sampling, limits, harness)
        return FakeSession(rollout_id, f"key-{rollout_id}", f"{self.url}/s/{rollout_id}")

    async def seal(self, session_id: str) -> Trajectory:
        self.seals += 1
        if self.hang_seals:
            await asyncio.Event().wait()
        if self.seals <= self.failing_seals:
            raise ProxyError("the proxy lost its record")
        rollout_id = self.seal_as or session_id
        nodes = [prompt_node(0, NO_PARENT, [1, 2])]
        calls = []
        for index in range(self.calls[session_id]):
            nodes.append(output_node(index + 1, index, [10 + index], [-0.5], call_id=f"{rollout_id}-c{index}"))
            calls.append(call(rollout_id, index, index + 1))
        tree = TrajectoryTree(rollout_id=rollout_id, nodes=tuple(nodes) if calls else ())
        return Trajectory(rollout_id=rollout_id, tree=tree, calls=tuple(calls))

    async def delete(self, session_id: str) -> None:
        self.deleted.append(session_id)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            session_id = head.split("/s/")[1].split("/")[0]
            allowed = f"x-api-key: key-{session_id}\r\n" in head
            self.calls[session_id] += allowed
            status = "200 OK" if allowed else "401 Unauthorized"
            writer.write(f"HTTP/1.0 {status}\r\nContent-Length: 3\r\n\r\nhi\n".encode())
            await writer.drain()
        writer.close()
