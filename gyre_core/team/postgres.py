"""A private PostgreSQL server: its own data folder, one address, one password.

Enters: a folder and a port. Leaves: the command that runs it and a connection URL. It listens on 127.0.0.1 alone, has
no Unix socket, and asks for a password. PostgreSQL refuses to run as root: then its data belong to the user `postgres`
of Debian's package, who must be able to reach the folder.
"""

import os
import pwd
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gyre_core.errors import SetupError
from gyre_core.process import secret_file
from gyre_core.team.foreign import foreign_command, rights_of

INSTALL_COMMAND = "apt-get install -y postgresql"
USER = "gyre"  # of the database
_SYSTEM_USER = "postgres"  # of Debian's package; used only when Gyre runs as root
_DEBIAN = Path("/usr/lib/postgresql")
# Prefect's server keeps a pool of connections a process, and every one costs some megabytes.
_SETTINGS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresPrograms:
    """Where PostgreSQL's programs are.

    Example: find_postgres().folder
    """

    folder: Path
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """One server, running or not.

    Example: Postgres(programs=find_postgres(), data=Path("runs/team/postgres"), port=5499, password="secret")
    """

    programs: PostgresPrograms
    data: Path
    port: int
    password: str

    def url(self, database: str) -> str:
        """What Prefect's PREFECT_SERVER_DATABASE_CONNECTION_URL takes."""
        return f"postgresql+asyncpg://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def command(self) -> list[str]:
        """The server in the foreground; SIGINT is its fast and clean end."""
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [str(self.programs.folder / "postgres"), "-D", str(self.data), "-p", str(self.port), *settings]
        return foreign_command(command, user=_system_user(), stop_signal=signal.SIGINT)

    def ready(self) -> bool:
        """Whether it takes queries; while it recovers from a crash it takes connections alone."""
        return self._run("pg_isready", "-d", "postgres").returncode == 0

    def create_database(self, name: str) -> None:
        """Make a database where there is none of that name; raises SetupError."""
        done = self._run("createdb", name)
        if done.returncode != 0 and "already exists" not in done.stderr:
            raise SetupError(f"PostgreSQL made no database {name}: {done.stderr.strip()}")

    def size_bytes(self, database: str) -> int:
        """Bytes that a database takes on disk."""
        query = f"select pg_database_size('{database}')"
        done = self._run("psql", "-d", database, "-tAc", query)
        if done.returncode != 0:
            raise SetupError(f"PostgreSQL told no size of {database}: {done.stderr.strip()}")
        return int(done.stdout)

    def _run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER]
        environ = {**os.environ, "PGPASSWORD": self.password}
        return subprocess.run(
            [str(self.programs.folder / program), *where, *arguments],
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
            check=False,
        )


def find_postgres() -> PostgresPrograms:
    """The newest PostgreSQL of Debian's layout, else of PATH; raises SetupError with the command that brings one."""
    folders = sorted(_DEBIAN.glob("*/bin"), key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0))
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent, *folders] if found else folders
    for folder in reversed(folders):
        if all((folder / name).exists() for name in ("initdb", "postgres", "createdb", "psql", "pg_isready")):
            done = subprocess.run([str(folder / "postgres"), "--version"], capture_output=True, text=True, check=False)
            return PostgresPrograms(folder=folder, version=done.stdout.strip())
    raise SetupError(f"PostgreSQL is not installed; mend it with: {INSTALL_COMMAND}")


def init_postgres(server: Postgres, *, scratch: Path) -> bool:
    """Make the data folder where there is none; returns whether it did. `scratch` holds the password for a moment."""
    if (server.data / "PG_VERSION").exists():
        return False
    server.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    user = _system_user()
    if user is not None:
        _give_to(server.data, user)
    with secret_file(scratch / "postgres-password", server.password) as password:
        if user is not None:
            shutil.chown(password, user)
        command = [
            str(server.programs.folder / "initdb"),
            "-D",
            str(server.data),
            "-U",
            USER,
            "-E",
            "UTF8",
            "--no-locale",
        ]
        command += ["-A", "scram-sha-256", "--pwfile", str(password)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, **rights_of(user)
        )
    if done.returncode != 0:
        shutil.rmtree(server.data, ignore_errors=True)
        raise SetupError(f"initdb failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return True


def _system_user() -> str | None:
    """Whose rights PostgreSQL has: ours, or its own user's when we are root."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(_SYSTEM_USER)
    except KeyError:
        raise SetupError(
            f"PostgreSQL does not run as root, and there is no user {_SYSTEM_USER}; mend it with: {INSTALL_COMMAND}"
        ) from None
    return _SYSTEM_USER


def _give_to(folder: Path, user: str) -> None:
    """Let `user` own a folder; raises SetupError when that user cannot reach it."""
    shutil.chown(folder, user, user)
    closed = [path for path in folder.resolve().parents if not path.stat().st_mode & 0o001]
    if closed:
        raise SetupError(
            f"the user {user}, as whom PostgreSQL runs, cannot reach {folder}: {closed[0]} lets others not through; "
            f"give another --runs-dir, or run chmod o+x {closed[0]}"
        )
