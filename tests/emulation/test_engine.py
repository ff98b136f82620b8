"""Emulated engines: when calls end, worked by hand on a clock that moves only when told to."""

import asyncio

import httpx
import numpy as np
import pytest

from gyre_core.clock import ManualClock
from gyre_core.config.emulation import EmulationConfig, EngineCosts
from gyre_core.engine.emulated import DecodingState, EmulatedEngine
from gyre_core.engine.emulated_kv import PrefixCache, SharedPages
from gyre_core.engine.emulated_server import EmulatedServer
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.types import FinishReason, SamplingParams

COSTS = EngineCosts(alpha_s=1.0, beta_s=0.5, prefill_s=0.1, move_s=0.01)  # tau(1) = 1.5, tau(2) = 2
STOP = 9


def test_decoding_alone_takes_tau_of_one_a_token():
    state = DecodingState(COSTS, slots=4)
    state.start("a", 4, prefill_s=2.0, now_s=0.0)
    assert state.next_s() == 2.0  # the prompt
    assert state.finished(2.0) == []
    assert state.next_s() == pytest.approx(2.0 + 4 * 1.5)
    assert state.tokens("a", 5.0) == 2  # 3 s of decoding
    assert state.finished(7.9) == []
    assert state.finished(8.0) == ["a"]
    assert state.finished(9.0) == []  # told once
    assert state.end("a", 9.0) == 4
    assert state.busy_s == pytest.approx(8.0)  # not the second in which nobody looked


def test_decoding_together_slows_both_until_one_ends():
    state = DecodingState(COSTS, slots=4)
    state.start("a", 2, prefill_s=0.0, now_s=0.0)
    state.start("b", 6, prefill_s=0.0, now_s=0.0)
    assert state.next_s() == pytest.approx(4.0)  # two tokens at tau(2) = 2
    # b: 2 tokens by 4 s, the other 4 alone at 1.5 s: however late somebody looks
    assert state.finished(100.0) == ["a", "b"]
    assert state.busy_s == pytest.approx(4.0 + 6.0)


def test_prompts_are_computed_one_after_the_other():
    state = DecodingState(COSTS, slots=4)
    state.start("a", 1, prefill_s=2.0, now_s=0.0)
    state.start("b", 1, prefill_s=3.0, now_s=0.0)
    assert state.finished(3.5) == ["a"]  # 2 + tau(1)
    assert state.next_s() == pytest.approx(5.0)
    assert state.finished(6.5) == ["b"]


def test_decoding_long_contexts_slow_it_down():
    state = DecodingState(COSTS.model_copy(update={"gamma_s": 0.01}), slots=4)
    state.start("a", 2, prefill_s=0.0, now_s=0.0, context_tokens=100)
    state.start("b", 3, prefill_s=0.0, now_s=0.0, context_tokens=50)
    assert state.next_s() == pytest.approx(2 * (2.0 + 1.5))
    assert state.finished(7.0) == ["a"]
    assert state.next_s() == pytest.approx(7.0 + 1.5 + 0.5)


def test_decoding_beyond_the_slots_waits_in_order():
    state = DecodingState(COSTS, slots=1)
    for rid in ("a", "b", "c"):
        state.start(rid, 2, prefill_s=1.0, now_s=0.0)
    assert state.end("b", 0.5) == 0  # gave up waiting
    assert state.finished(3.9) == []
    assert state.finished(4.0) == ["a"]  # 1 + 2 x 1.5
    assert state.finished(8.0) == ["c"]  # the slot was free at 4


def test_decoding_aborted_keeps_whole_tokens_and_speeds_up_the_other():
    state = DecodingState(COSTS, slots=4)
    state.start("a", 100, prefill_s=0.0, now_s=0.0)
    state.start("b", 4, prefill_s=0.0, now_s=0.0)
    assert state.end("a", 3.0) == 1  # 1.5 tokens
    assert state.next_s() == pytest.approx(3.0 + 2.5 * 1.5)


def test_decoding_late_on_the_clock_ends_although_the_last_piece_of_time_rounds_to_nothing():
    costs = COSTS.model_copy(update={"beta_s": 1.0 / 3.0})
    state, now_s = DecodingState(costs, slots=3), 5e9  # a double has half a microsecond here
    ended = []
    for number in range(200):
        now_s += 0.7
        state.start(f"c{number}", 1 + number % 3, prefill_s=0.1, now_s=now_s)
        ended += state.finished(now_s)
    ended += state.finished(now_s + 1e4)
    assert sorted(ended) == sorted(f"c{number}" for number in range(200))


def test_decoding_same_rid_twice_refused():
    state = DecodingState(COSTS, slots=4)
    state.start("a", 1, prefill_s=0.0, now_s=0.0)
    with pytest.raises(ValueError, match="runs already"):
        state.start("a", 1, prefill_s=0.0, now_s=0.0)


def make_engine(clock: ManualClock, shared: SharedPages | None = None) -> EmulatedEngine:
    config = EmulationConfig(compression=1.0, engine=COSTS)
    return EmulatedEngine(config, slots=4, letters=[5, 6], version=3, shared=shared, clock=clock)


async def started(call: "asyncio.Task[dict]") -> "asyncio.Task[dict]":
    await asyncio.sleep(0)
    return call


async def test_engine_reply_has_the_tokens_asked_for_and_ends_with_the_stop_token():
    clock = ManualClock()
    engine = make_engine(clock)
    call = await started(
        asyncio.ensure_future(engine.generate("r", [1, 2], {"max_new_tokens": 3, "stop_token_ids": [STOP]}, "3"))
    )
    clock.advance(0.2 + 3 * 1.5)
    engine.tick()
    reply = await call
    assert reply["output_ids"] == [5, 6, STOP]
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": STOP}
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (2, 0)
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 3}]


async def test_engine_abort_and_resume_elsewhere_give_what_was_asked_for(tmp_path):
    clock = ManualClock()
    first, second = make_engine(clock, SharedPages(tmp_path)), make_engine(clock, SharedPages(tmp_path))
    params = {"max_new_tokens": 10, "stop_token_ids": [STOP]}
    call = await started(asyncio.ensure_future(first.generate("r", [1, 2, 3, 4], params, "3")))
    clock.advance(0.4 + 4 * 1.5 + 0.1)
    first.abort("r")
    partial = await call
    assert partial["output_ids"] == [5, 6, 5, 6]
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    resumed = await started(
        asyncio.ensure_future(
            second.generate("r2", [1, 2, 3, 4, 5, 6, 5, 6], {**params, "max_new_tokens": 6}, "3"),
        )
    )
    # seven tokens come from the store, the last of the prompt is always computed
    clock.advance(7 * 0.01 + 0.1 + 6 * 1.5 + 0.001)
    second.tick()
    whole = await resumed
    assert whole["meta_info"]["cached_tokens"] == 7
    assert partial["output_ids"] + whole["output_ids"] == [5, 6, 5, 6, 5, 6, 5, 6, 5, STOP]
    assert second.counters["moved_tokens"] == 7
    assert second.counters["prefill_tokens"] == 1


async def test_engine_paused_makes_no_token_and_new_version_begins_a_span():
    clock = ManualClock()
    engine = make_engine(clock)
    call = await started(asyncio.ensure_future(engine.generate("r", [1], {"max_new_tokens": 4}, "3")))
    clock.advance(0.1 + 2 * 1.5)
    engine.pause()
    clock.advance(1000.0)
    engine.set_version(4)
    engine.pause(False)
    clock.advance(2 * 1.5 + 0.001)
    engine.tick()
    spans = (await call)["meta_info"]["weight_versions"]
    assert spans == [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]


def test_prefix_cache_other_weights_never_match():
    cache = PrefixCache()
    ids = np.arange(10)
    cache.add(ids, "3")
    assert cache.known(np.arange(12), "3") == (10, 0)
    assert cache.known(np.arange(12), "4") == (0, 0)
    assert cache.known(np.array([0, 1, 7, 3]), "3") == (2, 0)
    cache.forget_before(4)
    assert cache.known(np.arange(12), "3") == (0, 0)


async def test_server_speaks_sglangs_contract_and_asks_for_its_key():
    config = EmulationConfig(compression=1000.0, engine=COSTS)
    with EmulatedServer(EmulatedEngine(config, slots=4, letters=[5, 6], version=2), api_key="secret") as server:
        async with SGLangClient(server.url, vocab_size=32, api_key="secret", timeout_s=10) as client:
            params = SamplingParams(max_new_tokens=3, stop_token_ids=(STOP,))
            generation = await client.generate([1, 2], params, rid="a", cache_salt="2")
            assert generation.output_ids.tolist() == [5, 6, STOP]
            assert generation.finish_reason is FinishReason.STOP
            again = await client.generate([1, 2, 5, 6, STOP, 7], params, rid="b", cache_salt="2")
            assert again.cached_tokens == 5
            long = asyncio.ensure_future(
                client.generate([1], SamplingParams(max_new_tokens=10**6), rid="c", cache_salt="2")
            )
            while server.engine.num_calls == 0:
                await asyncio.sleep(0.001)
            await client.abort("c")
            assert (await long).finish_reason is FinishReason.ABORT
            await client.update_weight_version(3)
            assert await client.weight_version() == 3
        assert httpx.get(f"{server.url}/model_info", trust_env=False).status_code == 401
