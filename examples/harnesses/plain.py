"""A stand-in for the sandbox where none works: a process group of its own, a fresh home, no walls.

Enters and leaves: as `gyre_core.rollout.sandbox.Sandbox.run`. What would be /app, /tests and so on inside a sandbox are
the host's own folders here, and the command is told so (`APP_DIR`, `REWARD_DIR`, the paths in its arguments). A harness
that starts a process group of its own can leave orphans: that, and the missing walls, is why this is for examples only.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_core.clock import SystemClock
from gyre_core.process import log_tail
from gyre_core.types import HarnessResult

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class PlainRunner:
    """Runs commands without a sandbox. Example: result = await PlainRunner().run(["true"], workspace=w, timeout_s=9)"""

    def __init__(self) -> None:
        self._clock = SystemClock()

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
        """Run `argv` in the workspace until it ends or its time is over, then kill its process group."""
        places = {inside: str(host) for host, inside in (*read_only, *read_write)}
        home = Path(tempfile.mkdtemp(prefix="home-", dir=workspace.parent))
        log = log_path or home / "log"
        environment = {
            "PATH": PATH,
            "HOME": str(home),
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TMPDIR": str(home),
            "APP_DIR": str(workspace),
            "REWARD_DIR": places.get("/logs", str(home)) + "/verifier",
            **(env or {}),
        }
        started_s, started = self._clock.now_s(), self._clock.monotonic_s()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *[_on_host(text, places) for text in argv],
                    cwd=workspace,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            timed_out = False
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                timed_out = True
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            code = process.returncode
            return HarnessResult(
                exit_code=None if timed_out or code is None else code if code >= 0 else 128 - code,
                timed_out=timed_out,
                duration_s=self._clock.monotonic_s() - started,
                log_tail=log_tail(log),
                started_s=started_s,
                finished_s=self._clock.now_s(),
            )
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _on_host(text: str, places: Mapping[str, str]) -> str:
    for inside, host in places.items():
        if text == inside or text.startswith(f"{inside}/"):
            return host + text[len(inside) :]
    return text
