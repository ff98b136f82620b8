"""Several proxies as one: where sessions go, how slots are split, how statuses are merged."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_core.errors import ProxyError
from gyre_core.proxy.pool import (
    ProxyAddress,
    ProxyPool,
    Shards,
    merge_status,
    rendezvous_order,
    split_engines,
    split_slots,
)
from gyre_core.proxy.settings import EngineEntry

NUM_PROCESSES = st.integers(1, 64)


def make_shards(number: int) -> Shards:
    return Shards(ProxyAddress(url=f"http://127.0.0.1:{port}", secret="s") for port in range(1, number + 1))


@given(st.text(max_size=40), NUM_PROCESSES)
def test_rendezvous_order_names_each_process_once_and_survives_another_number(rollout_id: str, number: int) -> None:
    order = rendezvous_order(rollout_id, number)
    assert sorted(order) == list(range(number))
    more = rendezvous_order(rollout_id, number + 1)
    assert [index for index in more if index != number] == order


def test_rendezvous_first_choices_are_spread_and_mostly_stay() -> None:
    ids = [
        f"s{step:04d}-p{problem:02d}-{member:02d}"
        for step in range(20)
        for problem in range(10)
        for member in range(10)
    ]
    firsts = [rendezvous_order(rollout_id, 4)[0] for rollout_id in ids]
    assert all(450 < count < 550 for count in Counter(firsts).values())
    moved = sum(rendezvous_order(rollout_id, 5)[0] != first for rollout_id, first in zip(ids, firsts, strict=True))
    assert 350 < moved < 450, "one of five moves, to the new process"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), NUM_PROCESSES)
def test_split_slots_is_exact_balanced_and_leaves_nobody_out(slots: list[int], number: int) -> None:
    if sum(slots) < number:
        with pytest.raises(ValueError, match=r"lower proxy\.processes or raise rollout\.slots"):
            split_slots(slots, number)
        return
    rows = split_slots(slots, number)
    assert rows == split_slots(slots, number)
    assert [sum(column) for column in zip(*rows, strict=True)] == slots
    for column in zip(*rows, strict=True):
        assert max(column) - min(column) <= 1
    totals = [sum(row) for row in rows]
    assert max(totals) - min(totals) <= 1 and min(totals) >= 1


def test_split_slots_of_no_engine_and_of_one_process() -> None:
    assert split_slots([], 3) == [[], [], []]
    assert split_slots([5, 2], 1) == [[5, 2]]
    assert split_slots([1, 1, 1], 3) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_split_engines_leaves_out_an_engine_without_a_slot_and_keeps_its_key() -> None:
    engines = [EngineEntry(url=f"http://e{i}", slots=i + 1, api_key=f"key-{i}") for i in range(2)]
    first, second = split_engines(engines, 7, 2)
    assert [(engine.url, engine.slots, engine.api_key) for engine in first.engines] == [
        ("http://e0", 1, "key-0"),
        ("http://e1", 1, "key-1"),
    ]
    assert [(engine.url, engine.slots) for engine in second.engines] == [("http://e1", 1)]
    assert first.policy_version == second.policy_version == 7


@given(
    st.lists(st.one_of(st.text(min_size=1, max_size=8), st.integers(0, 100)), max_size=80),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_place_never_gives_a_process_more_than_its_part(events: list[str | int], number: int, more: int) -> None:
    shards = make_shards(number)
    slots = number + more
    updates = split_engines([EngineEntry(url="http://e", slots=slots)], 0, number)
    shards.record_engines(updates)
    shards.record_engines(split_engines([], 0, number))  # engines that are away do not change the parts
    sessions: list[str] = []
    for at, event in enumerate(events):
        if isinstance(event, str):
            index = shards.place(event)
            shards.opened(f"session-{at}", index)
            sessions.append(f"session-{at}")
            assert shards.find(f"session-{at}") == index
            part = updates[index].engines[0].slots
            assert shards.open_sessions[index] <= -(-len(sessions) * part // slots)
            if len(sessions) <= slots:
                assert shards.open_sessions[index] <= part, "as many sessions as slots: none shares a slot"
        elif sessions:
            session_id = sessions.pop(event % len(sessions))
            shards.closed(session_id)
            shards.closed(session_id)  # twice is no error
            assert shards.find(session_id) is None
    assert sum(shards.open_sessions) == len(sessions)


def test_place_of_a_rollout_alone_is_its_first_choice() -> None:
    for number in range(1, 9):
        assert make_shards(number).place("s0003-p07-02") == rendezvous_order("s0003-p07-02", number)[0]


async def test_pool_of_dead_proxies_gives_places_back_and_says_why() -> None:
    shards = make_shards(2)  # nobody listens on ports 1 and 2
    async with ProxyPool(shards) as pool:
        with pytest.raises(ProxyError, match="does not answer") as refusal:
            await pool.create_session(rollout_id="r1")
        assert refusal.value.retryable
        assert shards.open_sessions == [0, 0]
        for index in range(2):
            shards.lose(index, f"proxy-{index} ended for good")
        with pytest.raises(ProxyError, match=r"proxy-. ended for good"):
            await pool.create_session(rollout_id="r1")
        with pytest.raises(ProxyError, match="ended for good"):
            await pool.status()
        with pytest.raises(ProxyError, match="no proxy of this run has a session x"):
            await pool.seal("x")
        await pool.delete("x")
    with pytest.raises(ProxyError, match="ended for good"):
        shards.check()


async def test_pool_too_few_slots_are_refused_before_anybody_is_told() -> None:
    async with ProxyPool(make_shards(3)) as pool:
        with pytest.raises(ProxyError, match="2 slots cannot serve 3 proxy processes"):
            await pool.set_engines([EngineEntry(url="http://e", slots=2)], 1)
        await pool.repeat_engines(0)  # nothing to repeat: no call is made


def test_merge_status_sums_numbers_and_keeps_each_process() -> None:
    rows = [
        {
            "sessions": i + 1,
            "policy_version": 3 - i,
            "engines": [{"url": "http://e", "slots": 2, "busy": i, "residents": 3, "version": 4 - i, "rank": 2}],
            "speed": [1.0 + i, 2.0],
            "counters": {"calls_resumed": 1, f"only_{i}": 1},
        }
        for i in range(2)
    ]
    merged = merge_status(rows, [0, 4])
    assert (merged["sessions"], merged["policy_version"], merged["restarts"]) == (3, 2, 4)
    assert merged["engines"] == [{"url": "http://e", "slots": 4, "busy": 1, "residents": 6, "version": 3, "rank": 2}]
    assert merged["speed"] == [3.0, 4.0]
    assert merged["counters"] == {"calls_resumed": 2, "only_0": 1, "only_1": 1}
    assert [(row["sessions"], row["restarts"]) for row in merged["processes"]] == [(1, 0), (2, 4)]
