"""Drains over several proxy processes: all take part, and none forgets it, not even by a restart."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_core.engine.fake import FakeEngineServer
from gyre_core.errors import ProxyError
from gyre_core.proxy.drains import DrainReport
from gyre_core.proxy.pool import ProxyAddress, ProxyPool, Shards, merge_reports, split_engines, whole_engines
from gyre_core.proxy.settings import EngineEntry, ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor
from tests.support.proxies import ADMIN_SECRET, fake_engine

A, B, C = "http://a", "http://b", "http://c"


def make_shards(number: int, *engines: EngineEntry) -> Shards:
    shards = Shards(ProxyAddress(url=f"http://127.0.0.1:{port}", secret="s") for port in range(1, number + 1))
    shards.record_engines(split_engines(engines, 3, number))
    return shards


def known(shards: Shards) -> list[list[tuple[str, int]]]:
    updates = [shards.engines_of(index) for index in range(len(shards.addresses))]
    return [[(engine.url, engine.slots) for engine in update.engines] if update else [] for update in updates]


def test_drained_engine_is_in_no_process_list_and_the_others_keep_their_split() -> None:
    shards = make_shards(2, EngineEntry(url=A, slots=3), EngineEntry(url=B, slots=3))
    before = known(shards)
    assert before == [[(A, 2), (B, 1)], [(A, 1), (B, 2)]]
    assert shards.record_drain(A) == [], "nobody has to be told a new split"
    assert known(shards) == [[(B, 1)], [(B, 2)]]
    assert shards.record_drain(A) == [] and known(shards) == [[(B, 1)], [(B, 2)]]
    assert shards.record_drain(B) == [] and known(shards) == [[], []]


def test_process_that_a_drain_would_leave_without_a_slot_gets_its_part_of_the_others() -> None:
    shards = make_shards(2, *(EngineEntry(url=url, slots=1) for url in (A, B, C)))
    assert known(shards) == [[(A, 1), (C, 1)], [(B, 1)]]
    assert shards.record_drain(B) == [0, 1], "one would have had two slots and the other none"
    assert known(shards) == [[(A, 1)], [(C, 1)]]
    assert shards.record_drain(A) == [], "one slot for two: one of them waits"
    assert known(shards) == [[], [(C, 1)]]


def test_split_engines_are_whole_again() -> None:
    engines = [EngineEntry(url=A, slots=5, version=4, rank=2, api_key="key"), EngineEntry(url=B, slots=2)]
    assert whole_engines(split_engines(engines, 3, 3)) == engines


def test_reports_of_processes_are_one_report() -> None:
    rows = [
        DrainReport(moved=2, partial_tokens=30, left=0, given_up=1, seconds=0.5),
        DrainReport(moved=1, partial_tokens=4, left=1, given_up=0, seconds=2.0),
    ]
    assert merge_reports(rows) == DrainReport(moved=3, partial_tokens=34, left=1, given_up=1, seconds=2.0)
    assert merge_reports([]).moved == 0


async def test_drain_that_no_process_answers_is_an_error_and_is_not_forgotten() -> None:
    shards = make_shards(1, EngineEntry(url=A, slots=1))
    async with ProxyPool(shards) as pool:
        with pytest.raises(ProxyError, match="does not answer"):
            await pool.drain(A)
    assert known(shards) == [[]]


@pytest.mark.integration
async def test_killed_process_comes_back_without_the_drained_engine(model_path: Path, tmp_path: Path) -> None:
    first, second = fake_engine(seed=5), fake_engine(seed=5)
    first.hold(after=3)
    settings = [
        ProxySettings(admin_secret=f"{ADMIN_SECRET}-{index}", model_path=model_path, context_length=4096)
        for index in range(2)
    ]
    with (
        FakeEngineServer(first) as one,
        FakeEngineServer(second) as two,
        ProxySupervisor(settings, work=tmp_path / "work", logs=tmp_path / "logs") as supervisor,
    ):
        await asyncio.to_thread(supervisor.wait_ready)
        async with ProxyPool(supervisor.shards) as pool, httpx.AsyncClient(timeout=30) as client:
            entries = [EngineEntry(url=one.url, slots=4, rank=1), EngineEntry(url=two.url, slots=4)]
            await pool.set_engines(entries[:1], 0)
            sessions = [await pool.create_session(rollout_id=f"r{i}") for i in range(4)]
            assert supervisor.shards.open_sessions == [2, 2]
            calls = [asyncio.create_task(_call(client, session.base_url, f"{i}")) for i, session in enumerate(sessions)]
            await asyncio.to_thread(first.wait_running, 4, tokens=3)
            await pool.set_engines(entries, 0)
            report = await pool.drain(one.url)
            assert (report.moved, report.partial_tokens, report.left, report.given_up) == (4, 12, 0, 0)
            assert [reply["usage"]["output_tokens"] for reply in await asyncio.gather(*calls)] == [20] * 4
            assert await _engines(pool) == {one.url: (0, 0), two.url: (4, 4)}
            assert (await pool.status())["counters"]["calls_moved"] == 4

            os.kill(supervisor.pids[0], signal.SIGKILL)
            async with asyncio.timeout(60):
                while (await pool.status())["restarts"] < 1 or (await _engines(pool)).get(two.url, (0, 0))[0] != 4:
                    await asyncio.sleep(0.02)
            rows = (await pool.status())["processes"][0]["engines"]
            assert [(row["url"], row["slots"]) for row in rows] == [(two.url, 2)]
            assert (await pool.drain(one.url)).left == 0

            await pool.set_engines(entries, 1)
            assert [slots for slots, _ in (await _engines(pool)).values()] == [4, 4]


async def _call(client: httpx.AsyncClient, base_url: str, text: str) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
    return (await client.post(f"{base_url}/v1/messages", json=body)).json()


async def _engines(pool: ProxyPool) -> dict[str, tuple[int, int]]:
    return {row["url"]: (row["slots"], row["residents"]) for row in (await pool.status())["engines"]}
