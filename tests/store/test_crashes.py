"""A writer killed with SIGKILL at each point of a commit: readers see whole commits, a second try gives one commit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_core.store.store import Store
from gyre_core.store.verify import verify
from tests.support.rollouts import assert_same_trajectory, finished, two_turns

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from gyre_core.store import local
from gyre_core.store.records import StepRecord
from gyre_core.store.store import Store
from tests.support.rollouts import branch_of, finished, two_turns

url, point = sys.argv[1:3]
store = Store.open(url)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
real_link, real_put = os.link, store.storage.put_new

def link(source, target):
    if point == "draft written, not linked" and "/manifest/" in str(target): die()
    if point == "first object's draft": die()
    real_link(source, target)
    if point == "one object of six" : die()
    if point == "manifest linked" and "/manifest/" in str(target): die()

def put_new(key, data):
    if point == "between data and manifest" and key.startswith("manifest/"): die()
    real_put(key, data)

os.link, store.storage.put_new = link, put_new
branches = [branch_of(two_turns("r1"), 3)]
record = StepRecord(step=1, version_before=1, version_after=2)
commit = store.commit_step(record, rollouts=[finished("r1")], branches=branches, token="step-1")
print(commit.seq, commit.repeated)
"""


def write(url: str, point: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", WRITER, url, point, str(ROOT)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("first object's draft", False),
        ("one object of six", False),
        ("between data and manifest", False),
        ("draft written, not linked", False),
        ("manifest linked", True),
    ],
)
def test_commit_killed_at_a_point_is_whole_or_absent_and_done_once(tmp_path: Path, point: str, committed: bool) -> None:
    url = str(tmp_path / "store")
    Store.open(url).commit("note", {}, {}, "before")

    killed = write(url, point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    reader = Store.open(url, read_only=True)
    assert [commit.token for commit in reader.commits()] == (["before", "step-1"] if committed else ["before"])
    assert verify(reader).ok

    again = write(url, "none")
    assert again.stdout.split() == ["1", str(committed)], again.stderr
    assert [commit.token for commit in reader.commits()] == ["before", "step-1"]
    assert_same_trajectory(reader.read_trajectory("r1"), two_turns("r1"))
    report = verify(reader)
    assert report.ok and report.unreferenced == () and report.num_rollouts == 1
    assert finished("r1").grade == reader.read_rollout("r1").grade
