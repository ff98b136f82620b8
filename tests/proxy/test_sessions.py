"""The admin's view: sessions are opened, counted, sealed and forgotten; settings are checked."""

import asyncio
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from gyre_core.errors import ConfigError, ProxyError, SetupError
from gyre_core.proxy.admin_client import ProxyAdmin
from gyre_core.proxy.server import Proxy
from gyre_core.proxy.settings import EngineEntry, HarnessName, LimitSettings, ProxySettings, SamplingSettings
from gyre_core.types import Role
from tests.support.proxies import ADMIN_HEADERS, ADMIN_SECRET, fake_engine, running_proxy, serving

USER = [{"role": "user", "content": "u"}]


async def test_admin_client_runs_a_session_from_opening_to_forgetting(model_path: Path) -> None:
    async with (
        running_proxy(model_path, fake_engine("a")) as proxy,
        serving(proxy) as url,
        ProxyAdmin(url, ADMIN_SECRET) as admin,
    ):
        await admin.set_engines([EngineEntry(url="http://engine", slots=2)], policy_version=3)
        session = await admin.create_session(
            rollout_id="r9",
            policy_version=3,
            sampling=SamplingSettings(temperature=0.7, max_new_tokens=5, seed=1),
            limits=LimitSettings(max_calls=2),
            harness=HarnessName(name="mini-swe-agent", version="2.4.6"),
        )
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{session.base_url}/v1/messages", json={"messages": USER})
            assert reply.status_code == 200
        assert proxy.engine.calls[0].sampling_params["temperature"] == 0.7
        status = await admin.status()
        assert (status["sessions"], status["calls"], status["policy_version"]) == (1, 1, 3)
        trajectory = await admin.seal(session.session_id)
        assert trajectory.rollout_id == "r9"
        assert trajectory.calls[0].call_id == "r9-c0" and trajectory.calls[0].role is Role.MAIN
        await admin.delete(session.session_id)
        await admin.delete(session.session_id)
        with pytest.raises(ProxyError, match="no such session"):
            await admin.seal(session.session_id)
        assert (await admin.status())["sessions"] == 0


async def test_admin_client_names_what_the_proxy_refused(model_path: Path) -> None:
    async with (
        running_proxy(model_path, fake_engine()) as proxy,
        serving(proxy) as url,
        ProxyAdmin(url, "a-wrong-admin-secret") as admin,
    ):
        with pytest.raises(ProxyError, match="401"):
            await admin.status()
    async with ProxyAdmin("http://127.0.0.1:9", ADMIN_SECRET) as admin:
        with pytest.raises(ProxyError, match="does not answer"):
            await admin.status()


async def test_seal_gives_the_same_bytes_each_time_and_refuses_later_calls(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        await harness.messages(USER)
        seal = f"/admin/sessions/{harness.session_id}/seal"
        first = await proxy.client.post(seal, headers=ADMIN_HEADERS)
        second = await proxy.client.post(seal, headers=ADMIN_HEADERS)
        assert first.content == second.content
        for reply in (await harness.messages(USER), await harness.chat(USER)):
            assert reply.status_code == 403 and "sealed" in reply.text


async def test_seal_ends_calls_in_flight(model_path: Path) -> None:
    engine = fake_engine("a", "b")
    async with running_proxy(model_path, engine) as proxy:
        harness = await proxy.open()
        await harness.messages(USER)
        engine.hold(after=1)
        call = asyncio.create_task(harness.messages([{"role": "user", "content": "v"}]))
        await engine.running(tokens=1)
        trajectory = await harness.seal()
        assert (await call).status_code == 403
        assert len(trajectory.calls) == 1
        assert trajectory.counters["calls_aborted_at_seal"] == 1
        await proxy.until(in_flight=0)


async def test_seals_at_the_same_time_give_the_same_bytes(model_path: Path, tmp_path: Path) -> None:
    engine = fake_engine("a")
    engine.hold()
    async with running_proxy(model_path, engine, journal_dir=tmp_path) as proxy:
        harness = await proxy.open()
        call = asyncio.create_task(harness.messages(USER))
        await engine.running()
        seal = f"/admin/sessions/{harness.session_id}/seal"
        replies = await asyncio.gather(*(proxy.client.post(seal, headers=ADMIN_HEADERS) for _ in range(3)))
        assert len({reply.content for reply in replies}) == 1 and replies[0].status_code == 200
        await call


async def test_seal_ends_calls_that_wait_for_engines(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        await proxy.engines()
        call = asyncio.create_task(harness.messages(USER))
        await proxy.until(waiting=1)
        assert len((await harness.seal()).calls) == 0
        assert (await call).status_code == 403
        await proxy.until(waiting=0)


async def test_forgotten_session_takes_no_calls(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open()
        reply = await proxy.client.delete(f"/admin/sessions/{harness.session_id}", headers=ADMIN_HEADERS)
        assert reply.status_code == 200
        assert (await harness.messages(USER)).status_code == 401


async def test_unknown_harness_counts_as_main_with_a_counter(model_path: Path) -> None:
    async with running_proxy(model_path, fake_engine("a")) as proxy:
        harness = await proxy.open(harness="nobody-knows-it")
        await harness.messages(USER, headers={"x-agent-parent": "main"})
        trajectory = await harness.seal()
        assert trajectory.calls[0].role is Role.MAIN
        assert trajectory.counters["roles_unknown_harness"] == 1


async def test_harness_from_configuration_has_roles(model_path: Path) -> None:
    table = {"harness": "mine", "versions": "1*", "aux": [{"system_contains": "title"}], "hints": ["X-Who"]}
    async with running_proxy(model_path, fake_engine("a"), role_tables=[table]) as proxy:
        harness = await proxy.open(harness="mine")
        await harness.messages(USER, system="make a title", headers={"x-who": "me"})
        (call,) = (await harness.seal()).calls
        assert call.role is Role.AUX and call.hints == {"x-who": "me"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rollout_id": ""},
        {"rollout_id": "r", "unknown": 1},
        {"rollout_id": "r", "sampling": {"temperature": -1}},
        {"rollout_id": "r", "sampling": {"max_new_tokens": 0}},
        {"rollout_id": "r", "limits": {"max_calls": 0}},
        {"rollout_id": 5},
    ],
)
async def test_bad_session_settings_are_refused(model_path: Path, body: dict) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy:
        reply = await proxy.client.post("/admin/sessions", json=body, headers=ADMIN_HEADERS)
        assert reply.status_code == 400 and reply.json()["error"]
        assert (await proxy.status())["sessions"] == 0


@pytest.mark.parametrize(
    "body",
    [
        {"engines": []},
        {"engines": [{"url": "ftp://x", "slots": 1}], "policy_version": 0},
        {"engines": [{"url": "http://x", "slots": 0}], "policy_version": 0},
        {"engines": [], "policy_version": -1},
    ],
)
async def test_bad_engine_lists_are_refused_and_change_nothing(model_path: Path, body: dict) -> None:
    async with running_proxy(model_path, fake_engine()) as proxy:
        reply = await proxy.client.put("/admin/engines", json=body, headers=ADMIN_HEADERS)
        assert reply.status_code == 400
        (engine,) = (await proxy.status())["engines"]
        assert (engine["url"], engine["slots"], engine["busy"]) == ("http://engine", 8, 0)


def test_settings_that_cannot_be_served_with_are_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        ProxySettings(admin_secret="short", model_path=model_path, context_length=100)
    with pytest.raises(ValidationError, match="unknown conditions"):
        ProxySettings(
            admin_secret=ADMIN_SECRET,
            model_path=model_path,
            context_length=100,
            role_tables=({"harness": "x", "aux": [{"nope": 1}]},),
        )
    with pytest.raises(SetupError, match="no tokenizer"):
        Proxy(ProxySettings(admin_secret=ADMIN_SECRET, model_path=tmp_path, renderer="qwen3", context_length=100))
    with pytest.raises(ConfigError, match="does not fit"):
        Proxy(ProxySettings(admin_secret=ADMIN_SECRET, model_path=model_path, renderer="kimi-k2", context_length=100))
