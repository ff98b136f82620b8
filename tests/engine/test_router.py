"""Who gets which slot: the rules as pure transitions, and the asyncio shell around them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.clock import ManualClock
from gyre_core.engine.router import FIRST_BACKOFF_S, MAX_BACKOFF_S, EngineSlot, Grant, Router, RouterState, backoff_s

A, B = "http://a", "http://b"


def state_of(**slots: int) -> RouterState:
    state = RouterState()
    state.set_engines([EngineSlot(url=f"http://{name}", slots=num) for name, num in slots.items()], version=1)
    return state


def ask(state: RouterState, *sessions: str, now_s: float = 0.0) -> list[tuple[str, str]]:
    """Ask for slots; returns what was granted as (session, url)."""
    for session in sessions:
        state.enqueue(session)
    return [(grant.session_id, grant.url) for grant in state.grants(now_s)]


def test_calls_go_to_the_engine_with_most_free_slots() -> None:
    assert ask(state_of(a=1, b=2), "s", "t", "u") == [("s", B), ("t", A), ("u", B)]


def test_session_returns_to_its_engine_while_it_has_a_slot() -> None:
    state = state_of(a=2, b=5)
    state.sticky["s"] = A
    assert ask(state, "s", "s", "s") == [("s", A), ("s", A), ("s", B)]


def test_slots_are_never_exceeded_and_waiting_calls_are_served_in_order() -> None:
    state = state_of(a=1)
    assert ask(state, "s", "t", "u") == [("s", A)]
    state.release(Grant(ticket=0, session_id="s", url=A, version=1))
    assert ask(state) == [("t", A)]


def test_no_engine_no_grant_and_the_version_is_the_one_at_the_grant() -> None:
    state = RouterState()
    assert ask(state, "s") == []
    state.set_engines([EngineSlot(url=A, slots=1)], version=7)
    (grant,) = state.grants(0.0)
    assert (grant.session_id, grant.version) == ("s", 7)


def test_engine_that_leaves_and_returns_keeps_count_of_what_it_runs() -> None:
    state = state_of(a=2)
    ask(state, "s", "t")
    state.set_engines([], version=1)
    assert ask(state, "u") == []
    state.set_engines([EngineSlot(url=A, slots=2)], version=2)
    assert ask(state) == []
    state.release(Grant(ticket=0, session_id="s", url=A, version=1))
    assert ask(state) == [("u", A)]


def test_failed_engine_rests_longer_each_time_and_is_forgiven_by_a_success() -> None:
    state = state_of(a=1)
    rests = []
    for _ in range(8):
        state.failed(A, 100.0)
        rests.append(state.engines[A].not_before_s - 100.0)
    assert rests[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S] and rests[-1] == MAX_BACKOFF_S
    assert ask(state, "s", now_s=100.0) == []
    assert state.next_change_s(100.0) == 100.0 + MAX_BACKOFF_S
    assert ask(state, now_s=100.0 + MAX_BACKOFF_S) == [("s", A)]
    state.succeeded(A)
    assert state.engines[A].failures == 0


def test_failed_engine_leaves_calls_to_the_others() -> None:
    state = state_of(a=4, b=1)
    state.sticky["s"] = A
    state.failed(A, 0.0)
    assert ask(state, "s", "t") == [("s", B)]


@pytest.mark.parametrize(("url", "slots"), [("", 1), (A, 0)])
def test_engine_without_url_or_slots_is_refused(url: str, slots: int) -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        EngineSlot(url=url, slots=slots)


@given(st.lists(st.tuples(st.sampled_from("arsefx"), st.integers(0, 3)), max_size=60))
def test_busy_slots_always_equal_the_grants_out(operations: list[tuple[str, int]]) -> None:
    """Whatever happens, an engine runs what was granted on it, never more than its slots, and nothing is lost."""
    state = RouterState()
    out: list[Grant] = []
    asked = withdrawn = served = 0
    slots = {A: 2, B: 1}
    for now_s, (operation, number) in enumerate(operations):
        if operation == "a":
            state.enqueue(f"s{number}")
            asked += 1
        elif operation == "r" and out:
            state.release(out.pop(number % len(out)))
        elif operation == "s":
            listed = [url for bit, url in enumerate(slots) if number >> bit & 1]
            state.set_engines([EngineSlot(url=url, slots=slots[url]) for url in listed], version=number)
        elif operation == "e" and state.waiting:
            state.withdraw(next(iter(state.waiting)))
            withdrawn += 1
        elif operation == "f":
            state.failed((A, B)[number % 2], now_s)
        granted = state.grants(now_s)
        served += len(granted)
        out += granted
        for url, limit in slots.items():
            running = sum(grant.url == url for grant in out)
            assert running <= limit
            assert (state.engines[url].busy if url in state.engines else 0) == running
        assert asked == withdrawn + served + len(state.waiting)


async def test_router_wakes_who_waits_when_a_slot_returns() -> None:
    router = Router(ManualClock())
    router.set_engines([EngineSlot(url=A, slots=1)], version=1)
    first = await router.acquire("s")
    second = asyncio.create_task(router.acquire("t"))
    await asyncio.sleep(0)
    assert not second.done()
    router.release(first)
    assert (await second).session_id == "t"


async def test_router_forgets_who_gives_up() -> None:
    router = Router(ManualClock())
    waiting = asyncio.create_task(router.acquire("s"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    router.set_engines([EngineSlot(url=A, slots=1)], version=1)
    assert router.state.engines[A].busy == 0 and not router.state.waiting


async def test_slot_granted_to_a_call_that_is_cancelled_meanwhile_comes_back() -> None:
    router = Router(ManualClock())
    waiting = asyncio.create_task(router.acquire("s"))
    await asyncio.sleep(0)
    router.set_engines([EngineSlot(url=A, slots=1)], version=1)  # granted, not yet awoken
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert router.state.engines[A].busy == 0


async def test_router_asks_a_resting_engine_again_by_itself() -> None:
    router = Router()
    router.set_engines([EngineSlot(url=A, slots=1)], version=1)
    router.release(await router.acquire("s"), failed=True)
    async with asyncio.timeout(5):
        assert (await router.acquire("s")).url == A


def test_outage_of_thousands_of_tries_keeps_the_longest_rest() -> None:
    assert [backoff_s(n) for n in (0, 1, 5, 6, 10_000)] == [0.25, 0.5, 8.0, 8.0, 8.0]
