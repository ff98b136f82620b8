"""Calls on a real SGLang server: exact ids and log-probs, seeds, stops, aborts, cache salts."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest
import torch

from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.errors import EngineError
from gyre_core.types import FinishReason, Generation, SamplingParams, VersionSpan
from tests.support.sglang import RunningEngine
from tests.support.tiny_model import CONTEXT_LENGTH, tiny_model

pytestmark = pytest.mark.integration

PROMPT = [(7 * i) % 250 for i in range(40)]


@pytest.fixture
async def client(sglang_server: RunningEngine) -> AsyncIterator[SGLangClient]:
    async with sglang_server.server.client(timeout_s=60) as client:
        yield client


def reference_logprobs(prompt: list[int], output: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of `output` after `prompt` by transformers in fp32."""
    ids = torch.tensor([prompt + output.tolist()])
    with torch.no_grad():
        logits = tiny_model(0)(ids).logits[0, len(prompt) - 1 : -1].float()
    picked = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])
    return picked[:, 0].numpy()


def check_logprobs(prompt: list[int], result: Generation, temperature: float) -> None:
    expected = reference_logprobs(prompt, result.output_ids, temperature)
    assert np.abs(expected - result.logprobs).max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_generate_logprobs_are_those_of_transformers(client: SGLangClient, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=32, temperature=temperature, seed=1)
    result = await client.generate(PROMPT, params, rid=f"lp-{temperature}", cache_salt="0")
    assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert result.spans == (VersionSpan(version=0, start=0, end=len(result.output_ids)),)
    check_logprobs(PROMPT, result, temperature)


async def test_generate_greedy_takes_the_most_likely_token(client: SGLangClient) -> None:
    result = await client.generate(PROMPT, SamplingParams(max_new_tokens=1, temperature=0.0), rid="greedy")
    with torch.no_grad():
        best = int(tiny_model(0)(torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert result.output_ids.tolist() == [best]


async def test_generate_batched_calls_of_all_lengths_are_exact(client: SGLangClient) -> None:
    """Sixteen calls at once, short and long, some behind a cached prefix: attention is batched across them."""
    prompts = [[(3 * i + n) % 250 for i in range(length)] for n, length in enumerate([4, 9, 40, 90, 200, 450, 600, 11])]
    prompts += [[*prompt[: len(prompt) // 2], 17, 18, 19] for prompt in prompts]
    params = SamplingParams(max_new_tokens=12, seed=2)
    results = await asyncio.gather(
        *(client.generate(prompt, params, rid=f"b{i}", cache_salt="0") for i, prompt in enumerate(prompts))
    )
    for prompt, result in zip(prompts, results, strict=True):
        check_logprobs(prompt, result, 1.0)
    extended = prompts[6] + results[6].output_ids.tolist() + [40, 41, 42]  # the next turn: few new tokens, long prefix
    again = await client.generate(extended, params, rid="next", cache_salt="0")
    assert again.cached_tokens >= 600
    check_logprobs(extended, again, 1.0)


async def test_generate_seed_decides_the_output_in_any_company(client: SGLangClient) -> None:
    async def sample(seed: int | None, rid: str) -> list[int]:
        params = SamplingParams(max_new_tokens=24, seed=seed)
        return (await client.generate(PROMPT, params, rid=rid, cache_salt="0")).output_ids.tolist()

    alone = await sample(11, "alone")
    crowd = await asyncio.gather(*(sample(11 if i == 3 else 100 + i, f"crowd{i}") for i in range(8)))
    assert crowd[3] == alone
    assert len({tuple(output) for output in crowd}) == 8
    unseeded = await asyncio.gather(*(sample(None, f"free{i}") for i in range(4)))
    assert len({tuple(output) for output in unseeded}) == 4


async def test_generate_stops_at_a_stop_token_and_keeps_it(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=64, seed=5, stop_token_ids=tuple(range(0, 512, 2)))
    result = await client.generate(PROMPT, params, rid="stop", cache_salt="0")
    assert result.finish_reason is FinishReason.STOP
    assert result.output_ids[-1] % 2 == 0
    assert all(token % 2 for token in result.output_ids[:-1])
    assert len(result.logprobs) == len(result.output_ids)


async def test_generate_stops_at_a_stop_string(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=400, seed=5, stop=tuple("abcdefghij"))
    result = await client.generate(PROMPT, params, rid="stop-text", cache_salt="0")
    assert result.finish_reason is FinishReason.STOP
    check_logprobs(PROMPT, result, 1.0)


async def test_generate_cache_salt_separates_prefixes(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=1, seed=1)
    prompt = [99, *PROMPT]
    first = await client.generate(prompt, params, rid="s1", cache_salt="salt-a")
    same = await client.generate(prompt, params, rid="s2", cache_salt="salt-a")
    other = await client.generate(prompt, params, rid="s3", cache_salt="salt-b")
    assert (first.cached_tokens, same.cached_tokens, other.cached_tokens) == (0, len(prompt) - 1, 0)


async def test_abort_returns_the_partial_output(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=900, seed=3)
    long_call = asyncio.create_task(client.generate(PROMPT, params, rid="long", cache_salt="0"))
    # Calls run in step with each other: when these ten tokens are there, the long call has about as many.
    await client.generate(PROMPT, SamplingParams(max_new_tokens=10, seed=4), rid="short", cache_salt="0")
    await client.abort("long")
    result = await long_call
    if result.finish_reason is not FinishReason.STOP:  # the random model may have ended by itself
        assert result.finish_reason is FinishReason.ABORT
        assert 0 < len(result.output_ids) < 900
    check_logprobs(PROMPT, result, 1.0)


async def test_cancelled_call_ends_on_the_engine(client: SGLangClient, sglang_server: RunningEngine) -> None:
    params = SamplingParams(max_new_tokens=900, seed=6)
    task = asyncio.create_task(client.generate(PROMPT, params, rid="cancelled", cache_salt="0"))
    await client.generate(PROMPT, SamplingParams(max_new_tokens=5, seed=4), rid="tick", cache_salt="0")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.flush_cache()  # refused while any call runs


async def test_pause_in_place_holds_a_call_until_continue(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=30, seed=7)
    whole = await client.generate(PROMPT, params, rid="whole", cache_salt="0")
    await client.pause("in_place")
    held = asyncio.create_task(client.generate(PROMPT, params, rid="held", cache_salt="0"))
    await client.model_info()
    assert not held.done()
    await client.continue_generation()
    assert (await held).output_ids.tolist() == whole.output_ids.tolist()


@pytest.mark.parametrize("ids", [[512], [3, -1], [2**31]])
async def test_generate_bad_id_is_refused_and_the_server_lives(client: SGLangClient, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="outside the engine's vocabulary of 512"):
        await client.generate(ids, SamplingParams(max_new_tokens=1), rid="bad")
    assert await client.is_ready()


async def test_generate_beyond_the_context_is_refused_not_retried(client: SGLangClient) -> None:
    with pytest.raises(EngineError, match="longer than the model's context length") as caught:
        await client.generate([1] * (CONTEXT_LENGTH + 1), SamplingParams(max_new_tokens=1), rid="long-prompt")
    assert not caught.value.retryable


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.parametrize("paused", [False, True])
async def test_idle_server_leaves_the_cores_to_the_trainer(
    client: SGLangClient, sglang_server: RunningEngine, paused: bool
) -> None:
    guard = psutil.Process(sglang_server.server.pid)
    processes = [guard, *guard.children(recursive=True)]
    if paused:
        await client.pause("retract")
    before = cpu_seconds(processes)
    with pytest.raises(psutil.TimeoutExpired):
        guard.wait(2.0)  # two seconds in which nothing is asked of it
    spent_s = cpu_seconds(processes) - before
    if paused:
        await client.continue_generation()
    assert spent_s < 0.2  # a server that polls takes 2.0


async def test_kv_memory_released_and_resumed_leaves_the_outputs_as_they_were(client: SGLangClient) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    before = await client.generate(PROMPT, params, rid="memory-1", cache_salt="m")
    await client.release_kv_memory()
    await client.resume_kv_memory()
    after = await client.generate(PROMPT, params, rid="memory-2", cache_salt="m")
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert after.cached_tokens == 0, "the pool came back empty"
