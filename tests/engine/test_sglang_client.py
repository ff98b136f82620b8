"""What the client sends, and what it makes of answers, without a server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gyre_core.engine.sglang_client import SGLangClient, sampling_body
from gyre_core.errors import EngineError
from gyre_core.types import SamplingParams
from tests.support.fixtures import recorded, recorded_body

PARAMS = SamplingParams(max_new_tokens=6)


class Server:
    """Answers by path and keeps what was asked."""

    def __init__(self, answers: dict[str, Callable[[], httpx.Response] | httpx.Response]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, Any]] = []
        self.aborted = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append((request.url.path, json.loads(request.content) if request.content else None))
        if request.url.path == "/abort_request":
            self.aborted.set()
        answer = self.answers[request.url.path]
        return answer if isinstance(answer, httpx.Response) else answer()

    def client(self, **options: Any) -> SGLangClient:
        return SGLangClient("http://engine", vocab_size=1024, transport=httpx.MockTransport(self), **options)


def generation() -> httpx.Response:
    body = recorded_body("generate_length")
    body["meta_info"]["weight_versions"][0]["version"] = "3"
    return httpx.Response(200, json=body)


def answer(name: str) -> httpx.Response:
    data = recorded(name)
    body = data["body"]
    return (
        httpx.Response(data["status"], text=body)
        if isinstance(body, str)
        else httpx.Response(data["status"], json=body)
    )


async def test_generate_sends_ids_seed_stop_tokens_and_salt() -> None:
    server = Server({"/generate": generation()})
    params = SamplingParams(max_new_tokens=6, temperature=0.6, stop_token_ids=(2, 5), stop=("END",), seed=2**31 + 9)
    async with server.client() as client:
        result = await client.generate(range(8), params, rid="r1", cache_salt="3")
    assert len(result.output_ids) == 6
    path, body = server.requests[0]
    assert path == "/generate"
    assert body["input_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert body["return_logprob"] is True
    assert (body["rid"], body["cache_salt"]) == ("r1", "3")
    assert body["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stop_token_ids": [2, 5],
        "stop": ["END"],
        "sampling_seed": 9,
    }


def test_sampling_body_leaves_out_what_was_not_asked() -> None:
    assert {"sampling_seed", "stop", "stop_token_ids"}.isdisjoint(sampling_body(PARAMS))
    with pytest.raises(ValueError, match="positive"):
        sampling_body(SamplingParams(max_new_tokens=0))


@pytest.mark.parametrize("ids", [[], [-1], [5, 1024], [2**40]])
async def test_generate_bad_ids_never_reach_the_engine(ids: list[int]) -> None:
    server = Server({"/generate": generation()})
    async with server.client() as client:
        with pytest.raises(ValueError):
            await client.generate(ids, PARAMS, rid="r")
    assert server.requests == []


async def test_generate_refused_call_is_not_retryable() -> None:
    server = Server({"/generate": answer("generate_too_long")})
    async with server.client() as client:
        with pytest.raises(EngineError, match="status 400: The input \\(6400 tokens\\)") as caught:
            await client.generate([1], PARAMS, rid="r")
    assert not caught.value.retryable


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_generate_busy_engine_is_retryable(status: int) -> None:
    server = Server({"/generate": httpx.Response(status, text="busy")})
    async with server.client() as client:
        with pytest.raises(EngineError, match="busy") as caught:
            await client.generate([1], PARAMS, rid="r")
    assert caught.value.retryable


async def test_generate_unreachable_engine_is_retryable() -> None:
    def refuse() -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with Server({"/generate": refuse}).client() as client:
        with pytest.raises(EngineError, match="refused") as caught:
            await client.generate([1], PARAMS, rid="r")
    assert caught.value.retryable


async def test_generate_reply_without_json_is_an_engine_error() -> None:
    async with Server({"/generate": httpx.Response(200, text="<html>")}).client() as client:
        with pytest.raises(EngineError, match="no JSON"):
            await client.generate([1], PARAMS, rid="r")


class HangingServer(Server):
    """Never answers /generate."""

    def __init__(self) -> None:
        super().__init__({"/abort_request": httpx.Response(200)})
        self.reached = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            self.reached.set()
            await asyncio.Event().wait()
        return await super().__call__(request)


async def test_generate_cancelled_aborts_the_call_on_the_engine() -> None:
    server = HangingServer()
    async with server.client() as client:
        task = asyncio.create_task(client.generate([1], PARAMS, rid="r7"))
        await server.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.requests == [("/abort_request", {"rid": "r7"})]


async def test_generate_too_slow_is_aborted_and_retryable() -> None:
    server = HangingServer()
    async with server.client(timeout_s=0.01) as client:
        with pytest.raises(EngineError, match=r"longer than 0\.01 s") as caught:
            await client.generate([1], PARAMS, rid="r8")
    assert caught.value.retryable
    assert server.requests == [("/abort_request", {"rid": "r8"})]


async def test_abort_without_rid_is_refused_since_it_would_abort_all() -> None:
    async with Server({}).client() as client:
        with pytest.raises(ValueError):
            await client.abort("")


async def test_flush_cache_refused_while_calls_run_is_retryable() -> None:
    async with Server({"/flush_cache": answer("flush_refused")}).client() as client:
        with pytest.raises(EngineError, match="Flush cache failed") as caught:
            await client.flush_cache()
    assert caught.value.retryable


async def test_update_weights_from_a_missing_folder_is_an_engine_error() -> None:
    async with Server({"/update_weights_from_disk": answer("weights_missing")}).client() as client:
        with pytest.raises(EngineError, match="Failed to get weights iterator"):
            await client.update_weights_from_disk("/nope", version=2)


async def test_checksums_are_by_parameter_name() -> None:
    async with Server({"/weights_checker": answer("weights_checksum")}).client() as client:
        (sums,) = await client.checksums()
    assert len(sums) == 19
    assert sums["model.norm.weight"] == "2f20cd03c9cd392a"


async def test_checksums_of_two_ranks_are_two() -> None:
    body = recorded_body("weights_checksum")
    body["ranks"].append({**body["ranks"][0], "checksums": {"model.norm.weight": "0" * 16}})
    async with Server({"/weights_checker": httpx.Response(200, json=body)}).client() as client:
        first, second = await client.checksums()
    assert (len(first), second) == (19, {"model.norm.weight": "0" * 16})


async def test_weight_memory_is_session_and_addresses() -> None:
    async with Server({"/remote_instance_transfer_engine_info": answer("weight_memory")}).client() as client:
        session, memory = await client.weight_memory()
    assert session == "127.0.0.1:15770"
    assert memory["model.embed_tokens.weight"] == (94227556115264, 65536, 4)


async def test_weight_version_that_gyre_did_not_give_is_refused() -> None:
    async with Server({"/model_info": answer("model_info")}).client() as client:
        with pytest.raises(EngineError, match="'default', which Gyre did not give"):
            await client.weight_version()


async def test_is_ready_is_false_without_a_server() -> None:
    def refuse() -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with Server({"/model_info": refuse}).client() as client:
        assert not await client.is_ready()


async def test_key_goes_with_every_request() -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"success": True, "weight_version": "1"})

    for key in (None, "the-key"):
        options: dict[str, Any] = {"vocab_size": 8, "transport": httpx.MockTransport(answer)}
        async with SGLangClient("http://engine", api_key=key, **options) as client:
            await client.pause()
            await client.abort("r")
            await client.flush_cache()
            await client.weight_version()
            assert await client.is_ready()
    assert seen == [None] * 5 + ["Bearer the-key"] * 5
