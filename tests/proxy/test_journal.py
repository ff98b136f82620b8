"""What was answered survives the process: frames, torn tails, full disks, restarts, a killed proxy."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_core.engine.fake import FakeEngineServer
from gyre_core.errors import ProxyError, SetupError
from gyre_core.proxy.journal import JournalFolder, read_records
from gyre_core.trajectory.arrow import trajectory_from_ipc, trajectory_to_ipc
from tests.support.proxies import (
    ADMIN_HEADERS,
    ADMIN_SECRET,
    BASH,
    Harness,
    assert_exact,
    call_text,
    fake_engine,
    running_proxy,
)

USER = [{"role": "user", "content": "u"}]
SESSION = "0123456789abcdef"
ENGINE_KEY = "the-key-of-the-engine"


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    journal = folder.create(SESSION, {"a": 1})
    journal.append({"kind": "call"}, b"\x00\x01")
    journal.close()
    ((session_id, again, records),) = folder.restore()
    assert session_id == SESSION
    assert records == [({"kind": "session", "a": 1}, b""), ({"kind": "call"}, b"\x00\x01")]
    again.append({"kind": "delivered"})
    again.close()
    ((_, last, records),) = folder.restore()
    assert [header["kind"] for header, _ in records] == ["session", "call", "delivered"]
    last.close()
    folder.close()


def test_torn_tail_is_cut_at_every_length_and_writing_goes_on(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    journal = folder.create(SESSION, {})
    path = tmp_path / f"{SESSION}.journal"
    whole = path.stat().st_size
    journal.append({"kind": "call", "text": "x" * 20}, b"\x05" * 10)
    journal.close()
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        ((_, torn, records),) = folder.restore()
        assert len(records) == 1 and path.stat().st_size == whole
        torn.append({"kind": "call"})
        torn.close()
        assert len(read_records(path.read_bytes())[0]) == 2
    folder.close()


def test_flipped_bits_end_the_journal_before_the_damage(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    journal = folder.create(SESSION, {})
    for number in range(3):
        journal.append({"kind": "call", "n": number})
    journal.close()
    data = bytearray((tmp_path / f"{SESSION}.journal").read_bytes())
    data[-3] ^= 0x40
    records, _ = read_records(bytes(data))
    assert [header.get("n") for header, _ in records] == [None, 0, 1]
    folder.close()


def test_full_disk_leaves_no_partial_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = JournalFolder(tmp_path)
    journal = folder.create(SESSION, {})
    real_write = os.write
    budget = [5]

    def write(handle: int, data: Any) -> int:
        if not budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real_write(handle, bytes(data)[: budget[0]])
        budget[0] -= size
        return size

    monkeypatch.setattr("gyre_core.proxy.journal.os.write", write)
    with pytest.raises(ProxyError, match="No space left"):
        journal.append({"kind": "call"})
    budget[0] = 10**6
    journal.append({"kind": "call", "n": 2})
    journal.close()
    records, _ = read_records((tmp_path / f"{SESSION}.journal").read_bytes())
    assert [header.get("n") for header, _ in records] == [None, 2]
    folder.close()


def test_folder_of_a_running_proxy_is_refused(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    with pytest.raises(SetupError, match="another proxy process"):
        JournalFolder(tmp_path)
    folder.close()
    JournalFolder(tmp_path).close()


async def test_call_that_cannot_be_recorded_is_not_answered(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy(model_path, fake_engine("a", "b"), journal_dir=tmp_path) as proxy:
        harness = await proxy.open()

        def write(handle: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("gyre_core.proxy.journal.os.write", write)
            reply = await harness.messages(USER)
            assert reply.status_code == 529 and "cannot be recorded" in reply.text
        assert (await harness.messages(USER)).status_code == 200
        trajectory = await harness.seal()
        assert [call.index for call in trajectory.calls] == [1]


async def test_restarted_proxy_goes_on_with_every_session(model_path: Path, tmp_path: Path) -> None:
    engine = fake_engine("<think>\nhm\n</think>\n\n" + call_text("bash", '{"command": "ls"}'), "b", "c")
    messages: list[Any] = list(USER)
    fields: dict[str, Any] = {"tools": [BASH], "thinking": {"type": "adaptive"}}
    async with running_proxy(model_path, engine, journal_dir=tmp_path, journal_sync="call") as proxy:
        harness = await proxy.open()
        first = (await harness.messages(messages, **fields)).json()
        idle = await proxy.open("idle")
        before = trajectory_to_ipc(proxy.proxy.sessions[harness.session_id][0]._recorder.snapshot())
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        restored = Harness(proxy.client, harness.session_id, harness.api_key)
        assert trajectory_to_ipc(proxy.proxy.sessions[harness.session_id][0]._recorder.snapshot()) == before
        use = first["content"][1]
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "x"}]},
        ]
        second = (await restored.messages(messages, **fields)).json()
        assert second["content"][0]["text"] == "b" and second["id"] == "msg_r1-c1"
        trajectory = await restored.seal()
        assert_exact(trajectory, engine)
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.counters == {"substitution_clean": 2}
        wrong = Harness(proxy.client, idle.session_id, harness.api_key)
        assert (await wrong.messages(USER)).status_code == 403  # the key's own session is sealed
    # A sealed session keeps its bytes, and an open one its key, over yet another restart.
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        seal = await proxy.client.post(f"/admin/sessions/{harness.session_id}/seal", headers=ADMIN_HEADERS)
        assert seal.content == trajectory_to_ipc(trajectory)
        assert (await Harness(proxy.client, idle.session_id, idle.api_key).messages(USER)).status_code == 200


async def test_reply_that_was_not_delivered_is_replayed_after_a_restart(model_path: Path, tmp_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        harness = await proxy.open()
        session = proxy.proxy.sessions[harness.session_id][0]
        session.delivered = lambda digest, reply: None  # the connection breaks before the last byte
        lost = (await harness.messages(USER)).json()
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        restored = Harness(proxy.client, harness.session_id, harness.api_key)
        assert (await restored.messages(USER)).json() == lost
        assert (await restored.messages(USER)).json()["content"][0]["text"] == "b"
        assert len((await restored.seal()).calls) == 2


async def test_damaged_journal_does_not_keep_the_proxy_from_starting(model_path: Path, tmp_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        good, bad, empty = await proxy.open("good"), await proxy.open("bad"), await proxy.open("empty")
    (tmp_path / f"{empty.session_id}.journal").write_bytes(b"")
    path = tmp_path / f"{bad.session_id}.journal"
    path.write_bytes(path.read_bytes()[:20])
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        assert (await Harness(proxy.client, good.session_id, good.api_key).messages(USER)).status_code == 200
        assert (await Harness(proxy.client, bad.session_id, bad.api_key).messages(USER)).status_code == 401


@pytest.mark.integration
def test_killed_proxy_process_comes_back_and_the_next_turn_continues_its_tree(model_path: Path, tmp_path: Path) -> None:
    engine = fake_engine("a", "b", "c")
    settings = tmp_path / "settings.json"
    fields = {
        "admin_secret": ADMIN_SECRET,
        "model_path": str(model_path),
        "context_length": 4096,
        "journal_dir": str(tmp_path / "journal"),
        "port": 0,
    }
    settings.write_text(json.dumps(fields))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "gyre_core.proxy", "--settings", str(settings)]
    with FakeEngineServer(engine, api_key=ENGINE_KEY) as server:
        engines = {"engines": [{"url": server.url, "slots": 4, "api_key": ENGINE_KEY}], "policy_version": 2}
        engine.set_version(2)
        session: dict[str, str] = {}
        history: list[Any] = list(USER)
        for turn in range(2):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("ab"), text=True)
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[-1]
                with httpx.Client(base_url=url, timeout=20) as client:
                    _wait_until_healthy(client)
                    client.put("/admin/engines", json=engines, headers=ADMIN_HEADERS).raise_for_status()
                    if turn == 0:
                        body = {"rollout_id": "r1", "harness": {"name": "quickstart-agent", "version": "1"}}
                        session = client.post("/admin/sessions", json=body, headers=ADMIN_HEADERS).json()
                    headers = {"x-api-key": session["api_key"]}
                    reply = client.post("/v1/messages", json={"messages": history, "max_tokens": 50}, headers=headers)
                    assert reply.status_code == 200, reply.text
                    history += [{"role": "assistant", "content": reply.json()["content"]}, *USER]
                    assert ENGINE_KEY not in client.get("/admin/status", headers=ADMIN_HEADERS).text
                    if turn == 1:
                        sealed = client.post(f"/admin/sessions/{session['session_id']}/seal", headers=ADMIN_HEADERS)
                        trajectory = trajectory_from_ipc(sealed.content)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
        assert_exact(trajectory, engine)
        assert [call.index for call in trajectory.calls] == [0, 1]
        assert len(trajectory.tree.leaves()) == 1
        assert trajectory.tree.nodes[1].spans[0].version == 2
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".journal" for path in written)
    assert not [path for path in written if ENGINE_KEY.encode() in path.read_bytes()]


def _wait_until_healthy(client: httpx.Client) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if client.get("/healthz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "the proxy did not become healthy"
        time.sleep(0.02)


def test_settings_file_that_cannot_be_used_ends_with_code_2(tmp_path: Path) -> None:
    from gyre_core.proxy.__main__ import main

    settings = tmp_path / "settings.json"
    settings.write_text("{}")
    assert main(["--settings", str(settings)]) == 2
    assert main(["--settings", str(tmp_path / "missing.json")]) == 2
