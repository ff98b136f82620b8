"""A workspace as bytes, and back: what a rollout left, kept so that it can be graded again.

Enters: a folder that no process works on any more. Leaves: a zstd-compressed tar, and from it the folder again.
Invariants: the same tree gives the same bytes (names in order, no owners, times to the nanosecond); symlinks are kept
as symlinks and never followed, in either direction; pipes, sockets and devices are counted and left out; what is too
large, too deep or unreadable raises ArchiveError with the reason before much of it is read. Modification times are
kept because tools such as make decide by them what to build; setuid bits, hard links and extended attributes are not.
"""

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pyarrow as pa

from gyre_core.errors import GyreError

MAX_ENTRIES = 200_000  # files, folders and symlinks of one workspace
_CODEC = "zstd"
_MODE = 0o777
_NOT_ALLOWED = frozenset({"", ".", ".."})


class ArchiveError(GyreError, ValueError):
    """A workspace cannot be archived, or an archive not be restored; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkspaceArchive:
    """An archived workspace.

    Example: archive_workspace(folder, max_bytes=64 * 2**20).data
    """

    data: bytes
    content_bytes: int  # of its files
    num_entries: int
    num_left_out: int  # pipes, sockets, devices


def archive_workspace(workspace: Path, *, max_bytes: int) -> WorkspaceArchive:
    """Archive a folder whose files hold at most `max_bytes` together. Raises ArchiveError."""
    if workspace.is_symlink() or not workspace.is_dir():
        raise ArchiveError("there is no workspace")
    sink = pa.BufferOutputStream()
    content_bytes = num_entries = num_left_out = 0
    try:
        with (
            pa.CompressedOutputStream(sink, _CODEC) as packed,
            tarfile.open(fileobj=cast(Any, packed), mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path, name, status in _walk(workspace):
                member = _member(path, name, status)
                if member is None:
                    num_left_out += 1
                    continue
                num_entries += 1
                content_bytes += member.size
                if content_bytes > max_bytes:
                    raise ArchiveError(f"its files hold more than {max_bytes} bytes")
                if num_entries > MAX_ENTRIES:
                    raise ArchiveError(f"it has more than {MAX_ENTRIES} files and folders")
                tar.addfile(member, io.BytesIO(_read(path, status)) if member.isreg() else None)
    except OSError as error:
        raise ArchiveError(f"it cannot be read: {error.strerror or error}") from error
    return WorkspaceArchive(
        data=sink.getvalue().to_pybytes(),
        content_bytes=content_bytes,
        num_entries=num_entries,
        num_left_out=num_left_out,
    )


def restore_workspace(data: bytes, workspace: Path) -> None:
    """Make a new folder with what `archive_workspace` read. Raises ArchiveError for anything else than its bytes."""
    try:
        workspace.mkdir(parents=True)
        with (
            pa.CompressedInputStream(pa.BufferReader(data), _CODEC) as unpacked,
            tarfile.open(fileobj=cast(Any, unpacked), mode="r|") as tar,
        ):
            folders = {PurePosixPath("."): (workspace, _MODE, 0)}
            for member in tar:
                _restore(tar, member, folders)
        for path, mode, time_ns in reversed(folders.values()):  # a folder's time changes with what is made in it
            if path != workspace:
                path.chmod(mode)
                os.utime(path, ns=(time_ns, time_ns))
    except (OSError, tarfile.TarError, pa.ArrowException) as error:
        raise ArchiveError(f"the archive of the workspace cannot be restored in {workspace}: {error}") from error


def _walk(workspace: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """(path, name in the archive, lstat) of everything below, folders before what is in them, names in byte order."""
    waiting = [(str(workspace), "")]
    while waiting:
        folder, prefix = waiting.pop()
        below = []
        with os.scandir(folder) as entries:
            names = sorted((entry.name for entry in entries), key=os.fsencode)
        for name in names:
            path, inside = f"{folder}/{name}", f"{prefix}{name}"
            status = os.lstat(path)
            yield path, inside, status
            if stat.S_ISDIR(status.st_mode):
                below.append((path, f"{inside}/"))
        waiting += reversed(below)


def _member(path: str, name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """An entry without owner; None for what is neither file, folder nor symlink."""
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode) & _MODE
    member.pax_headers = {"mtime": _time_text(status.st_mtime_ns)}
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.readlink(path), _MODE
    else:
        return None
    return member


def _read(path: str, status: os.stat_result) -> bytes:
    """A file's bytes, exactly as many as its status said."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        data = file.read(status.st_size + 1)
    if len(data) != status.st_size:
        raise ArchiveError("a file in it changed while it was read")
    return data


def _restore(
    tar: tarfile.TarFile, member: tarfile.TarInfo, folders: dict[PurePosixPath, tuple[Path, int, int]]
) -> None:
    """Make one entry; its parent must be a folder that this restoration made, so nothing is written elsewhere."""
    name = PurePosixPath(member.name)
    parent = folders.get(name.parent)
    if parent is None or name.is_absolute() or not _NOT_ALLOWED.isdisjoint(member.name.split("/")):
        raise ArchiveError(f"the archive of a workspace holds the name {member.name[:200]!r}, which no workspace has")
    path, mode, time_ns = parent[0] / name.name, member.mode & _MODE, _time_ns(member)
    if member.isdir():
        path.mkdir(mode=0o700)
        folders[name] = (path, mode, time_ns)
    elif member.issym():
        os.symlink(member.linkname, path)
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    elif member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
            os.fchmod(descriptor, mode)
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    else:
        raise ArchiveError(f"the archive of a workspace holds {member.name[:200]!r}, no file, folder or symlink")


def _time_text(time_ns: int) -> str:
    seconds, nanoseconds = divmod(time_ns, 10**9)
    return f"{seconds}.{nanoseconds:09d}"


def _time_ns(member: tarfile.TarInfo) -> int:
    seconds, _, fraction = member.pax_headers.get("mtime", "0").partition(".")
    return int(seconds) * 10**9 + int(fraction.ljust(9, "0")[:9] or "0")
