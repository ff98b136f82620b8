"""Runs one command in a container of docker or podman: the same contract as sandbox.py, with the programs of an image.

Enters: a command, a workspace, an environment, a time limit. Leaves: a HarnessResult; a container that does not start
is a result with `error`, never an exception. Inside, the workspace is /app (and the working directory), /home/agent
and /logs are fresh, /tmp is bounded memory; of the host only these and explicit binds are there. The network is the
host's by default, because the proxy listens on 127.0.0.1; `network = "none"` has no network at all.

Process 1 of the container is a shell of ours (_PROCESS_ONE). It says over a named pipe that the command starts, so
that the time limit does not count the start of the container and a failure to start is told from a failure of the
command; and it ends everything when its input ends, which the kernel brings about when Gyre dies, however it dies.
Invariant: when `run` returns or raises (cancellation included), the container is removed.

The daemon must run on this machine: folders are bound, not copied.
"""

import asyncio
import contextlib
import csv
import io
import os
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gyre_core.clock import Clock, SystemClock
from gyre_core.errors import SandboxError
from gyre_core.rollout.backends import OOM_SCORE_ADJ, Identity, SandboxLimits, account_texts
from gyre_core.rollout.sandbox import LOGS_DIR, own_user
from gyre_core.rollout.shield import finish_even_if_cancelled, unhurried
from gyre_core.rollout.supervisor import DRAIN_LIMIT_S, BoundedLog, first_of
from gyre_core.rollout.view import HOME_DIR, USER_NAME, WORKSPACE_DIR, Bind, checked_dest
from gyre_core.rollout.workspace import give_tree, remove_tree
from gyre_core.types import HarnessResult

ContainerProgram = Literal["docker", "podman"]

STATUS_DIR = "/run/gyre"
OWNER_LABEL = "gyre.owner"
START_LIMIT_S = 120.0  # from the client's start to the command's; the image is on the machine already
REMOVE_LIMIT_S = 60.0
ADMIN_LIMIT_S = 30.0  # for a question to the daemon
_CLIENT_FAILED = 125  # the client's own exit code: no container was started, or it lost it
_READ_BYTES = 65536

# The watcher holds descriptor 3, our end of which closes when Gyre ends; `kill -1` spares process 1, whose wait ends.
_PROCESS_ONE = f"""
exec 3<&0 </dev/null
{{ read -r _ <&3; kill -9 -1; }} >/dev/null 2>&1 &
echo ready > {STATUS_DIR}/status || exit 125
"$@" 3<&-
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """Which containers. Example: ContainerSettings(program="podman", image="debian:stable-slim")"""

    program: ContainerProgram
    image: str  # on this machine already; it is never pulled during a run
    network: str = "host"  # "none", or the name of a network
    memory_bytes: int | None = None  # None: not bounded
    cpus: float | None = None


class ContainerSandbox:
    """Containers of one image. Any number may run at once; an object holds no state of a run.

    Example: await ContainerSandbox(settings).run(["make"], workspace=folder, timeout_s=60)
    """

    def __init__(
        self, settings: ContainerSettings, *, limits: SandboxLimits | None = None, clock: Clock | None = None
    ) -> None:
        """Ask the daemon for the image, and remove what dead processes of Gyre left. Raises SandboxError."""
        self.settings = settings
        self.backend = settings.program
        self.limits = limits or SandboxLimits()
        self._clock = clock or SystemClock()
        program = shutil.which(settings.program)
        if program is None:
            raise SandboxError(f'{settings.program} is not installed; install it or set rollout.sandbox = "auto"')
        self._program = program
        if not settings.image:
            raise SandboxError("a container needs an image: set rollout.container.image")
        found = self._ask("image", "inspect", settings.image)
        if found.returncode != 0:
            raise SandboxError(
                f"{settings.program} has no image {settings.image} ({_last_line(found.stderr)}); get it with "
                f"`{settings.program} pull {settings.image}`, or start the daemon"
            )
        self._sweep()

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
        """Run `argv` until it ends or its time is over; then nothing of it is left. As `Sandbox.run`."""
        if any("\0" in text for text in (*argv, *(env or {}), *(env or {}).values())):
            return self._not_run("its command or environment holds a NUL character")
        if workspace.is_symlink() or not workspace.is_dir():
            return self._not_run(f"there is no workspace {workspace}")
        for _, inside in (*read_only, *read_write):
            checked_dest(inside)
        with own_user(workspace) as identity:
            try:
                scratch = Path(tempfile.mkdtemp(prefix=".container-", dir=workspace.parent))
            except OSError as error:
                return self._not_run(f"the container did not start: {error}")
            try:
                binds = [*read_write]
                if not any(inside == LOGS_DIR for _, inside in binds):
                    binds.append((scratch / "logs", LOGS_DIR))
                await unhurried(self._prepare, scratch, workspace, binds, identity)
                name = f"gyre-{uuid.uuid4().hex}"
                command = self._command(name, argv, dict(env or {}), scratch, identity, workspace, read_only, binds)
                return await self._supervise(name, command, dict(env or {}), scratch, timeout_s, log_path)
            except (SandboxError, OSError) as error:
                return self._not_run(f"the container did not start: {error}")
            finally:
                await unhurried(remove_tree, scratch)

    def _prepare(self, scratch: Path, workspace: Path, read_write: Sequence[Bind], identity: Identity) -> None:
        """The run's own folders, owned by its user; an agent may have shut its workspace."""
        for name in ("home", "logs", "status"):
            (scratch / name).mkdir()
        scratch.chmod(0o755)
        os.mkfifo(scratch / "status" / "status")
        os.chmod(scratch / "status" / "status", 0o622)
        for name, text in zip(("passwd", "group"), account_texts(identity, HOME_DIR), strict=True):
            (scratch / name).write_text(text)
            (scratch / name).chmod(0o644)
        workspace.chmod(stat.S_IMODE(workspace.stat().st_mode) | 0o755)
        for folder in (scratch / "home", workspace, *(host for host, _ in read_write)):
            if not folder.exists():
                raise SandboxError(f"there is no {folder} to bind")
            if os.geteuid() == 0:
                give_tree(folder, identity.uid, identity.gid)

    def _command(
        self,
        name: str,
        argv: Sequence[str],
        env: dict[str, str],
        scratch: Path,
        identity: Identity,
        workspace: Path,
        read_only: Sequence[Bind],
        read_write: Sequence[Bind],
    ) -> list[str]:
        settings, limits = self.settings, self.limits
        options = ["run", "--rm", "--interactive", "--name", name, "--label", f"{OWNER_LABEL}={_owner()}"]
        options += ["--pull", "never", "--network", settings.network, "--workdir", WORKSPACE_DIR]
        options += ["--user", f"{identity.uid}:{identity.gid}", "--cap-drop", "ALL"]
        options += ["--security-opt", "no-new-privileges", "--oom-score-adj", str(OOM_SCORE_ADJ)]
        options += ["--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}"]
        options += ["--ulimit", f"fsize={limits.file_bytes}", "--ulimit", "core=0"]
        options += ["--tmpfs", f"/tmp:rw,exec,size={limits.tmp_bytes},mode=1777", "--shm-size", str(limits.tmp_bytes)]
        if self.backend == "podman" and os.geteuid() != 0:
            options += ["--userns", "keep-id"]
        if settings.memory_bytes is not None:
            options += ["--memory", str(settings.memory_bytes), "--memory-swap", str(settings.memory_bytes)]
        if settings.cpus is not None:
            options += ["--cpus", f"{settings.cpus:g}"]
        binds = [(workspace, WORKSPACE_DIR), (scratch / "home", HOME_DIR), *read_write]
        options += [part for host, inside in binds for part in ("--mount", _mount(host, inside))]
        binds = [(scratch / "passwd", "/etc/passwd"), (scratch / "group", "/etc/group"), *read_only]
        options += [part for host, inside in binds for part in ("--mount", _mount(host, inside, "readonly"))]
        options += ["--mount", _mount(scratch / "status", STATUS_DIR)]
        values = {"HOME": HOME_DIR, "USER": USER_NAME, "LOGNAME": USER_NAME, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **env}
        env_file = scratch / "env"  # values show neither in the process list nor in the client's own environment
        env_file.write_text("".join(f"{key}={value}\n" for key, value in values.items() if "\n" not in value))
        env_file.chmod(0o600)
        options += ["--env-file", str(env_file)]
        for key in (key for key, value in values.items() if "\n" in value):
            options += ["--env", key]  # the client's own value: a file of lines cannot hold it
        return [
            self._program,
            *options,
            "--entrypoint",
            "/bin/sh",
            self.settings.image,
            "-c",
            _PROCESS_ONE,
            "gyre",
            *argv,
        ]

    async def _supervise(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        scratch: Path,
        timeout_s: float,
        log_path: Path | None,
    ) -> HarnessResult:
        log = BoundedLog(log_path, self.limits.log_bytes)
        started_s, started = self._clock.now_s(), self._clock.monotonic_s()
        timed_out, error = False, ""
        try:
            client = _Client(command, {key: value for key, value in env.items() if "\n" in value}, scratch, log)
        except BaseException:
            log.close()
            raise
        try:
            try:
                await first_of(client.ready, client.ended, timeout_s=START_LIMIT_S)
                if client.ready.is_set():
                    started_s, started = self._clock.now_s(), self._clock.monotonic_s()
                    timed_out = not await first_of(client.ended, timeout_s=timeout_s)
                elif not client.ended.is_set():
                    error = f"the container did not start within {START_LIMIT_S:g} s"
            finally:
                duration_s = self._clock.monotonic_s() - started
                await finish_even_if_cancelled(self._end(name, client))
            if not client.ready.is_set():
                error = f"{error or 'the container could not be started'}: {log.tail_text().strip() or 'no output'}"
        finally:
            client.close()
            log.close()
        code = client.process.returncode if not (timed_out or error) else None
        return HarnessResult(
            exit_code=code if code is None or code >= 0 else 128 - code,
            timed_out=timed_out,
            duration_s=duration_s,
            log_tail=log.tail_text(),
            started_s=started_s,
            finished_s=started_s + duration_s,
            error=error,
        )

    async def _end(self, name: str, client: "_Client") -> None:
        """Make sure that the container is gone: the client may have ended, or never begun, without it."""
        code = client.process.returncode
        if code is None or code < 0 or code == _CLIENT_FAILED:
            client.process.kill()  # first: it could still be about to make the container
            await first_of(client.ended, timeout_s=REMOVE_LIMIT_S)
            removal = await asyncio.to_thread(self._ask, "rm", "--force", name, limit_s=REMOVE_LIMIT_S)
            left = await asyncio.to_thread(self._ask, "ps", "--all", "--quiet", "--filter", f"name={name}")
            if left.stdout.strip() or (left.returncode != 0 and removal.returncode != 0):
                raise SandboxError(
                    f"the container {name} could not be removed ({_last_line(removal.stderr + left.stderr)}); "
                    f"remove it with `{self.backend} rm --force {name}`"
                )
        await first_of(client.output_ended, timeout_s=DRAIN_LIMIT_S)

    def _sweep(self) -> None:
        """Remove containers whose Gyre is gone: one that was killed while its daemon did not answer."""
        listed = self._ask("ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", _LISTED)
        for line in listed.stdout.decode(errors="replace").splitlines():
            name, _, owner = line.partition(" ")
            if name and owner and not _is_alive(owner):
                self._ask("rm", "--force", name, limit_s=REMOVE_LIMIT_S)

    def _ask(self, *words: str, limit_s: float = ADMIN_LIMIT_S) -> subprocess.CompletedProcess[bytes]:
        """A question to the daemon; one that does not answer is a failure like another."""
        try:
            return subprocess.run(
                [self._program, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess([], 125, b"", str(error).encode())

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


_LISTED = f'{{{{.Names}}}} {{{{.Label "{OWNER_LABEL}"}}}}'  # the same in docker and podman


class _Client:
    """The client that runs a container, and its descriptors; all methods belong to the event loop's thread."""

    def __init__(self, command: list[str], env: dict[str, str], scratch: Path, log: BoundedLog) -> None:
        self._loop, self._log = asyncio.get_running_loop(), log
        self.ready, self.ended, self.output_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as given:

            def pipe() -> tuple[int, int]:
                ends = os.pipe2(os.O_CLOEXEC)
                for end in ends:
                    opened.callback(os.close, end)
                return ends

            status = os.open(scratch / "status" / "status", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, status)
            (stdin_inside, stdin), (output, output_inside) = pipe(), pipe()
            os.set_blocking(output, False)
            self.process = subprocess.Popen(
                command, stdin=stdin_inside, stdout=output_inside, stderr=output_inside, env={**os.environ, **env}
            )
            given.callback(self.process.kill)
            pidfd = os.pidfd_open(self.process.pid)
            given.pop_all()
            opened.pop_all()
            os.close(stdin_inside)
            os.close(output_inside)
        self._stdin, self._readers = stdin, {status: self._on_status, output: self._on_output, pidfd: self._on_end}
        for fd, callback in self._readers.items():
            self._loop.add_reader(fd, callback, fd)

    def close(self) -> None:
        """Close the descriptors; the container's process 1 sees its input end."""
        for fd in self._readers:
            self._loop.remove_reader(fd)
            os.close(fd)
        os.close(self._stdin)

    def _on_status(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self.ready.set()

    def _on_output(self, fd: int) -> None:
        data = os.read(fd, _READ_BYTES)
        if data:
            self._log.write(data)
        else:
            self._loop.remove_reader(fd)
            self.output_ended.set()

    def _on_end(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self.process.wait()
        self.ended.set()


def _mount(host: Path, inside: str, *flags: str) -> str:
    """A value of --mount: fields of one CSV line, so that a comma in a path stays part of it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        ["type=bind", f"source={os.path.realpath(host)}", f"target={inside}", *flags]
    )
    return line.getvalue()


def _owner() -> str:
    """This process: its id and when it started, so that a later process of the same id is another."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def _is_alive(owner: str) -> bool:
    pid, _, started = owner.partition("-")
    return not pid.isdigit() or _start_time(int(pid)) == started


def _start_time(pid: int) -> str:
    """Clock ticks from the machine's start to the process's, "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["no output"])[-1][:300]
