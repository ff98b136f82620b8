"""Emulated rollouts: an environment whose harnesses are coroutines of this process.

Enters: what a sandbox would run. Leaves: a HarnessResult after the time that the workload says, the cluster's clock
compressed. A harness here is a client of the real proxy: it sends its whole history with each call, waits for its
tools, and ends; so thousands are affordable. A verifier waits and writes the rollout's reward. Which rollout it is says
the workspace's folder, as it does for people.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from gyre_core.clock import Clock, SystemClock
from gyre_core.config.emulation import EmulationConfig
from gyre_core.errors import GyreError
from gyre_core.rollout.workload import RolloutPlan, plan_rollout
from gyre_core.types import HarnessResult, Json

logger = logging.getLogger(__name__)

BASE_URL, API_KEY = "EMULATED_BASE_URL", "EMULATED_API_KEY"  # a harness's environment
_LETTERS = "abcdefghijklmnop"
_ATTEMPTS = 6  # of one call; a proxy that is restarted answers again within seconds
_RETRY_S = 0.5
_RETRYABLE = (408, 409, 429, 500, 502, 503, 504, 529)


class HarnessCallError(GyreError):
    """A call that the proxy did not answer well."""


class EmulatedEnvironment:
    """Stands where a sandbox stands (gyre_core/rollout/sandbox.py). Any number of runs at once, in any event loop.

    Example: await EmulatedEnvironment(config).run(["emulated"], workspace=folder, timeout_s=60, env={...})
    """

    backend = "emulated"

    def __init__(self, config: EmulationConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()

    async def run(
        self,
        argv: Sequence[str],
        *,
        workspace: Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        read_only: Sequence[tuple[Path, str]] = (),
        read_write: Sequence[tuple[Path, str]] = (),
        log_path: Path | None = None,
    ) -> HarnessResult:
        """As Sandbox.run; `timeout_s` are wall seconds. A folder that is bound to /logs makes it a verifier."""
        plan = plan_rollout(self._config.workload, workspace.parent.name)
        logs = next((host for host, inside in read_write if inside == "/logs"), None)
        started_s, started = self._clock.now_s(), self._clock.monotonic_s()
        timed_out, error, exit_code, tail = False, "", 0, ""
        try:
            async with asyncio.timeout(timeout_s):
                if logs is not None:
                    await self._verify(plan, logs / "verifier")
                else:
                    await self._work(plan, dict(env or {}))
        except TimeoutError:
            timed_out, exit_code = True, None
        except GyreError as failure:
            tail, exit_code = str(failure), 1
            logger.warning("emulated harness of %s: %s", workspace.parent.name, tail)
        if plan.failed and logs is None:
            error, exit_code = "emulated: its machine was lost", None
        return HarnessResult(
            exit_code=exit_code,
            timed_out=timed_out,
            duration_s=self._clock.monotonic_s() - started,
            log_tail=tail,
            started_s=started_s,
            finished_s=self._clock.now_s(),
            error=error,
        )

    async def _verify(self, plan: RolloutPlan, folder: Path) -> None:
        await self._sleep(self._config.workload.grade_s if plan.grade_s is None else plan.grade_s)
        (folder / "reward.txt").write_text(f"{plan.reward:g}\n")

    async def _work(self, plan: RolloutPlan, env: dict[str, str]) -> None:
        url, key = f"{env[BASE_URL]}/v1/chat/completions", env[API_KEY]
        prompt_tokens = plan.prompt_tokens or self._config.workload.prompt_tokens
        messages: list[Json] = [{"role": "user", "content": _text(prompt_tokens)}]
        await self._sleep(plan.start_s)
        for tokens, tool_tokens, tool_s in zip(plan.call_tokens, plan.tool_tokens, plan.tools_s, strict=True):
            body = {"model": "policy", "messages": messages, "max_tokens": tokens}
            reply = await _call(url, key, orjson.dumps(body))
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
            messages.append({"role": "user", "content": _text(tool_tokens)})
            await self._sleep(tool_s)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(self._config.wall_s(seconds))


def _text(num_tokens: int) -> str:
    """A text of so many tokens: the tokenizer of emulated runs has a token for each letter."""
    return (_LETTERS * (num_tokens // len(_LETTERS) + 1))[:num_tokens]


async def _call(url: str, key: str, body: bytes) -> Json:
    """One call, tried again as harnesses do."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            status, answer = await _post(url, key, body)
        except (OSError, EOFError, ValueError) as error:
            status, answer = 503, repr(error).encode()
        if status == 200:
            return orjson.loads(answer)
        if status not in _RETRYABLE or attempt == _ATTEMPTS:
            raise HarnessCallError(f"the proxy answered {status}: {answer[:300]!r}")
        await asyncio.sleep(_RETRY_S * attempt)
    raise AssertionError("unreachable")


async def _post(url: str, key: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own: a call waits minutes, a connection costs nothing."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    try:
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        head_bytes = await reader.readuntil(b"\r\n\r\n")
        status = int(head_bytes.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head_bytes.lower():
            return status, await _read_chunks(reader)
        return status, await reader.read()
    finally:
        writer.close()


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body; EOFError when it ends before its last chunk."""
    parts = []
    while size := int((await reader.readline()).split(b";")[0] or b"x", 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)
