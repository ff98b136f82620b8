"""What a sandboxed process sees and may change, the same with either back end."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gyre_core.rollout import view
from gyre_core.rollout.backends import SANDBOX_UIDS, may_mount
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.types import HarnessResult
from tests.support.sandboxes import new_marker


async def bash(sandbox: Sandbox, script: str, workspace: Path, **options) -> HarnessResult:
    options.setdefault("timeout_s", 30)
    return await sandbox.run(["bash", "-c", script], workspace=workspace, **options)


async def test_view_host_files_are_invisible(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    other = tmp_path / "other" / "workspace"
    other.mkdir(parents=True)
    (other / "secret").write_text("host secret")
    project = Path(__file__).resolve().parents[2]
    hidden = [
        other / "secret",
        other,
        tmp_path,
        project / "pyproject.toml",
        project / "gyre_core",
        Path.home() / ".ssh",
    ]
    script = "\n".join(f"test -e '{path}' && echo 'VISIBLE {path}'" for path in hidden)
    result = await bash(sandbox, f"{script}\ncat '{other}/secret'; ls -A /root /home; echo done", workspace)
    assert result.exit_code == 0
    assert "VISIBLE" not in result.log_tail and "host secret" not in result.log_tail
    assert ".ssh" not in result.log_tail and ".bash_history" not in result.log_tail


async def test_view_host_processes_are_invisible(sandbox: Sandbox, workspace: Path):
    marker = new_marker()
    with subprocess.Popen(["sleep", "300", marker], executable=sys.executable, stdin=subprocess.DEVNULL) as process:
        process.kill()  # the interpreter would stumble over its arguments; a zombie still has its number
        script = f"ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()} 2>&1; cat /proc/{os.getpid()}/environ 2>&1"
        result = await bash(sandbox, script, workspace)
    lines = result.log_tail.splitlines()
    assert int(lines[0]) <= 5, "only process 1, the shell and its pipeline"
    assert "No such process" in lines[1] and "No such file" in lines[2]


async def test_view_host_environment_is_invisible(sandbox: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GYRE_TEST_SECRET", "host-secret")
    script = "env; cat /proc/1/environ 2>/dev/null | tr '\\0' '\\n'; echo end"
    result = await bash(sandbox, script, workspace, env={"MINE": "1"})
    assert "host-secret" not in result.log_tail
    names = {line.partition("=")[0] for line in result.log_tail.splitlines() if "=" in line}
    assert names == {"MINE", "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "PWD", "SHLVL", "_"}


async def test_view_writes_outside_the_four_places_fail(sandbox: Sandbox, workspace: Path):
    refused = ["/", "/etc", "/usr", "/usr/local", "/bin", "/lib", "/var", "/home", "/root", "/dev", "/proc", sys.prefix]
    allowed = ["/app", "/tmp", "$HOME", "/logs", "/dev/shm"]
    lines = [f"touch {path}/new 2>/dev/null && echo WROTE {path}" for path in refused]
    lines += [
        f"echo x 2>/dev/null > /proc/sys/{name} && echo WROTE {name}"
        for name in ("kernel/core_pattern", "vm/swappiness")
    ]
    lines += [f"touch {path}/new || echo REFUSED {path}" for path in allowed]
    result = await bash(
        sandbox, "\n".join([*lines, "mount -o remount,rw / 2>/dev/null && echo WROTE remount", "echo done"]), workspace
    )
    assert result.log_tail.splitlines()[-1] == "done"
    assert "WROTE" not in result.log_tail
    assert "REFUSED" not in result.log_tail
    assert (workspace / "new").exists()


async def test_view_user_has_a_name_and_no_privileges(sandbox: Sandbox, workspace: Path):
    result = await bash(
        sandbox, "id -un; grep -E 'CapPrm|CapEff|NoNewPrivs' /proc/self/status; stat -c %U /app ~", workspace
    )
    words = result.log_tail.split()
    assert words[0] == "agent"
    assert words[1:] == ["CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1", "agent", "agent"]
    if may_mount():
        assert workspace.stat().st_uid in SANDBOX_UIDS


async def test_view_home_and_logs_are_fresh_each_run(sandbox: Sandbox, workspace: Path):
    first = await bash(sandbox, "touch ~/a /logs/a /tmp/a /app/a; ls ~ /logs /tmp", workspace)
    second = await bash(sandbox, "ls ~ /logs /tmp /app | grep a$", workspace)
    assert first.log_tail.count("a\n") == 3
    assert second.log_tail.split() == ["a"], "only the workspace stays"
    assert [path.name for path in workspace.parent.iterdir()] == ["workspace"], "nothing else is left on the host"


async def test_view_symlink_out_of_the_workspace_shows_nothing(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    (workspace / "link").symlink_to(secret)
    (workspace / "up").symlink_to("../..")
    owner = secret.stat().st_uid
    result = await bash(sandbox, "cat link; ls -A up/ | tr '\\n' ' '; echo hacked > link; echo done", workspace)
    assert "host secret" not in result.log_tail and "mine" not in result.log_tail
    assert secret.read_text() == "host secret" and secret.stat().st_uid == owner


async def test_view_binds_are_as_named(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    for name in ("ro", "rw", "ro/deep"):
        (tmp_path / name).mkdir()
    (tmp_path / "ro/deep/file").write_text("content")
    (tmp_path / "single").write_text("one file")
    result = await bash(
        sandbox,
        "cat /in/ro/deep/file /in/single; touch /in/ro/x /in/ro/deep/x; touch /in/rw/new && echo wrote",
        workspace,
        read_only=[(tmp_path / "ro", "/in/ro"), (tmp_path / "single", "/in/single")],
        read_write=[(tmp_path / "rw", "/in/rw")],
    )
    assert result.log_tail.startswith("contentone file") and result.log_tail.endswith("wrote\n")
    assert result.log_tail.count("Read-only file system") == 2
    assert (tmp_path / "rw/new").exists()


async def test_view_hidden_folder_inside_a_bind_is_empty(sandbox: Sandbox, workspace: Path, tmp_path: Path):
    tools = tmp_path / "tools"
    for name in ("problems/p1", "agent", "problems/shown"):
        (tools / name).mkdir(parents=True)
    (tools / "problems/p1/solution").write_text("solution")
    (tools / "problems/shown/data").write_text("data")
    covered = Sandbox(sandbox.backend, hidden=[tools / "problems"])
    binds = [(tools, "/tools"), (tools / "problems/shown", "/tools/problems/shown")]
    script = "find /tools -mindepth 1 | sort; touch /tools/problems/x 2>/dev/null && echo WROTE"
    result = await bash(covered, script, workspace, read_only=binds)
    assert result.log_tail.split() == [
        "/tools/agent",
        "/tools/problems",
        "/tools/problems/shown",
        "/tools/problems/shown/data",
    ]


def test_view_interpreter_below_a_hidden_folder_of_the_system_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gyre in a checkout below /usr: the checkout is covered, the environment inside it is put on top."""
    usr = tmp_path / "usr"
    checkout, environment, other = usr / "src/gyre", usr / "src/gyre/.venv", usr / "local"
    for folder in (environment, other):
        folder.mkdir(parents=True)
    monkeypatch.setattr(view, "SYSTEM_DIRS", (str(usr),))
    mounts = view.plan_view(
        workspace=tmp_path / "w",
        home=tmp_path / "h",
        account_files=(),
        read_only=(),
        read_write=(),
        prefixes=(other, environment),
        hidden=[checkout],
        tmp_bytes=1,
    )
    kinds = [(mount.kind.value, mount.dest) for mount in mounts if mount.dest.startswith(f"{usr}")]
    assert kinds == [("ro", f"{usr}"), ("folder", f"{usr}/src"), ("empty", f"{checkout}"), ("ro", f"{environment}")]


@pytest.mark.parametrize("inside", ["relative", "/", "/proc", "/a/../etc", "/a/"])
async def test_view_bind_to_a_forbidden_place_raises(sandbox: Sandbox, workspace: Path, tmp_path: Path, inside: str):
    with pytest.raises(ValueError, match="inside"):
        await bash(sandbox, "true", workspace, read_only=[(tmp_path, inside)])


async def test_view_interpreter_of_gyre_works(sandbox: Sandbox, workspace: Path):
    result = await sandbox.run(
        [sys.executable, "-I", "-c", "import numpy; print(numpy.arange(3).sum())"], workspace=workspace, timeout_s=60
    )
    assert (result.exit_code, result.log_tail) == (0, "3\n")


async def test_view_loopback_of_the_host_is_reachable(sandbox: Sandbox, workspace: Path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"proxy says hello")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        script = f"exec 3<>/dev/tcp/127.0.0.1/{server.server_port}; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        result = await bash(sandbox, script, workspace)
        server.shutdown()
    assert result.log_tail.endswith("proxy says hello")


async def test_view_two_sandboxes_do_not_see_each_other(sandbox: Sandbox, tmp_path: Path):
    folders = [tmp_path / name / "workspace" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    script = "touch {/tmp,/dev/shm,~}/mine-$1; ls /proc | grep -c '^[0-9]'; ls /tmp /dev/shm ~ | grep mine; id -u"
    results = await asyncio.gather(
        *[sandbox.run(["bash", "-c", script, "x", f.parent.name], workspace=f, timeout_s=30) for f in folders]
    )
    for folder, result in zip(folders, results, strict=True):
        lines = result.log_tail.split()
        assert int(lines[0]) <= 5
        assert lines[1:4] == [f"mine-{folder.parent.name}"] * 3
    if may_mount():
        assert results[0].log_tail.split()[-1] != results[1].log_tail.split()[-1], "a user id each"
