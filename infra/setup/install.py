"""Build Gyre's two environments: idempotent, restartable, silent when there is nothing to do.

`python install.py [all | venv | engine | lock]`. What to do is decided in plan.py; this file does it. A build is
marked `building` before its first step and `ready` after its check, so one that was interrupted is found and redone.
pip's logs lie in `.setup/`. One set-up runs at a time (a lock that the pip processes hold too). Standard library only.

Environment: GYRE_PYTHON (see setup.sh), GYRE_GPU=0|1 overrides the look for an NVIDIA GPU, GYRE_NO_APT=1 leaves system
packages alone.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from plan import MARKER, Decision, Environment, Step, decide, engine_environment, gyre_environment, marker_text

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".setup"
# Names that would make pip install elsewhere or see other packages than the environment's own.
_FOREIGN_ENV = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
)


class InstallError(Exception):
    """A step failed; the message says what to do."""


def say(text: str) -> None:
    """Progress goes to stderr: stdout belongs to the command that make runs afterwards."""
    print(text, file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers."""
    if os.environ.get("GYRE_GPU") in {"0", "1"}:
        return os.environ["GYRE_GPU"] == "1"
    if not shutil.which("nvidia-smi"):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def main(argv: list[str]) -> int:
    what = argv[0] if argv else "all"
    if what not in {"all", "venv", "engine", "lock"}:
        say(f"error: {what!r} is none of: all, venv, engine, lock")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if what == "lock":
            write_lock()
        else:
            install(what)
    except InstallError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again: what is half built is found and redone")
        return 130
    return 0


def install(what: str) -> None:
    """Bring the named environments up to date."""
    gpu = has_gpu()
    environments = []
    if what in {"all", "venv"}:
        environments.append(gyre_environment(ROOT, gpu))
    if what in {"all", "engine"}:
        environments.append(engine_environment(ROOT, gpu))
    if all(decide(environment, ROOT)[0] is Decision.KEEP for environment in environments):
        return
    LOGS.mkdir(exist_ok=True)
    with (LOGS / "lock").open("w") as lock:
        _take(lock)
        pending = [
            (environment, *decide(environment, ROOT)) for environment in environments
        ]  # another may have built it
        pending = [entry for entry in pending if entry[1] is not Decision.KEEP]
        _announce(pending, gpu)
        for environment, decision, _reason in pending:
            build(environment, decision, lock)
        if pending:
            provide_libibverbs()
            say("[set-up] done")


def build(environment: Environment, decision: Decision, lock: IO[str]) -> None:
    """Run an environment's steps; raises InstallError with the log's end when one fails."""
    folder = environment.folder
    if decision is Decision.REBUILD:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    _write_marker(environment, "building")
    log_path = LOGS / f"{environment.name}.log"
    python = str(folder / "bin/python")
    number_of_steps = len(environment.steps) + 2
    with log_path.open("w") as log:
        if decision is Decision.REBUILD:
            _run(
                environment,
                f"1/{number_of_steps} Python environment",
                [[sys.executable, "-m", "venv", str(folder)]],
                log,
                lock,
            )
        for number, step in enumerate(environment.steps, start=2):
            title = f"{number}/{number_of_steps} {step.title}"
            _run(environment, title, [_pip(python, args) for args in _choices(step)], log, lock)
        title = f"{number_of_steps}/{number_of_steps} check"
        _run(environment, title, [[python, "-E", "-s", "-c", environment.check]], log, lock)
    _write_marker(environment, "ready")


def provide_libibverbs() -> None:
    """Mooncake's wheel needs libibverbs.so.1. Never fails: without it weights travel through local files."""
    if _loads("libibverbs.so.1") or sys.platform != "linux":
        return
    command = "apt-get install -y --no-install-recommends libibverbs1"
    apt = shutil.which("apt-get")
    if apt and os.geteuid() == 0 and os.environ.get("GYRE_NO_APT") != "1":
        say("[set-up] Debian library libibverbs1 (for the Mooncake transfer) ...")
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        with (LOGS / "apt.log").open("w") as log:
            for arguments in (["update", "-q"], ["install", "-y", "--no-install-recommends", "libibverbs1"]):
                try:
                    subprocess.run(
                        [apt, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environ,
                        timeout=300,
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    break
        if _loads("libibverbs.so.1"):
            return
        say(f"[set-up] libibverbs1 could not be installed (log: {LOGS / 'apt.log'}).")
    prefix = "" if os.geteuid() == 0 else "sudo "
    say(
        "[set-up] Without libibverbs1 Mooncake does not load; weights then travel through local files, which works too."
    )
    say(f"[set-up] To have Mooncake: {prefix}{command}    (or your system's package with libibverbs.so.1)")


def write_lock() -> None:
    """Write both constraint files from the present environments: what is installed, without local builds or paths."""
    for folder, target in (
        (".venv", "infra/setup/constraints.txt"),
        (".venv-engine", "infra/engine/constraints-cpu.txt"),
    ):
        command = [str(ROOT / folder / "bin/python"), "-m", "pip", "freeze", "--exclude-editable"]
        frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        pins = [line.split("+")[0].strip() for line in frozen.splitlines() if "==" in line and line[0] not in "-#"]
        header = (
            f"# Versions installed and tested together ({folder}, Linux x86_64, CPU). Constraints, not requirements.\n"
            "# Written by: python3.11 infra/setup/install.py lock\n"
        )
        lines = "\n".join(sorted(pins, key=str.lower))
        (ROOT / target).write_text(f"{header}{lines}\n", encoding="utf-8")


def _announce(pending: list[tuple[Environment, Decision, str]], gpu: bool) -> None:
    for environment, decision, reason in pending:
        if decision is Decision.REFUSE:
            folder = environment.folder
            raise InstallError(f"{folder} {reason} and is left alone; move it away or remove it: rm -rf {folder}")
    if not pending:
        return
    rebuilt = [environment for environment, decision, _reason in pending if decision is Decision.REBUILD]
    needed_gb = sum(environment.disk_gb for environment in rebuilt)
    minutes = sum(environment.minutes if environment in rebuilt else 0.5 for environment, _d, _r in pending)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    builds = "NVIDIA GPU" if gpu else "no NVIDIA GPU: CPU builds"
    say(f"[set-up] Python {sys.version.split()[0]}, {builds}; logs in {LOGS}")
    for environment, decision, reason in pending:
        size = f"{environment.disk_gb:.1f} GB" if decision is Decision.REBUILD else "in place"
        say(f"[set-up]   {environment.folder.name}: {environment.what} ({size}; {reason})")
    say(f"[set-up] needs {needed_gb:.1f} GB of disk ({free_gb:.0f} GB free) and about {minutes:.0f} minutes")
    if gpu:
        say("[set-up] the GPU builds are written and documented but have not been tested on a GPU machine yet")
    headroom_gb = 1.5 if rebuilt else 0.5  # pip unpacks wheels beside the target
    if free_gb < needed_gb + headroom_gb:
        wanted_gb = needed_gb + headroom_gb
        raise InstallError(
            f"{ROOT} has {free_gb:.1f} GB free, the set-up needs {wanted_gb:.1f} GB; free some space or clone elsewhere"
        )


def _choices(step: Step) -> list[tuple[str, ...]]:
    return [step.args, *step.alternatives]


def _pip(python: str, args: tuple[str, ...]) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *args]


def _run(environment: Environment, title: str, commands: list[list[str]], log: IO[str], lock: IO[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in _FOREIGN_ENV}
    environ["PYTHONNOUSERSITE"] = "1"
    started_s = time.monotonic()
    for number, command in enumerate(commands):
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            cwd=ROOT,
            pass_fds=[lock.fileno()],
            check=False,
        )
        if done.returncode == 0:
            say(f"[{environment.name}] {title}: {time.monotonic() - started_s:.0f} s")
            return
        if number + 1 < len(commands):
            log.write(f"exit code {done.returncode}; trying another source\n")
    tail = Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    raise InstallError(
        f"{environment.name}: step {title} failed. The end of {log.name}:\n    "
        + "\n    ".join(tail)
        + "\n  Run the same command again once the cause is gone; what is half built is redone."
    )


def _take(lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("[set-up] another set-up is running in this folder; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _write_marker(environment: Environment, state: str) -> None:
    path = environment.folder / MARKER
    draft = path.with_suffix(".draft")
    draft.write_text(marker_text(environment, ROOT, state), encoding="utf-8")
    draft.replace(path)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
