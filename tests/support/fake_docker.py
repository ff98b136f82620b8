#!/usr/bin/env python3
"""A program that stands for docker and podman: it records its arguments and really runs the command.

A "container" is a process of a PID and mount namespace of its own (util-linux's `unshare`), with the machine's /usr as
its image and the binds that it was asked for; it outlives the client that started it, as a real one does. State lies in
$FAKE_DOCKER_STATE: `calls.jsonl`, and a file for each container. `FAKE_DOCKER_MODE`: `no-daemon`, `no-start` (run
fails as with a bad option) or `slow-rm`. Only the standard library: it is a script, not part of the package.
"""

import contextlib
import csv
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER_STATE"])
MODE = os.environ.get("FAKE_DOCKER_MODE", "")
FLAGS = ("--rm", "--interactive")

ROOT = r"""
set -e
root=$1; user=$2; shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs "$root"
for name in usr etc dev; do mkdir "$root/$name"; done
cp /etc/hostname /etc/nsswitch.conf /etc/profile "$root/etc" 2>/dev/null || true
touch "$root/etc/passwd" "$root/etc/group"
mount --rbind /usr "$root/usr"; mount --rbind /dev "$root/dev"
for name in bin sbin lib lib64; do [ -L "/$name" ] && ln -s "usr/$name" "$root/$name"; done
mkdir "$root/proc" "$root/tmp"; mount -t proc proc "$root/proc"; chmod 1777 "$root/tmp"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; touch "$root$2"; fi
  mount --bind "$1" "$root$2"
  [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
  shift 3
done
shift
exec chroot --userspec="$user" "$root" /usr/bin/env -C /app "$@"
"""


def main() -> int:
    arguments = sys.argv[1:]
    with open(STATE / "calls.jsonl", "a") as file:
        file.write(json.dumps(arguments) + "\n")
    if MODE == "no-daemon":
        sys.stderr.write("Cannot connect to the daemon. Is it running?\n")
        return 1
    if arguments[:2] == ["image", "inspect"]:
        if arguments[2] != "an/image:1":
            sys.stderr.write(f"No such image: {arguments[2]}\n")
            return 1
        return 0
    return {"run": run, "rm": remove, "ps": listed}[arguments[0]](arguments[1:])


def run(arguments: list[str]) -> int:
    if MODE == "no-start":
        sys.stderr.write("docker: Error response from daemon: invalid mount config\n")
        return 125
    options: dict[str, list[str]] = {}
    index = 0
    while arguments[index].startswith("--"):
        if arguments[index] in FLAGS:
            index += 1
            continue
        options.setdefault(arguments[index], []).append(arguments[index + 1])
        index += 2
    command = [*options["--entrypoint"], *arguments[index + 1 :]]
    mounts: list[str] = []
    for text in options["--mount"]:
        (fields,) = csv.reader([text])
        values = {field.partition("=")[0]: field.partition("=")[2] for field in fields}
        mounts += [values["source"], values["target"], "ro" if "readonly" in values else "rw"]
    env = [line for line in Path(options["--env-file"][0]).read_text().splitlines() if line]
    env += [f"{name}={os.environ[name]}" for name in options.get("--env", ())]
    name = options["--name"][0]
    root = STATE / f"root-{name}"
    root.mkdir()
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-c", ROOT, "sh", str(root)]
    argv += [options["--user"][0], *mounts, "--", "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *env, *command]
    started = subprocess.Popen(
        argv,
        start_new_session=True,  # the daemon's, not the client's
    )
    record = STATE / f"container-{name}"
    record.write_text(json.dumps({"pid": started.pid, "label": options["--label"][0]}))
    code = started.wait()
    record.unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def remove(arguments: list[str]) -> int:
    record = STATE / f"container-{arguments[-1]}"
    if not record.exists():
        sys.stderr.write(f"No such container: {arguments[-1]}\n")
        return 1
    pid = json.loads(record.read_text())["pid"]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    # Process 1 of the namespace first: unshare's own way of ending it does not outlive a change of user.
    for each in [*(children.read_text().split() if children.exists() else []), pid]:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(int(each))
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 10)  # gone, and everything in the namespace before it
    record.unlink(missing_ok=True)
    return 0


def listed(arguments: list[str]) -> int:
    wanted = arguments[arguments.index("--filter") + 1].partition("=")
    for record in STATE.glob("container-*"):
        name = record.name.removeprefix("container-")
        label, _, owner = json.loads(record.read_text())["label"].partition("=")
        if (wanted[0] == "name" and name == wanted[2]) or (wanted[0] == "label" and label == wanted[2]):
            sys.stdout.write(f"{name} {owner}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
