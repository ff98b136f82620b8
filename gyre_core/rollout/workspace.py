"""A rollout's folders on the host: made from a problem, handed to a sandbox's user, removed.

Invariant: the host never follows a symlink that lies in a workspace, and no depth of folders an agent makes breaks it
(the tools of coreutils walk trees iteratively by file descriptor).
"""

import logging
import os
import shutil
import subprocess
from pathlib import Path

from gyre_core.errors import SandboxError

logger = logging.getLogger(__name__)


def prepare_workspace(workspace: Path, files: Path | None) -> None:
    """Make a new workspace with a copy of `files` (a folder), symlinks copied as symlinks.

    Raises SandboxError when it cannot be made, for example because it exists.
    """
    try:
        workspace.parent.mkdir(parents=True, exist_ok=True)
        if files is None:
            workspace.mkdir()
        else:
            shutil.copytree(files, workspace, symlinks=True)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"cannot prepare the workspace {workspace}: {error}") from error


def give_tree(path: Path, uid: int, gid: int) -> None:
    """Make `uid` and `gid` own a tree; does nothing when they own its top. Raises SandboxError."""
    status = path.lstat()
    if (status.st_uid, status.st_gid) == (uid, gid):
        return
    _coreutils(["chown", "-RhP", f"{uid}:{gid}", "--", str(path)])


def remove_plain(path: Path) -> bool:
    """Remove a file, or a folder of plain files; quick, without a process. False when there is more in it."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return True
        with os.scandir(path) as entries:
            names = [entry.path for entry in entries]
        if len(names) > 64:
            return False
        for name in names:
            os.unlink(name)
        path.rmdir()
    except OSError:
        return False
    return True


def remove_tree(path: Path) -> None:
    """Remove a tree, whatever is in it. What cannot be removed is logged and left."""
    if remove_plain(path):
        return
    try:
        _coreutils(["rm", "-rf", "--one-file-system", "--", str(path)])
    except SandboxError:
        try:  # folders without write permission stop anyone but root
            _coreutils(["chmod", "-R", "u+rwX", "--", str(path)])
            _coreutils(["rm", "-rf", "--one-file-system", "--", str(path)])
        except SandboxError as error:
            logger.warning("left behind: %s", error)


def _coreutils(argv: list[str]) -> None:
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    if result.returncode != 0:
        raise SandboxError(f"{argv[0]} failed on {argv[-1]}: {result.stderr.decode(errors='replace').strip()[-300:]}")
