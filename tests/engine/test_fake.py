"""The fake engine keeps SGLang's wire contract, as the real client reads it."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gyre_core.engine.fake import FakeEngine, FakeEngineServer, fake_logprob
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.errors import EngineError
from gyre_core.types import FinishReason, SamplingParams, VersionSpan

PARAMS = SamplingParams(max_new_tokens=8, stop_token_ids=(2,))


@pytest.fixture
async def served() -> AsyncIterator[tuple[FakeEngine, SGLangClient, FakeEngineServer]]:
    engine = FakeEngine(vocab_size=64, stop_token_ids=[2])
    with FakeEngineServer(engine) as server:
        async with SGLangClient(server.url, vocab_size=64) as client:
            yield engine, client, server


Served = tuple[FakeEngine, SGLangClient, FakeEngineServer]


async def test_scripted_output_comes_back_with_logprobs_and_version(served: Served) -> None:
    engine, client, _ = served
    engine.set_version(3)
    engine.add_outputs([[5, 6, 2, 9]])
    generation = await client.generate([1, 4], PARAMS, rid="a", cache_salt="3")
    assert generation.output_ids.tolist() == [5, 6, 2]
    assert generation.logprobs.tolist() == [fake_logprob(5), fake_logprob(6), fake_logprob(2)]
    assert generation.finish_reason is FinishReason.STOP
    assert generation.spans == (VersionSpan(version=3, start=0, end=3),)
    assert (engine.calls[0].rid, engine.calls[0].cache_salt) == ("a", "3")


async def test_limit_ends_an_output(served: Served) -> None:
    engine, client, _ = served
    engine.add_outputs([[5] * 20])
    generation = await client.generate([1], PARAMS, rid="a")
    assert len(generation.output_ids) == 8 and generation.finish_reason is FinishReason.LENGTH


async def test_unscripted_outputs_depend_on_prompt_version_and_seed_only() -> None:
    async def sample(prompt: list[int], **fields: int) -> list[int]:
        engine = FakeEngine(vocab_size=64, stop_token_ids=[2], **fields)
        return (await engine.generate(prompt, PARAMS, rid="a")).output_ids.tolist()

    assert await sample([1, 3]) == await sample([1, 3])
    assert len({tuple(await sample([1, 3], seed=s, version=v)) for s in range(3) for v in range(3)}) == 9


async def test_served_and_direct_engine_answer_alike(served: Served) -> None:
    _, client, _ = served
    direct = FakeEngine(vocab_size=64, stop_token_ids=[2])
    for prompt in ([1], [1, 2, 3], [9] * 50):
        one = await client.generate(prompt, PARAMS, rid="a")
        two = await direct.generate(prompt, PARAMS, rid="a")
        assert one.output_ids.tolist() == two.output_ids.tolist()
        assert (one.logprobs.tolist(), one.spans, one.finish_reason) == (
            two.logprobs.tolist(),
            two.spans,
            two.finish_reason,
        )


async def test_aborted_call_returns_its_part_and_its_rest_follows_when_it_comes_back(served: Served) -> None:
    engine, client, _ = served
    engine.add_outputs([[5, 6, 7, 2]])
    engine.hold(after=2)
    call = asyncio.create_task(client.generate([1], PARAMS, rid="x"))
    await engine.running(tokens=2)
    await client.abort("x")
    part = await call
    assert part.output_ids.tolist() == [5, 6] and part.finish_reason is FinishReason.ABORT
    engine.release()
    rest = await client.generate([1, 5, 6], PARAMS, rid="y")
    assert rest.output_ids.tolist() == [7, 2] and rest.finish_reason is FinishReason.STOP
    assert rest.cached_tokens == 2


async def test_weights_that_change_under_a_call_give_two_spans(served: Served) -> None:
    engine, client, _ = served
    engine.add_outputs([[5, 6, 7, 2]])
    engine.hold(after=1)
    call = asyncio.create_task(client.generate([1], PARAMS, rid="x"))
    await engine.running(tokens=1)
    engine.set_version(1)
    engine.release()
    assert (await call).spans == (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=4))


async def test_paused_engine_samples_nothing_until_it_continues(served: Served) -> None:
    engine, client, server = served
    engine.add_outputs([[5, 2]])
    await client.pause("retract")
    call = asyncio.create_task(client.generate([1], PARAMS, rid="x"))
    await engine.running()
    assert not engine.calls[0].output_ids
    await client.continue_generation()
    assert (await call).output_ids.tolist() == [5, 2]
    assert server.paths == ["/pause_generation", "/generate", "/continue_generation"]


@pytest.mark.parametrize(("status", "retryable"), [(503, True), (429, True), (0, True), (400, False)])
async def test_planned_failures_look_like_an_engine_in_trouble(served: Served, status: int, retryable: bool) -> None:
    engine, client, _ = served
    engine.fail_next(status)
    with pytest.raises(EngineError) as caught:
        await client.generate([1], PARAMS, rid="a")
    assert caught.value.retryable is retryable
    assert len((await client.generate([1], PARAMS, rid="b")).output_ids) > 0


async def test_stopped_server_fails_calls_in_flight(served: Served) -> None:
    engine, client, server = served
    engine.hold()
    call = asyncio.create_task(client.generate([1], PARAMS, rid="a"))
    await engine.running()
    await asyncio.to_thread(server.stop)
    with pytest.raises(EngineError) as caught:
        await call
    assert caught.value.retryable


def test_calls_of_synchronous_clients_are_served_too() -> None:
    with FakeEngineServer(FakeEngine([[5, 2]])) as server:
        body = {"input_ids": [1], "sampling_params": {"stop_token_ids": [2]}, "return_logprob": True}
        reply = httpx.post(f"{server.url}/generate", json=body).json()
        assert reply["output_ids"] == [5, 2]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert reply["meta_info"]["output_token_logprobs"] == [[fake_logprob(5), 5, None], [fake_logprob(2), 2, None]]
        assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "0"


async def test_waiting_for_calls_that_never_come_times_out() -> None:
    with pytest.raises(TimeoutError):
        await FakeEngine().running(timeout_s=0.01)


async def test_server_with_a_key_asks_every_request_for_it() -> None:
    with FakeEngineServer(FakeEngine([[5, 2]]), api_key="right") as server:
        for key in (None, "wrong"):
            async with SGLangClient(server.url, vocab_size=64, api_key=key) as client:
                with pytest.raises(EngineError, match="asks for its key") as caught:
                    await client.generate([1], PARAMS, rid="a")
                assert not caught.value.retryable
                assert not await client.is_ready()
        assert server.paths == []
        async with SGLangClient(server.url, vocab_size=64, api_key="right") as client:
            assert (await client.generate([1], PARAMS, rid="a")).output_ids.tolist() == [5, 2]
            await client.pause()
            await client.continue_generation()
            assert await client.is_ready()
