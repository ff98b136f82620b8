"""A process group whose members are killed when this process ends, however it ends.

Every launcher of a sandbox joins the group, and so does process 1 of its namespace. One small process leads the
group: it reads a pipe whose only writer is this process, and at end-of-file (a `kill -9` included) sends SIGKILL to
the group. Beside PR_SET_PDEATHSIG, which the launchers arm themselves, this closes a gap that bubblewrap 0.8 leaves:
its child waits for a word of its parent before it is armed, and would wait for ever when the parent is killed in
between.
"""

import contextlib
import os
import subprocess
import threading

_lock = threading.Lock()
_leader: subprocess.Popen[bytes] | None = None


def launch_group() -> int:
    """The id of the group, in this process's session; its leader is started when there is none."""
    global _leader
    with _lock:
        if _leader is None or _leader.poll() is not None:
            _leader = subprocess.Popen(
                ["/bin/bash", "-p", "-c", "read -r; kill -KILL 0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                process_group=0,
            )
        return _leader.pid


def _forget_leader() -> None:
    """In a forked child: the leader is the parent's, and so is the pipe."""
    global _leader, _lock
    _lock = threading.Lock()
    if _leader is not None and _leader.stdin is not None:
        with contextlib.suppress(OSError):
            _leader.stdin.close()
        _leader.returncode = 0  # not this process's child: nothing to wait for
    _leader = None


os.register_at_fork(after_in_child=_forget_leader)
