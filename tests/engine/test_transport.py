"""httpx over aiohttp's connections: bodies, headers, statuses and failures are httpx's."""

import asyncio
import socket

import httpx
import pytest

from gyre_core.engine.fake import FakeEngineServer
from gyre_core.engine.transport import AiohttpTransport


@pytest.fixture
async def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=AiohttpTransport(keepalive_s=2.0), timeout=httpx.Timeout(5))


async def test_requests_in_a_row_use_one_connection(client: httpx.AsyncClient) -> None:
    with FakeEngineServer() as server:
        async with client:
            first = await client.post(f"{server.url}/flush_cache", json={})
            second = await client.get(f"{server.url}/model_info")
            assert (first.status_code, second.status_code) == (200, 200)
            assert second.json()["weight_version"] == "0"
            assert second.headers["content-type"].startswith("application/json")
    assert server.paths == ["/flush_cache", "/model_info"]


async def test_status_of_an_error_is_a_response(client: httpx.AsyncClient) -> None:
    with FakeEngineServer(api_key="k" * 16) as server:
        async with client:
            assert (await client.get(f"{server.url}/model_info")).status_code == 401
            headers = {"authorization": "Bearer " + "k" * 16}
            assert (await client.get(f"{server.url}/model_info", headers=headers)).status_code == 200


async def test_server_that_is_not_there_is_a_connect_error(client: httpx.AsyncClient) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{taken.getsockname()[1]}/")


async def test_connection_cut_before_an_answer_is_a_read_error(client: httpx.AsyncClient) -> None:
    with FakeEngineServer() as server:
        server.engine.fail_next(0)
        async with client:
            with pytest.raises(httpx.ReadError):
                await client.post(f"{server.url}/generate", json={"input_ids": [1]})


async def test_answer_that_does_not_come_is_a_read_timeout(client: httpx.AsyncClient) -> None:
    with FakeEngineServer() as server:
        server.engine.hold()
        async with client:
            with pytest.raises(httpx.ReadTimeout):
                body = {"input_ids": [1], "rid": "r"}
                await client.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(5, read=0.05))
        server.engine.release()


async def test_many_requests_at_once_all_run(client: httpx.AsyncClient) -> None:
    with FakeEngineServer() as server:
        async with client:
            answers = await asyncio.gather(*(client.get(f"{server.url}/ping") for _ in range(150)))
    assert {answer.status_code for answer in answers} == {200}
