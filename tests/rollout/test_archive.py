"""Workspaces as bytes and back: nothing followed, nothing lost, bounded; and which of them a run keeps."""

import io
import os
import socket
import stat
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gyre_core.config.models import GradingConfig
from gyre_core.rollout.archive import ArchiveError, archive_workspace, restore_workspace
from gyre_core.rollout.keep import KeptWorkspace, WorkspaceKeeper
from gyre_core.store import Store
from gyre_core.types import Grade, Outcome, RolloutSpec
from tests.support.rollouts import finished

GRADED = Grade(outcome=Outcome.FINISHED, reward=0.5, reason="made up")
EXCLUDED = Grade(outcome=Outcome.VERIFIER_FAILED, reward=None, reason="made up")


def make_workspace(folder: Path) -> Path:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "run.sh").write_text("echo hi\n")
    (folder / "a" / "b" / "run.sh").chmod(0o755)
    (folder / "a" / "shut").write_text("secret")
    (folder / "a" / "shut").chmod(0)
    (folder / os.fsdecode(b"not utf-8 \xff\n")).write_bytes(b"\0" * 5000)
    (folder / ("long" * 50)).mkdir()
    os.symlink("/etc/passwd", folder / "out")
    os.symlink("nowhere", folder / "a" / "dangling")
    os.utime(folder / "a" / "b" / "run.sh", ns=(1, 1_700_000_000_123_456_789))
    os.utime(folder / "a", ns=(1, 1_600_000_000_000_000_001))
    return folder


def described(folder: Path) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        held = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (stat.filemode(status.st_mode), status.st_mtime_ns, held)
    return found


def test_archive_restored_workspace_equals_the_original_and_gives_the_same_bytes(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "one")
    archive = archive_workspace(workspace, max_bytes=10_000)
    restore_workspace(archive.data, tmp_path / "two")
    assert described(tmp_path / "two") == described(workspace)
    assert archive_workspace(tmp_path / "two", max_bytes=10_000).data == archive.data
    assert (archive.content_bytes, archive.num_entries, archive.num_left_out) == (5014, 8, 0)


def test_archive_pipes_and_sockets_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    os.mkfifo(workspace / "pipe")
    monkeypatch.chdir(workspace)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    archive = archive_workspace(workspace, max_bytes=10)
    restore_workspace(archive.data, tmp_path / "back")
    assert archive.num_left_out == 2 and list((tmp_path / "back").iterdir()) == []


def test_archive_too_large_or_sparse_files_are_refused_unread(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    with (workspace / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ArchiveError, match="more than 1000 bytes"):
        archive_workspace(workspace, max_bytes=1000)


def test_archive_workspace_that_is_gone_or_a_symlink_is_refused(tmp_path: Path) -> None:
    os.symlink("/etc", tmp_path / "link")
    for name in ("link", "nothing"):
        with pytest.raises(ArchiveError, match="there is no workspace"):
            archive_workspace(tmp_path / name, max_bytes=1000)


def test_archive_folders_deeper_than_a_path_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    for _ in range(30):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    with pytest.raises(ArchiveError, match="cannot be read: File name too long"):
        archive_workspace(workspace, max_bytes=1000)


def tar_of(*members: tarfile.TarInfo) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(sink.getvalue())
    return packed.getvalue().to_pybytes()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    "members",
    [
        [entry("../out")],
        [entry("/out")],
        [entry("d", tarfile.DIRTYPE), entry("d/../../out")],
        [entry("link", tarfile.SYMTYPE, ".."), entry("link/out")],
        [entry("null", tarfile.CHRTYPE)],
        [entry("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [entry("twice"), entry("twice")],
        [entry("missing/file")],
    ],
)
def test_restore_foreign_archive_writes_nothing_outside(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(ArchiveError):
        restore_workspace(tar_of(*members), tmp_path / "home" / "w")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["w"]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x28\xb5\x2f\xfd" + b"\0" * 40])
def test_restore_damaged_bytes_are_an_archive_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArchiveError):
        restore_workspace(data, tmp_path / "w")


def spec(member: int = 0, step: int = 0) -> RolloutSpec:
    return finished(f"r{member}", step=step).spec


def keep(keeper: WorkspaceKeeper, workspace: Path, grade: Grade = GRADED, step: int = 0) -> KeptWorkspace:
    return keeper.take(spec(step=step), workspace)(grade)


@pytest.mark.parametrize(
    ("policy", "grade", "step", "kept"),
    [
        ("none", GRADED, 0, False),
        ("graded", GRADED, 0, True),
        ("graded", EXCLUDED, 0, False),
        ("all", EXCLUDED, 0, True),
        ("all", GRADED, -1, False),  # held-out
    ],
)
def test_keeper_policy_decides_by_grade_and_step(
    tmp_path: Path, policy: Any, grade: Grade, step: int, kept: bool
) -> None:
    store = Store.open(str(tmp_path / "store"))
    keeper = WorkspaceKeeper(store, GradingConfig(keep_workspaces=policy))
    result = keep(keeper, make_workspace(tmp_path / "w"), grade, step)
    assert (result.ref != "", result.dropped) == (kept, "")


def test_keeper_workspace_is_kept_as_it_was_before_the_verifier(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    workspace = make_workspace(tmp_path / "w")
    settle = WorkspaceKeeper(store, GradingConfig(keep_workspaces="graded")).take(spec(), workspace)
    before = described(workspace)
    (workspace / "verifier-was-here").touch()
    restore_workspace(store.get_blob(settle(GRADED).ref), tmp_path / "back")
    assert described(tmp_path / "back") == before


def test_keeper_quota_counts_equal_archives_once_and_earlier_processes_too(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "noise").write_bytes(os.urandom(3000))
    grading = GradingConfig(keep_workspaces="graded", keep_quota_bytes=5000)
    keeper = WorkspaceKeeper(store, grading)
    ref = keep(keeper, workspace).ref
    assert keep(keeper, workspace).ref == ref, "the same bytes take no more room"
    store.commit_rollouts("group", [finished("r0", workspace_ref=ref)], [], {"step": 0}, token="g")
    (workspace / "noise").write_bytes(os.urandom(3000))
    for refusing in (keeper, WorkspaceKeeper(Store.open(str(tmp_path / "store")), grading)):
        result = keep(refusing, workspace)
        assert result.ref == "" and "grading.keep_quota_bytes" in result.dropped
    tight = WorkspaceKeeper(store, grading.model_copy(update={"keep_workspace_bytes": 100}))
    assert keep(tight, workspace).dropped == "not archived: its files hold more than 100 bytes"
