"""The namespaces back end's launcher: a program of its own, started by gyre_core.rollout.backends.namespaces_launch.

Enters: a marshalled spec on a file descriptor. Leaves: the same protocol as bubblewrap's `--json-status-fd` on
`status_fd` ({"child-pid": N}, then {"exit-code": N} once a command ran), plus the ready/go handshake on `sync_fd`. It
needs Linux >= 5.12 and the standard library, neither bubblewrap nor util-linux; what it imports is chosen for a quick
start (json and signal would double it).

Three processes: this launcher waits; its child is process 1 of the new PID namespace, builds the view and reaps; its
grandchild drops every privilege and becomes the command. Each dies when its parent dies, and process 1 takes the
whole namespace with it.
"""

import ctypes
import marshal
import os
import resource
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR = 442  # the same on every architecture
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
OLD_ROOT = "/.old-root"
PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")  # owned by the real root: writable without any capability

libc = ctypes.CDLL(None, use_errno=True)


class MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option, value):
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def mount(source, dest, kind, flags, data=None):
    raw = [None if text is None else os.fsencode(text) for text in (source, dest, kind, data)]
    check(libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]), f"mount {source or kind} at {dest}")


def add_attributes(dest, attributes):
    """Add mount attributes to `dest` and every mount below it."""
    wanted = MountAttr(attributes, 0, 0, 0)
    result = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(dest), AT_RECURSIVE, ctypes.byref(wanted), ctypes.sizeof(wanted)
    )
    check(result, f"mount_setattr {dest}")


def bind(source, dest, read_only, device=False):
    mount(source, dest, None, MS_BIND | (0 if device else MS_REC))
    add_attributes(dest, ATTR_NOSUID | (0 if device else ATTR_NODEV) | (ATTR_RDONLY if read_only else 0))


def tmpfs(dest, size_bytes, mode):
    mount(
        "tmpfs", dest, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode:o}" + (f",size={size_bytes}" if size_bytes else "")
    )


def enter_namespaces(spec):
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    outer_uid, outer_gid = os.getuid(), os.getgid()
    if spec["user_namespace"]:
        check(libc.unshare(CLONE_NEWUSER), "unshare (user namespace)")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{spec['uid']} {outer_uid} 1"),
            ("gid_map", f"{spec['gid']} {outer_gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(libc.unshare(flags), "unshare")
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # again: a change of credentials clears it


def make_dev(dev):
    tmpfs(dev, 0, 0o755)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        with open(f"{dev}/{name}", "w"):
            pass
        bind(f"{OLD_ROOT}/dev/{name}", f"{dev}/{name}", read_only=False, device=True)
    os.mkdir(f"{dev}/pts", 0o755)
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/shm", 0o755)


def make_proc(proc):
    mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in PROC_READ_ONLY:
        if os.path.exists(f"{proc}/{name}"):
            bind(f"{proc}/{name}", f"{proc}/{name}", read_only=True)


def make_view(spec):
    """Make an empty root, fill it from the old one, let go of the old one."""
    root = spec["root"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    tmpfs(root, 0, 0o755)
    os.mkdir(root + OLD_ROOT)
    check(
        libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], os.fsencode(root), os.fsencode(root + OLD_ROOT)), "pivot_root"
    )
    os.chdir("/")  # from here on every path is resolved inside; sources are real paths below OLD_ROOT
    made_read_only = ["/"]
    for kind, dest, source, size_bytes in spec["mounts"]:
        if kind == "symlink":
            os.symlink(source, dest)
        elif kind == "folder":
            os.makedirs(dest, mode=0o755, exist_ok=True)
        elif kind in ("ro", "rw"):
            make_mount_point(dest, is_dir=os.path.isdir(OLD_ROOT + source))
            bind(OLD_ROOT + source, dest, read_only=kind == "ro")
        else:
            make_mount_point(dest, is_dir=True)
            if kind == "proc":
                make_proc(dest)
            elif kind == "dev":
                make_dev(dest)
            else:
                tmpfs(dest, size_bytes, 0o1777 if kind == "tmpfs" else 0o755)
            if kind in ("dev", "empty"):
                made_read_only.append(dest)
    check(libc.umount2(os.fsencode(OLD_ROOT), MNT_DETACH), "umount of the old root")
    os.rmdir(OLD_ROOT)
    for dest in made_read_only:
        mount(None, dest, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_mount_point(dest, is_dir):
    if is_dir:
        os.makedirs(dest, mode=0o755, exist_ok=True)
    elif not os.path.exists(dest):
        with open(dest, "w"):
            pass


def become_command(spec):
    """In the grandchild: wait for the word to go, drop every privilege, run the command."""
    sync_fd = spec["sync_fd"]
    os.setsid()
    for number in (SIGPIPE, SIGXFSZ):  # Python ignores them, and exec hands that on
        libc.signal(number, 0)
    for name, limit in spec["rlimits"]:
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.chdir(spec["cwd"])
    os.write(sync_fd, b"ready\n")
    if os.read(sync_fd, 1) == b"":
        os._exit(125)  # whoever started us is gone
    os.close(sync_fd)
    if not spec["user_namespace"]:
        os.setgroups([])
        os.setresgid(spec["gid"], spec["gid"], spec["gid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # exec as an ordinary user then clears what capabilities are left
    try:
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        os.write(2, f"cannot run {spec['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def exit_code(status):
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def process_one(spec):
    """Process 1 of the namespace: its end is the end of everything in it."""
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    check(libc.sethostname(b"sandbox", 7), "sethostname")
    make_view(spec)
    command = os.fork()
    if command == 0:
        become_command(spec)
    prctl(PR_SET_DUMPABLE, 0)
    os.close(spec["sync_fd"])
    while True:
        pid, status = os.wait()
        if pid == command:
            code = exit_code(status)
            os.write(spec["status_fd"], b'{"exit-code": %d}\n' % code)
            os._exit(code)


def main():
    try:
        launch()
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(125)


def launch():
    with open(int(sys.argv[-1]), "rb") as file:
        spec = marshal.load(file)
    os.umask(0o022)
    os.set_inheritable(spec["status_fd"], False)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(spec["oom_score_adj"]))
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != spec["parent_pid"]:
        os._exit(125)
    enter_namespaces(spec)
    child = os.fork()
    if child == 0:
        try:
            process_one(spec)
        except BaseException as error:
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(125)
    os.close(spec["sync_fd"])
    os.write(spec["status_fd"], b'{"child-pid": %d}\n' % child)
    os._exit(exit_code(os.waitpid(child, 0)[1]))
