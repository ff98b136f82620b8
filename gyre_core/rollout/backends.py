"""Two ways to start one command in a sandbox of the same view: bubblewrap, and our own launcher on plain namespaces.

Enters: a LaunchSpec (mounts, identity, limits, command). Leaves: a Launch, the command line of the launcher and the
bytes it reads from a file descriptor, so that neither the environment nor the mounts show in the host's process list.
Both launchers speak one protocol: `{"child-pid": N}` (process 1 of the new PID namespace) and, once a command ran,
`{"exit-code": N}` on the status descriptor; `ready` on the sync socket before the command starts, which then waits
for one byte. Each link of the chain dies with its parent (PR_SET_PDEATHSIG, and the group of reaper.py), and the
handshake closes the gap before that is armed: a command whose starter died meanwhile reads end-of-file and ends.
"""

import marshal
import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre_core.rollout.view import USER_NAME, WORKSPACE_DIR, Mount, MountKind

# systemd's range for dynamic users: nothing else on a machine owns these ids. Process limits count per user id, so
# each sandbox of a privileged launcher gets one of its own.
SANDBOX_UIDS = range(61184, 65520)
NAMESPACE_UID = 1000  # inside a user namespace; stands for the launching user outside
OOM_SCORE_ADJ = 500  # when memory runs out, the kernel ends a sandbox before an engine or a trainer

_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21

# Limits, then ready/go, then the command. -p: neither BASH_ENV nor exported functions of the environment are read.
_BASH_PROLOGUE = f"""
sync=$1; ulimit -u "$2" -n "$3" -f "$4" -c 0 || exit 125; shift 4
echo {OOM_SCORE_ADJ} > /proc/self/oom_score_adj
echo ready >&"$sync"
read -r -N 1 -u "$sync" _ || exit 125
exec {{sync}}>&-
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one sandbox may use. Bytes in total of the workspace and the home are the disk's, not bounded here.

    Example: SandboxLimits(processes=64)
    """

    processes: int = 1024  # processes and threads together (RLIMIT_NPROC of a user id of its own)
    open_files: int = 4096  # of one process
    file_bytes: int = 4 * 2**30  # one file (RLIMIT_FSIZE)
    tmp_bytes: int = 2**30  # /tmp and /dev/shm, each; they are memory
    log_bytes: int = 2**20  # kept of stdout and stderr: the first half and the last half


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who the command is inside. Example: Identity(uid=61184, gid=61184, user_namespace=False)"""

    uid: int
    gid: int
    user_namespace: bool  # the ids are mapped to the launching user's


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One command to start.

    Example: LaunchSpec(argv=("true",), env={}, mounts=plan_view(...), identity=identity, limits=SandboxLimits(), ...)
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    mounts: tuple[Mount, ...]
    identity: Identity
    limits: SandboxLimits
    root: Path  # an empty folder of the host that the namespaces back end may mount on
    status_fd: int
    sync_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher's command line, with `{fd}` standing for the descriptor it reads `payload` from.

    Example: Launch(argv=("/usr/bin/bwrap", "--args", "{fd}", "true"), payload=b"--unshare-pid")
    """

    argv: tuple[str, ...]
    payload: bytes


def may_mount() -> bool:
    """Whether this process is a root that may mount and change users: then no user namespace is needed."""
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    return all(effective >> bit & 1 for bit in (_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN))


def bubblewrap_launch(spec: LaunchSpec) -> Launch:
    """The command line for bubblewrap >= 0.8. Raises FileNotFoundError when it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed; `apt-get install bubblewrap` installs it")
    identity, limits = spec.identity, spec.limits
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    options += ["--die-with-parent", "--new-session", "--json-status-fd", str(spec.status_fd), "--cap-drop", "ALL"]
    if identity.user_namespace:
        options += ["--unshare-user", "--uid", str(identity.uid), "--gid", str(identity.gid)]
        drop = []
    else:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        ids = (f"--reuid={identity.uid}", f"--regid={identity.gid}")
        drop = ["/usr/bin/setpriv", *ids, "--clear-groups", "--inh-caps=-all", "--"]
    made_read_only = ["/"]
    for mount in spec.mounts:
        options += _bubblewrap_mount(mount)
        if mount.kind in (MountKind.DEV, MountKind.EMPTY):
            made_read_only.append(mount.dest)
    for dest in made_read_only:
        options += ["--remount-ro", dest]
    options += ["--chdir", WORKSPACE_DIR, "--clearenv"]
    for name, value in spec.env.items():
        options += ["--setenv", name, value]
    numbers = {name: limit for name, limit in _rlimits(limits)}
    prologue = ["/bin/bash", "-p", "-c", _BASH_PROLOGUE, "bash", str(spec.sync_fd), str(numbers["RLIMIT_NPROC"])]
    prologue += [str(numbers["RLIMIT_NOFILE"]), str(numbers["RLIMIT_FSIZE"] // 1024)]
    argv = (program, "--args", "{fd}", "--", *prologue, *drop, *spec.argv)
    return Launch(argv=argv, payload=b"\0".join(os.fsencode(option) for option in options))


def namespaces_launch(spec: LaunchSpec) -> Launch:
    """The command line for our own launcher, which needs neither bubblewrap nor util-linux."""
    payload = {
        "argv": list(spec.argv),
        "env": spec.env,
        "mounts": [(mount.kind.value, mount.dest, mount.source, mount.size_bytes) for mount in spec.mounts],
        "uid": spec.identity.uid,
        "gid": spec.identity.gid,
        "user_namespace": spec.identity.user_namespace,
        "rlimits": _rlimits(spec.limits),
        "oom_score_adj": OOM_SCORE_ADJ,
        "cwd": WORKSPACE_DIR,
        "root": str(spec.root),
        "status_fd": spec.status_fd,
        "sync_fd": spec.sync_fd,
        "parent_pid": os.getpid(),
    }
    folder = str(Path(__file__).parent)
    program = "import sys; sys.path.append(sys.argv[1]); import _nsinit; _nsinit.main()"  # imported: compiled once
    return Launch(argv=(sys.executable, "-I", "-S", "-c", program, folder, "{fd}"), payload=marshal.dumps(payload))


def account_texts(identity: Identity, home: str) -> tuple[str, str]:
    """/etc/passwd and /etc/group of the sandbox: programs such as node refuse to run as a user without a name."""
    passwd = [
        "root:x:0:0:root:/root:/usr/sbin/nologin",
        f"{USER_NAME}:x:{identity.uid}:{identity.gid}:{USER_NAME}:{home}:/bin/bash",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    ]
    group = ["root:x:0:", f"{USER_NAME}:x:{identity.gid}:", "nogroup:x:65534:"]
    return "\n".join(passwd) + "\n", "\n".join(group) + "\n"


def _rlimits(limits: SandboxLimits) -> list[tuple[str, int]]:
    wanted = [
        ("RLIMIT_NPROC", limits.processes),
        ("RLIMIT_NOFILE", limits.open_files),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_CORE", 0),
    ]
    bounded = []
    for name, limit in wanted:
        hard = resource.getrlimit(getattr(resource, name))[1]
        bounded.append((name, limit if hard == resource.RLIM_INFINITY else min(limit, hard)))
    return bounded


def _bubblewrap_mount(mount: Mount) -> list[str]:
    match mount.kind:
        case MountKind.READ_ONLY:
            return ["--ro-bind", mount.source, mount.dest]
        case MountKind.READ_WRITE:
            return ["--bind", mount.source, mount.dest]
        case MountKind.SYMLINK:
            return ["--symlink", mount.source, mount.dest]
        case MountKind.FOLDER:
            return ["--dir", mount.dest]
        case MountKind.TMPFS:
            return ["--perms", "1777", "--size", str(mount.size_bytes), "--tmpfs", mount.dest]
        case MountKind.EMPTY:
            return ["--perms", "0755", "--tmpfs", mount.dest]
        case MountKind.PROC:
            return ["--proc", mount.dest]
        case MountKind.DEV:
            return ["--dev", mount.dest]
