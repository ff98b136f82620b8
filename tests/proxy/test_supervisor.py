"""Real proxy processes that are killed: sessions, calls in flight and engines come back, and a hopeless one is told."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from gyre_core.clock import ManualClock
from gyre_core.engine.fake import FakeEngineServer
from gyre_core.errors import ProxyError
from gyre_core.proxy.pool import ProxyPool
from gyre_core.proxy.settings import EngineEntry, HarnessName, ProxySettings
from gyre_core.proxy.supervisor import ProxySupervisor, RestartBudget, RestartLog
from tests.support.proxies import ADMIN_SECRET, assert_exact, fake_engine

ENGINE_KEY = "key-of-the-engine"


def process_settings(model_path: Path, folder: Path, number: int) -> list[ProxySettings]:
    return [
        ProxySettings(
            admin_secret=f"{ADMIN_SECRET}-{index}",
            model_path=model_path,
            context_length=4096,
            journal_dir=folder / "journal" / str(index),
        )
        for index in range(number)
    ]


async def until(ready: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await ready():
            await asyncio.sleep(0.02)


def test_restart_log_allows_the_budget_in_any_window_with_growing_pauses() -> None:
    clock = ManualClock()
    log = RestartLog(RestartBudget(restarts=3, window_s=100), clock)
    assert [log.next_pause_s() for _ in range(4)] == [0.0, 0.5, 1.0, None]
    clock.advance(99)
    assert log.next_pause_s() is None
    clock.advance(1)
    assert log.next_pause_s() == 0.0


@pytest.mark.integration
async def test_killed_proxy_under_a_live_call_comes_back_and_the_client_goes_on(
    model_path: Path, tmp_path: Path
) -> None:
    engine = fake_engine("a", "b", "c")
    engine.set_version(3)
    settings = process_settings(model_path, tmp_path, 2)
    with (
        FakeEngineServer(engine, api_key=ENGINE_KEY) as server,
        ProxySupervisor(settings, work=tmp_path / "work", logs=tmp_path / "logs") as supervisor,
    ):
        await asyncio.to_thread(supervisor.wait_ready)
        async with ProxyPool(supervisor.shards) as pool:
            await pool.set_engines([EngineEntry(url=server.url, slots=3, api_key=ENGINE_KEY)], 3)
            harness = HarnessName(name="quickstart-agent", version="1")
            sessions = [await pool.create_session(rollout_id=f"r{i}", harness=harness) for i in range(3)]
            assert supervisor.shards.open_sessions == [2, 1]
            victim = sessions[0]
            index = supervisor.shards.find(victim.session_id)
            assert index is not None
            spared = next(s for s in sessions if supervisor.shards.find(s.session_id) != index)
            before = supervisor.pids

            async with AsyncAnthropic(base_url=victim.base_url, api_key="any", timeout=60) as client:
                messages: list[Any] = [{"role": "user", "content": "u"}]
                first = await client.messages.create(model="m", max_tokens=50, messages=messages)
                messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "v"}]
                engine.hold()
                call = asyncio.create_task(client.messages.create(model="m", max_tokens=50, messages=messages))
                await engine.running(1)
                os.kill(before[index], signal.SIGKILL)
                # The official client's retry waits in the port's queue until the new process takes it. What was
                # sampled of "b" died with the call: it is sampled again.
                await until(lambda: restarted(pool, 1))
                engine.release()
                second = await call
                assert [block.text for block in (*first.content, *second.content)] == ["a", "c"]  # type: ignore[union-attr]

            async with AsyncAnthropic(base_url=spared.base_url, api_key="any", timeout=60) as client:
                other = await client.messages.create(model="m", max_tokens=50, messages=messages[:1])
                assert other.content
            status = await pool.status()
            assert [row["restarts"] for row in status["processes"]] == [int(i == index) for i in range(2)]
            assert status["sessions"] == 3 and status["policy_version"] == 3
            assert [engine["slots"] for engine in status["engines"]] == [3]
            after = supervisor.pids
            assert [old == new for old, new in zip(before, after, strict=True)] == [i != index for i in range(2)]

            trajectory = await pool.seal(victim.session_id)
            assert [call.index for call in trajectory.calls] == [0, 1]
            assert len(trajectory.tree.leaves()) == 1
            assert_exact(trajectory, engine)
            for session in sessions:
                await pool.delete(session.session_id)
            assert supervisor.shards.open_sessions == [0, 0]
            assert not list((tmp_path / "journal").rglob("*.journal"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "proxy-1.log" for path in written)
    secrets = (ADMIN_SECRET.encode(), ENGINE_KEY.encode())
    assert not [path for path in written if any(secret in path.read_bytes() for secret in secrets)]


async def restarted(pool: ProxyPool, times: int) -> bool:
    return sum(pool.shards.restarts) >= times and len((await pool.status())["engines"]) == 1


@pytest.mark.integration
async def test_proxy_that_dies_too_often_is_given_up_with_its_log(model_path: Path, tmp_path: Path) -> None:
    (settings,) = process_settings(model_path, tmp_path, 1)
    budget = RestartBudget(restarts=1)
    with ProxySupervisor([settings], work=tmp_path / "work", logs=tmp_path / "logs", budget=budget) as supervisor:
        await asyncio.to_thread(supervisor.wait_ready)
        async with ProxyPool(supervisor.shards) as pool:
            await pool.create_session(rollout_id="r1")
            os.kill(supervisor.pids[0], signal.SIGKILL)
            await until(lambda: back_with(pool, sessions=1))
            os.kill(supervisor.pids[0], signal.SIGKILL)
            with pytest.raises(ProxyError, match=r"proxy ended with exit code -9 once more .*proxy\.log ends with"):
                await until(lambda: back_with(pool, sessions=9))
            with pytest.raises(ProxyError, match="once more than it may be restarted"):
                supervisor.shards.check()
            async with httpx.AsyncClient() as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get(f"{supervisor.shards.addresses[0].url}/healthz")


@pytest.mark.integration
async def test_proxy_that_hangs_is_killed_and_comes_back_with_its_sessions(model_path: Path, tmp_path: Path) -> None:
    (settings,) = process_settings(model_path, tmp_path, 1)
    with ProxySupervisor([settings], work=tmp_path / "work", logs=tmp_path / "logs", hang_s=1.0) as supervisor:
        await asyncio.to_thread(supervisor.wait_ready)
        async with ProxyPool(supervisor.shards) as pool:
            session = await pool.create_session(rollout_id="r1")
            before = supervisor.pids[0]
            os.kill(before, signal.SIGSTOP)
            await until(lambda: back_with(pool, sessions=1))
            assert supervisor.pids[0] != before
            assert (await pool.seal(session.session_id)).rollout_id == "r1"


async def back_with(pool: ProxyPool, *, sessions: int) -> bool:
    pool.shards.check()
    return pool.shards.restarts == [1] and (await pool.status())["sessions"] == sessions


@pytest.mark.integration
def test_proxy_that_cannot_start_ends_the_supervisor_with_its_log(model_path: Path, tmp_path: Path) -> None:
    (settings,) = process_settings(tmp_path / "no-model", tmp_path, 1)
    with (
        pytest.raises(ProxyError, match=r"proxy ended with exit code 2 while starting[\s\S]*no-model"),
        ProxySupervisor([settings], work=tmp_path / "work", logs=tmp_path / "logs") as supervisor,
    ):
        supervisor.wait_ready()
    assert not list((tmp_path / "work").iterdir()), "settings hold secrets and do not stay"
