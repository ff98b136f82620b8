"""Runs one command in a sandbox of its own: a harness, or a verifier.

Enters: a command, a workspace, an environment, a time limit. Leaves: a HarnessResult; a sandbox that cannot be built
is a result with `error`, never an exception. Inside, the workspace is /app (and the working directory), /home/agent
and /logs are fresh, /tmp is empty memory; of the host only /usr, /bin, /sbin, /lib*, /etc (read-only) and the
interpreter that runs Gyre are there; processes, environment, IPC and host name are private; the network is the
host's, because the proxy listens on 127.0.0.1. When `run` returns, no process of the sandbox is left, and none
outlives this process either.

As root the command runs under a user id of its own without capabilities; as any other user in a user namespace. Both
are bounded in processes, open files, size of a file, /tmp and log; the sum of the files in the workspace is not.
"""

import asyncio
import contextlib
import functools
import os
import random
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import SandboxError
from gyre_core.rollout.backends import (
    NAMESPACE_UID,
    SANDBOX_UIDS,
    Identity,
    Launch,
    LaunchSpec,
    SandboxLimits,
    account_texts,
    bubblewrap_launch,
    may_mount,
    namespaces_launch,
)
from gyre_core.rollout.shield import unhurried
from gyre_core.rollout.supervisor import Ended, supervise
from gyre_core.rollout.view import HOME_DIR, USER_NAME, Bind, interpreter_prefixes, plan_view
from gyre_core.rollout.workspace import give_tree, remove_plain, remove_tree
from gyre_core.types import HarnessResult

SandboxKind = Literal["auto", "bubblewrap", "namespaces"]
Backend = Literal["bubblewrap", "namespaces"]

LOGS_DIR = "/logs"
_SCRATCH_FOLDERS = ("home", "logs", "root")
_LAUNCHES = {"bubblewrap": bubblewrap_launch, "namespaces": namespaces_launch}
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Sandbox:
    """Sandboxes of one kind. Any number may run at once; an object holds no state of a run.

    Example: result = await Sandbox("auto").run(["bash", "-c", "make"], workspace=folder, timeout_s=60)
    """

    def __init__(
        self,
        kind: SandboxKind = "auto",
        *,
        limits: SandboxLimits | None = None,
        hidden: Sequence[Path] = (),
        clock: Clock | None = None,
    ) -> None:
        """Find the back end. Raises SandboxError when no back end of that kind works here; the message says why.

        `hidden`: folders to cover where a visible one holds them, such as the run's and the problems' below /usr/src; a
        checkout that Gyre runs from is covered anyway.
        """
        self.backend: Backend = choose_backend(kind)
        self.limits = limits or SandboxLimits()
        self._hidden: tuple[Path, ...] = (*hidden, *_checkout())
        self._prefixes = interpreter_prefixes()
        self._clock = clock or SystemClock()

    async def run(
        self,
        argv: Sequence[str],
        *,
        workspace: Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        read_only: Sequence[Bind] = (),
        read_write: Sequence[Bind] = (),
        log_path: Path | None = None,
    ) -> HarnessResult:
        """Run `argv` until it ends or its time is over; then nothing of it is left.

        `read_only` and `read_write` are (host path, path inside) pairs. A command killed by signal N has exit code
        128 + N. Cancellation kills the sandbox and is re-raised. Raises ValueError for a bind to a forbidden place.
        """
        if any("\0" in text for text in (*argv, *(env or {}), *(env or {}).values())):
            return self._not_run("its command or environment holds a NUL character")
        if workspace.is_symlink() or not workspace.is_dir():
            return self._not_run(f"there is no workspace {workspace}")
        with _identity(workspace) as identity:
            try:
                scratch = Path(tempfile.mkdtemp(prefix=".sandbox-", dir=workspace.parent))
            except OSError as error:
                return self._not_run(f"the sandbox did not start: {error}")
            try:
                return await self._run(
                    argv, workspace, timeout_s, dict(env or {}), read_only, read_write, log_path, identity, scratch
                )
            except (SandboxError, OSError) as error:  # an argument too long; no space, memory or descriptors left
                return self._not_run(f"the sandbox did not start: {error}")
            finally:
                folders = [scratch / name for name in _SCRATCH_FOLDERS]
                if not all([remove_plain(folder) for folder in folders]) or not remove_plain(scratch):
                    await unhurried(remove_tree, scratch)

    async def _run(
        self,
        argv: Sequence[str],
        workspace: Path,
        timeout_s: float,
        env: dict[str, str],
        read_only: Sequence[Bind],
        read_write: Sequence[Bind],
        log_path: Path | None,
        identity: Identity,
        scratch: Path,
    ) -> HarnessResult:
        home, logs, root = (scratch / name for name in _SCRATCH_FOLDERS)
        for folder in (home, logs, root):
            folder.mkdir()
        accounts = (scratch / "passwd", scratch / "group")
        for path, text in zip(accounts, account_texts(identity, HOME_DIR), strict=True):
            path.write_text(text)
            path.chmod(0o644)  # whatever the umask
        # An agent may have shut its own folder; whoever runs in it next must be able to enter.
        workspace.chmod(stat.S_IMODE(workspace.stat().st_mode) | 0o755)
        if not any(inside == LOGS_DIR for _, inside in read_write):
            read_write = [*read_write, (logs, LOGS_DIR)]
        mounts = plan_view(
            workspace=workspace,
            home=home,
            account_files=[(accounts[0], "/etc/passwd"), (accounts[1], "/etc/group")],
            read_only=read_only,
            read_write=read_write,
            prefixes=self._prefixes,
            hidden=(*self._hidden, workspace.parent),
            tmp_bytes=self.limits.tmp_bytes,
        )
        if not identity.user_namespace:
            for folder in (home, workspace, *(host for host, _ in read_write)):
                if folder.lstat().st_uid != identity.uid:
                    await unhurried(give_tree, folder, identity.uid, identity.gid)

        def make_launch(status_fd: int, sync_fd: int) -> Launch:
            spec = LaunchSpec(
                argv=tuple(argv),
                env=_base_env() | env,
                mounts=mounts,
                identity=identity,
                limits=self.limits,
                root=root,
                status_fd=status_fd,
                sync_fd=sync_fd,
            )
            return _LAUNCHES[self.backend](spec)

        ended = await supervise(
            make_launch,
            timeout_s=timeout_s,
            log_path=log_path,
            log_bytes=self.limits.log_bytes,
            clock=self._clock,
        )
        return _to_result(ended)

    def _not_run(self, reason: str) -> HarnessResult:
        now_s = self._clock.now_s()
        return HarnessResult(
            exit_code=None,
            timed_out=False,
            duration_s=0.0,
            log_tail="",
            started_s=now_s,
            finished_s=now_s,
            error=reason,
        )


def choose_backend(kind: SandboxKind) -> Backend:
    """The back end of a kind that works here; `auto` prefers bubblewrap. Raises SandboxError with what was tried."""
    candidates: tuple[Backend, ...] = ("bubblewrap", "namespaces") if kind == "auto" else (kind,)
    reasons = []
    for backend in candidates:
        reason = probe_backend(backend)
        if not reason:
            return backend
        reasons.append(f"{backend}: {reason}")
    raise SandboxError(
        "no sandbox works on this machine:\n  "
        + "\n  ".join(reasons)
        + "\nAs an ordinary user, user namespaces must be allowed (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0); in a container, start it with --privileged."
    )


@functools.cache
def probe_backend(backend: Backend) -> str:
    """Why a back end does not work on this machine, empty when it does: it runs a real sandbox once a process."""
    check = 'test "$(id -un)" = "$1" && test ! -e "$2" && test -x "$3" && "$3" -I -S -c ""'
    with tempfile.TemporaryDirectory(prefix="gyre-probe-") as folder:
        workspace = Path(folder, "workspace")
        workspace.mkdir()
        sandbox = object.__new__(Sandbox)  # the constructor asks for this very probe
        sandbox.backend, sandbox.limits, sandbox._clock = backend, SandboxLimits(), SystemClock()
        sandbox._hidden, sandbox._prefixes = (), interpreter_prefixes()
        argv = ["/bin/bash", "-c", check, "probe", USER_NAME, folder, sys.executable]
        with ThreadPoolExecutor(1) as pool:  # the caller may be inside a running event loop
            result = pool.submit(asyncio.run, sandbox.run(argv, workspace=workspace, timeout_s=30)).result()
    if result.error:
        return result.error
    if result.exit_code != 0:
        return (
            f"a probe in it failed with exit code {result.exit_code} ({result.log_tail.strip() or 'no output'}); the "
            f" sandboxed user must be able to read and run {sys.executable} and what it links to"
        )
    return ""


_uids_lock = threading.Lock()
_uids_in_use: set[int] = set()


@contextlib.contextmanager
def _identity(workspace: Path) -> Iterator[Identity]:
    """The user of one run. A workspace keeps its user from run to run where that one is free: no change of owner."""
    if not may_mount():
        yield Identity(uid=NAMESPACE_UID, gid=NAMESPACE_UID, user_namespace=True)
        return
    with own_user(workspace) as identity:
        yield identity


@contextlib.contextmanager
def own_user(workspace: Path) -> Iterator[Identity]:
    """A user that no other run has now; this very user when it is not root and cannot become another."""
    if os.geteuid() != 0:
        yield Identity(uid=os.getuid(), gid=os.getgid(), user_namespace=False)
        return
    owner = workspace.lstat().st_uid
    with _uids_lock:
        free = owner in SANDBOX_UIDS and owner not in _uids_in_use
        uid = owner if free else random.choice([uid for uid in SANDBOX_UIDS if uid not in _uids_in_use])
        _uids_in_use.add(uid)
    try:
        yield Identity(uid=uid, gid=uid, user_namespace=False)
    finally:
        with _uids_lock:
            _uids_in_use.discard(uid)


def _checkout() -> tuple[Path, ...]:
    """The folder of a source checkout that Gyre runs from, which may lie below a visible one such as /usr/src."""
    folder = Path(__file__).resolve().parents[2]
    return (folder,) if (folder / "pyproject.toml").is_file() else ()


def _base_env() -> dict[str, str]:
    return {
        "PATH": f"{_SYSTEM_PATH}:{Path(sys.prefix) / 'bin'}",
        "HOME": HOME_DIR,
        "USER": USER_NAME,
        "LOGNAME": USER_NAME,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }


def _to_result(ended: Ended) -> HarnessResult:
    return HarnessResult(
        exit_code=ended.exit_code,
        timed_out=ended.timed_out,
        duration_s=ended.duration_s,
        log_tail=ended.output_tail,
        started_s=ended.started_s,
        finished_s=ended.finished_s,
        error=ended.error,
    )
