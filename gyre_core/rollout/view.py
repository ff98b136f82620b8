"""What a sandboxed process sees of the file system: a pure list of mounts that both back ends carry out.

Enters: the workspace, extra binds, the interpreter's folders and the folders that must stay hidden. Leaves: mounts in
an order that is safe to carry out one after the other (a parent always before what lies in it). Invariants: only
system folders (/usr, /bin, /sbin, /lib*, /etc), the interpreter's prefixes and explicit binds come from the host,
read-only unless they are the workspace, the home or a read-write bind; a hidden folder that lies inside one of them
is covered by an empty one; the root itself is read-only.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

WORKSPACE_DIR = "/app"  # Harbor's working directory
HOME_DIR = "/home/agent"
USER_NAME = "agent"
SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")

Bind = tuple[Path, str]  # (folder or file of the host, absolute path inside)


class MountKind(StrEnum):
    """What a mount puts at its destination."""

    READ_ONLY = "ro"
    READ_WRITE = "rw"
    SYMLINK = "symlink"
    FOLDER = "folder"  # an empty folder, readable by all
    TMPFS = "tmpfs"  # empty and writable by the sandboxed user
    EMPTY = "empty"  # empty and read-only: covers something hidden
    PROC = "proc"
    DEV = "dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One thing put into the sandbox's file system.

    Example: Mount(kind=MountKind.READ_ONLY, dest="/usr", source="/usr")
    """

    kind: MountKind
    dest: str  # absolute path inside
    source: str = ""  # host path of a bind, target of a symlink
    size_bytes: int = 0  # of a tmpfs


def plan_view(
    *,
    workspace: Path,
    home: Path,
    account_files: Sequence[Bind],
    read_only: Sequence[Bind],
    read_write: Sequence[Bind],
    prefixes: Sequence[Path],
    hidden: Iterable[Path],
    tmp_bytes: int,
) -> tuple[Mount, ...]:
    """The mounts of one run, in order. `account_files` cover /etc/passwd and /etc/group.

    Raises ValueError for a bind whose inside path is not absolute, not normalised, or the root, /proc or /dev.
    """
    mounts: list[Mount] = []
    for name in SYSTEM_DIRS:
        path = Path(name)
        if path.is_symlink():  # merged /usr: /bin -> usr/bin
            mounts.append(Mount(kind=MountKind.SYMLINK, dest=name, source=os.readlink(path)))
        elif path.is_dir():
            mounts.append(Mount(kind=MountKind.READ_ONLY, dest=name, source=name))
    covered = [os.path.realpath(path) for path in hidden]
    needed = [path for path in prefixes if not _in_system(path) or _is_below(os.path.realpath(path), covered)]
    explicit = [(MountKind.READ_ONLY, bind) for bind in [*[(path, str(path)) for path in needed], *read_only]]
    explicit += [(MountKind.READ_WRITE, bind) for bind in read_write]
    binds = [
        Mount(kind=kind, dest=checked_dest(inside), source=os.path.realpath(host)) for kind, (host, inside) in explicit
    ]
    visible = [mount for mount in (*mounts, *binds) if mount.kind in (MountKind.READ_ONLY, MountKind.READ_WRITE)]
    mounts += _covers(visible, covered)
    mounts += binds
    mounts += [
        Mount(kind=MountKind.PROC, dest="/proc"),
        Mount(kind=MountKind.DEV, dest="/dev"),
        Mount(kind=MountKind.TMPFS, dest="/dev/shm", size_bytes=tmp_bytes),
        Mount(kind=MountKind.TMPFS, dest="/tmp", size_bytes=tmp_bytes),
        Mount(kind=MountKind.SYMLINK, dest="/var/tmp", source="/tmp"),
        Mount(kind=MountKind.READ_WRITE, dest=HOME_DIR, source=os.path.realpath(home)),
        Mount(kind=MountKind.READ_WRITE, dest=WORKSPACE_DIR, source=os.path.realpath(workspace)),
    ]
    mounts += [
        Mount(kind=MountKind.READ_ONLY, dest=inside, source=os.path.realpath(host)) for host, inside in account_files
    ]
    parents = {str(parent) for mount in mounts for parent in PurePosixPath(mount.dest).parents} - {"/"}
    latest = {parent: Mount(kind=MountKind.FOLDER, dest=parent) for parent in parents}
    latest |= {mount.dest: mount for mount in mounts}  # a later mount at the same place stands for the earlier one
    return tuple(sorted(latest.values(), key=lambda mount: len(PurePosixPath(mount.dest).parts)))


def interpreter_prefixes() -> tuple[Path, ...]:
    """Folders that this very Python needs, at the paths it knows them by: its prefixes and every hop of its symlinks.

    Those inside system folders are named too: a view shows them anyway, unless they lie in a folder that it hides.

    A virtual environment's interpreter is a symlink (often to a symlink) into the installation it was made from.
    """
    found = [Path(prefix) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)]
    hop = Path(sys.executable)
    for _ in range(40):  # the kernel's own limit of symlinks in a path
        found.append(hop.parent.parent)
        if not hop.is_symlink():
            break
        hop = Path(os.path.normpath(hop.parent / os.readlink(hop)))
    found += [path.resolve() for path in found]
    kept: list[Path] = []
    for path in sorted(set(found), key=lambda path: len(path.parts)):
        if len(path.parts) > 1 and not (_is_below(path, kept) and not _in_system(path)):
            kept.append(path)
    return tuple(kept)


def _in_system(path: Path) -> bool:
    return _is_below(path, SYSTEM_DIRS)


def _is_below(path: Path | str, folders: Iterable[Path | str]) -> bool:
    """Whether `path` is one of the folders or lies in one."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def _covers(visible: Sequence[Mount], hidden: Sequence[str]) -> list[Mount]:
    outer = [path for path in hidden if not _is_below(path, set(hidden) - {path})]  # a cover shows nothing inside it
    covers = []
    for mount in visible:
        # A bind that lies in a hidden folder is shown on top of the cover, with covers of its own.
        for path in hidden if _is_below(mount.source, outer) else outer:
            inner = PurePosixPath(path)
            if inner != PurePosixPath(mount.source) and inner.is_relative_to(mount.source) and Path(path).is_dir():
                dest = PurePosixPath(mount.dest) / inner.relative_to(mount.source)
                covers.append(Mount(kind=MountKind.EMPTY, dest=str(dest)))
    return covers


def checked_dest(inside: str) -> str:
    """A bind's path inside, if it is one that may be bound; raises ValueError."""
    if not inside.startswith("/") or os.path.normpath(inside) != inside or inside in ("/", "/proc", "/dev"):
        raise ValueError(
            f"a bind's path inside the sandbox must be absolute, normalised and not a system root: {inside!r}"
        )
    return inside
