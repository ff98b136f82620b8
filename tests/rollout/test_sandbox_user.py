"""Sandboxes of an ordinary user: the same bounds from a user namespace."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from gyre_core.rollout.backends import SANDBOX_UIDS, may_mount
from tests.support.sandboxes import BACKENDS

PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from gyre_core.rollout.sandbox import Sandbox, SandboxLimits, probe_backend

FORKS = '''
import os, time
forks = 0
try:
    while forks < 500:
        if os.fork() == 0:
            time.sleep(60)
        forks += 1
except OSError:
    print(forks)
'''
SCRIPT = '''
id -un; grep CapEff /proc/self/status | cut -f2
for path in / /etc /usr /dev /home /proc/sys/kernel; do touch $path/new 2>/dev/null && echo WROTE $path; done
for path in /app /tmp ~ /logs /dev/shm; do touch $path/new || echo REFUSED $path; done
ls /proc | grep -c '^[0-9]'
'''

async def main(backend, folder):
    reason = probe_backend(backend)
    if reason:
        return {"reason": reason}
    sandbox, workspace = Sandbox(backend, limits=SandboxLimits(processes=40)), Path(folder, "workspace")
    workspace.mkdir()
    view = await sandbox.run(["bash", "-c", SCRIPT], workspace=workspace, timeout_s=30)
    forks = await sandbox.run([sys.executable, "-I", "-S", "-c", FORKS], workspace=workspace, timeout_s=30)
    hang = await sandbox.run(["sleep", "100"], workspace=workspace, timeout_s=0.2)
    left = len(list(Path(folder).iterdir()))
    return {"view": view.log_tail, "forks": forks.log_tail, "hang": hang.timed_out, "left": left}

print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2]))))
"""


def ordinary_python() -> str:
    """An interpreter that another user can run and that understands this one's packages."""
    program = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if program is None or version not in subprocess.run([program, "--version"], capture_output=True, text=True).stdout:
        pytest.skip(f"no system Python {version} that another user could run")
    return program


@pytest.mark.skipif(not may_mount(), reason="as an ordinary user every other test of the sandbox covers this")
@pytest.mark.parametrize("backend", BACKENDS)
def test_sandbox_of_an_ordinary_user_holds_the_same_bounds(backend: str):
    uid = SANDBOX_UIDS[-1]
    packages = [str(Path(__file__).resolve().parents[2]), sysconfig.get_path("purelib")]
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, uid, uid)
        result = subprocess.run(
            [ordinary_python(), "-B", "-c", PROGRAM, backend, folder],
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(packages)},
            capture_output=True,
            text=True,
        )
        if "ModuleNotFoundError" in result.stderr or "PermissionError" in result.stderr:
            pytest.skip(f"another user cannot run Gyre from here: {result.stderr.strip().splitlines()[-1]}")
        assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    if "reason" in found:
        pytest.skip(found["reason"])
    name, capabilities, num_processes = found["view"].split()
    assert (name, capabilities) == ("agent", "0" * 16), (
        "nothing written where it must not be, nothing refused where it may"
    )
    assert int(num_processes) <= 5
    assert 30 <= int(found["forks"]) < 40
    assert found["hang"] and found["left"] == 1
