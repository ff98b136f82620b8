"""A real proxy process under a thousand hostile connections: it lives, serves, leaks nothing and stays small."""

import asyncio
import hashlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from gyre_core.engine.fake import FakeEngine, FakeEngineServer
from gyre_core.trajectory.arrow import trajectory_from_ipc, trajectory_to_ipc
from tests.support.hostile import Attack, Known, attacks, head, huge
from tests.support.proxies import ADMIN_HEADERS, ADMIN_SECRET, BASH, Harness, call_text
from tests.support.tokenizer import VOCAB_SIZE, decode, encode

NUM_ATTACKS = 1200
NUM_WORKERS = 8
NUM_SLOW = 40  # slow heads, and as many slow bodies
MAX_GROWTH_MB = 40  # of the process's memory over the small attacks; measured 4
MAX_PEAK_MB = 200  # and over 12 and 50 MB bodies, again and again: what one takes while it is parsed; measured 56
SECRET = "the victim's own words"


def answer(ids: list[int]) -> list[int]:
    """What the policy says: depends on the prompt only."""
    mark = hashlib.blake2b(str(ids).encode(), digest_size=6).hexdigest()
    return encode(f"<think>\nhm {mark}\n</think>\n\nsay {mark}\n{call_text('bash', json.dumps({'c': mark}))}<|im_end|>")


@dataclass
class Process:
    """A proxy process."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    log: Path
    host: str
    port: int

    def rss_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    async def open(self, rollout_id: str, **settings: Any) -> Harness:
        body = {"rollout_id": rollout_id, "harness": {"name": "quickstart-agent", "version": "1"}, **settings}
        response = await self.client.post("/admin/sessions", json=body, headers=ADMIN_HEADERS)
        return Harness(self.client, **response.json())

    async def status(self) -> Any:
        return (await self.client.get("/admin/status", headers=ADMIN_HEADERS)).json()


@asynccontextmanager
async def proxy_process(model_path: Path, folder: Path, engine_url: str) -> AsyncIterator[Process]:
    """Start `python -m gyre_core.proxy` with one engine; ended at the end."""
    folder.mkdir()
    settings = folder / "settings.json"
    fields = {
        "admin_secret": ADMIN_SECRET,
        "model_path": str(model_path),
        "context_length": 8192,
        "journal_dir": str(folder / "journal"),
        "journal_sync": "session",
        "body_timeout_s": 2,
    }
    settings.write_text(json.dumps(fields))
    log = folder / "log"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gyre_core.proxy", "--settings", str(settings), stdout=-1, stderr=file
        )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        target = urlsplit(url)
        assert target.hostname is not None and target.port is not None
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            engines = {"engines": [{"url": engine_url, "slots": 16}], "policy_version": 0}
            (await client.put("/admin/engines", json=engines, headers=ADMIN_HEADERS)).raise_for_status()
            yield Process(process, client, log, target.hostname, target.port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def victim_run(proxy: Process, ids: list[str], turns: int = 12) -> tuple[bytes, str]:
    """A rollout of a faithful harness; returns its trajectory without times and cache hits, and its session's id."""
    harness = await proxy.open("victim")
    history: list[Any] = [{"role": "user", "content": f"{SECRET}: begin"}]
    for turn in range(turns):
        reply = await harness.messages(history, tools=[BASH], system=SECRET, thinking={"type": "enabled"})
        assert reply.status_code == 200, reply.text
        content = reply.json()["content"]
        ids += [block.get("id") or block["signature"] for block in content if block["type"] != "text"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": f"{SECRET} {turn}"}
        history += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await asyncio.sleep(0.1)  # the attackers' turn
    sealed = await proxy.client.post(f"/admin/sessions/{harness.session_id}/seal", headers=ADMIN_HEADERS)
    trajectory = trajectory_from_ipc(sealed.content)
    calls = tuple(replace(call, started_s=0, finished_s=0, cached_tokens=0) for call in trajectory.calls)
    return trajectory_to_ipc(replace(trajectory, calls=calls)), harness.session_id


async def strike(proxy: Process, attack: Attack) -> tuple[int, bytes]:
    """Make one connection; returns the status of its first answer (0 for none) and all that was read."""
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    data = b""
    try:
        async with asyncio.timeout(20):
            writer.write(attack.data)
            await writer.drain()
            for _ in range(0, attack.filler, 2**16):
                writer.write(b"x" * 2**16)
                await writer.drain()
            if attack.after == "read":
                data = await reader.read(1 if attack.filler else -1)
                data += await reader.read(2**20)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    first = data.split(b"\r\n", 1)[0].split()
    return int(first[1]) if len(first) > 1 else 0, data


def check(attack: Attack, status: int, data: bytes) -> None:
    if attack.statuses:
        assert status in attack.statuses, (attack.name, status, attack.data[:300], data[:500])
    deliberate = status in (503, 529) and b"retry-after" in data
    assert status < 500 or deliberate, (attack.name, status, attack.data[:2000], data[:500])
    assert SECRET.encode() not in data


async def slow_connections(proxy: Process, key: str) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that send half a head, and others that send half a body."""
    opened = []
    for number in range(2 * NUM_SLOW):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        whole = head("/v1/messages", key, 1000)
        writer.write(whole[: len(whole) // 2] if number < NUM_SLOW else whole + b'{"messages')
        opened.append((reader, writer))
    return opened


@pytest.mark.integration
async def test_proxy_under_a_thousand_hostile_connections_lives_leaks_nothing_and_stays_small(
    model_path: Path, tmp_path: Path
) -> None:
    engine = FakeEngine(answer, vocab_size=VOCAB_SIZE)
    with FakeEngineServer(engine) as server:
        async with proxy_process(model_path, tmp_path / "quiet", server.url) as proxy:
            quiet, _ = await victim_run(proxy, [])
        async with proxy_process(model_path, tmp_path / "loud", server.url) as proxy:
            attacker, sealed = await proxy.open("attacker", limits={"max_calls": 10**6}), await proxy.open("sealed")
            await sealed.seal()
            await attacker.messages([{"role": "user", "content": "warm"}])
            decoy = await proxy.open("decoy")  # a session whose id the attacker knows, and nothing else
            known = Known(
                own_key=attacker.api_key, sealed_key=sealed.api_key, other_session=decoy.session_id, victim_ids=[]
            )
            queue = attacks(20, known, NUM_ATTACKS)
            seen: Counter[str] = Counter()
            slow = await slow_connections(proxy, attacker.api_key)

            async def work() -> None:
                for attack in queue:
                    check(attack, *await strike(proxy, attack))
                    seen[attack.name] += 1

            before = proxy.rss_mb()
            async with asyncio.TaskGroup() as group:
                victim = group.create_task(victim_run(proxy, known.victim_ids))
                for _ in range(NUM_WORKERS):
                    group.create_task(work())
            growth = [proxy.rss_mb() - before]
            for _ in range(3):
                for attack in huge(known):
                    check(attack, *await strike(proxy, attack))
                growth.append(proxy.rss_mb() - before)
            loud, victim_session = victim.result()
            for reader, writer in slow[NUM_SLOW:]:
                assert (await reader.readline()).startswith(b"HTTP/1.1 400")
                writer.close()
            for _, writer in slow[:NUM_SLOW]:
                writer.close()
            status = await proxy.status()
            assert proxy.process.returncode is None
            assert (await proxy.open("after")).session_id
            assert not (await decoy.seal()).calls
            counters = status["counters"]
            print(f"{sum(seen.values())} attacks; memory grew by {[round(mb) for mb in growth]} MiB; {dict(seen)}")
        assert loud == quiet
        assert sum(seen.values()) == NUM_ATTACKS and len(seen) >= 12
        assert "refused_internal" not in counters
        assert growth[0] < MAX_GROWTH_MB
        assert max(growth) < MAX_PEAK_MB
        log = proxy.log.read_text()
        assert "Traceback" not in log and "Exception" not in log, log[-3000:]
        foreign = [call for call in engine.calls if not call.rid.startswith(victim_session)]
        own = [call for call in engine.calls if call.rid.startswith(victim_session)]
        assert len(own) == 12 and len(foreign) > 200
        words = {SECRET} | {decode(call.output_ids).partition("say ")[2][:12] for call in own}
        quiet_calls = {tuple(call.input_ids) for call in own}
        for call in foreign:
            text = decode(call.input_ids)
            assert tuple(call.input_ids) in quiet_calls or not any(word in text for word in words), text
