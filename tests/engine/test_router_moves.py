"""The router when calls move: a model of calls and engines runs beside `RouterState`; the rules hold at each step."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre_core.clock import ManualClock
from gyre_core.engine.router import FIRST_BACKOFF_S, TRIAL_S, EngineSlot, Grant, Router, RouterState

A, B, C = "http://a", "http://b", "http://c"
SLOTS = {A: 3, B: 2, C: 1}
URLS = st.sampled_from(sorted(SLOTS))
NUMBERS = st.integers(0, 20)


def listed(*urls: str, version: int = 1, ranks: dict[str, int] | None = None) -> list[EngineSlot]:
    return [EngineSlot(url=url, slots=SLOTS[url], version=version, rank=(ranks or {}).get(url, 0)) for url in urls]


def state_of(*urls: str, **fields: dict[str, int]) -> RouterState:
    state = RouterState()
    state.set_engines(listed(*urls, **fields), 1)  # pyright: ignore[reportArgumentType]
    return state


def start(state: RouterState, *sessions: str) -> list[Grant]:
    for session in sessions:
        state.enqueue(session)
    return state.grants(0.0)


def test_drain_holds_slots_elsewhere_that_new_calls_cannot_take() -> None:
    state = state_of(B, C)
    first, second, third = start(state, "r", "s", "t")
    assert [grant.url for grant in (first, second, third)] == [B, B, C]
    state.release(third)
    assert state.drain(B) == (first, second)
    assert start(state, "new") == []
    assert state.reserved[first.ticket].url == C, "the first one's slot is held while it still runs on B"
    assert (state.engines[B].busy, state.engines[C].busy) == (2, 1)
    state.release(first)
    assert state.claim(first.ticket) == state.running[first.ticket]
    state.release(second)
    assert state.claim(second.ticket) is None
    assert state.enqueue("s", second.ticket) == second.ticket
    state.release(state.running[first.ticket])
    assert [grant.session_id for grant in state.grants(0.0)] == ["s"], "the moved call goes before the new one"


def test_call_that_ends_on_the_drained_engine_gives_back_what_was_held() -> None:
    state = state_of(B, C)
    (grant,) = start(state, "s")
    state.drain(B)
    state.grants(0.0)
    assert state.engines[C].busy == 1 and state.moving(grant)
    state.release(grant)
    state.withdraw(grant.ticket)
    assert state.engines[C].busy == 0 and not state.waiting and not state.reserved
    assert state.residents() == {B: 1}, "the session was never on C"


def test_moved_calls_prefer_the_engine_that_stays_longest_new_ones_the_emptiest() -> None:
    state = RouterState()
    state.set_engines(listed(A, B, C, ranks={B: 1, C: 9}), 1)
    grants = start(state, "r", "s")
    assert [grant.url for grant in grants] == [A, A]
    state.drain(A)
    state.grants(0.0)
    assert [state.reserved[grant.ticket].url for grant in grants] == [C, B]
    assert [grant.url for grant in start(state, "new")] == [B]


def test_drain_of_an_engine_with_held_slots_gives_them_out_anew() -> None:
    state = state_of(A, B, C)
    (grant,) = start(state, "s")
    state.drain(A)
    state.grants(0.0)
    assert state.reserved[grant.ticket].url == B
    assert state.drain(B) == (), "no call runs there yet"
    state.grants(0.0)
    assert (state.reserved[grant.ticket].url, state.engines[B].busy, state.engines[C].busy) == (C, 0, 1)
    state.failed(C, 0.0)
    assert not state.reserved and state.grants(0.0) == [], "a slot on an engine that failed is no slot"


def test_engine_versions_show_in_grants_and_the_lists_is_the_default() -> None:
    state = RouterState()
    state.set_engines([EngineSlot(url=A, slots=1, version=3), EngineSlot(url=B, slots=1)], 7)
    assert sorted((grant.url, grant.version) for grant in start(state, "s", "t")) == [(A, 3), (B, 7)]


def test_calls_that_fail_together_are_one_failure() -> None:
    state = state_of(A)
    grants = start(state, "r", "s", "t")
    for grant in grants:
        state.release(grant)
        state.failed(A, 5.0, grant.granted_s)
    assert (state.engines[A].failures, state.engines[A].not_before_s) == (1, 5.0 + FIRST_BACKOFF_S)


def test_engine_that_failed_is_tried_by_one_call_then_by_twice_as_many_until_one_succeeds() -> None:
    state = RouterState()
    state.set_engines([EngineSlot(url=A, slots=16)], 1)
    state.failed(A, 0.0)
    for number in range(16):
        state.enqueue(f"s{number}")
    given = []
    now_s = FIRST_BACKOFF_S
    for _ in range(4):
        given.append(len(state.grants(now_s)))
        assert state.grants(now_s) == []
        assert state.next_change_s(now_s) == now_s + TRIAL_S
        now_s += TRIAL_S
    assert given == [1, 2, 4, 8]
    state.succeeded(A)
    assert len(state.grants(now_s)) == 1


class Moves(RuleBasedStateMachine):
    """Calls arrive, run, end and move; engines come, are drained, fail and change their version."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RouterState()
        self.now_s = 0.0
        self.listed: dict[str, int] = {}  # url -> version, of the engines that take calls
        self.running: dict[int, Grant] = {}
        self.leaving: set[int] = set()  # tickets that run on an engine that was drained
        self.queued: dict[int, str] = {}  # tickets whose calls wait -> session
        self.last: dict[str, str] = {}  # session -> engine

    def dispatch(self) -> None:
        held = set(self.state.reserved)
        granted = self.state.grants(self.now_s)
        for grant in granted:
            assert self.queued.pop(grant.ticket) == grant.session_id
            self.begin(grant)
        new = [grant.ticket for grant in granted] + [t for t in self.state.reserved if t not in held]
        assert not self.state.waiting or max(new, default=-1) < min(self.state.waiting), "nobody was overtaken"
        for grant in [*granted, *(g for t, g in self.state.reserved.items() if t not in held)]:
            assert grant.url in self.listed and grant.version == self.listed[grant.url]
        if self.state.waiting:
            free = [engine.free(self.now_s) for engine in self.state.engines.values()]
            assert max(free, default=0) <= 0, "nobody waits while a slot is free"

    def begin(self, grant: Grant) -> None:
        self.running[grant.ticket] = grant
        self.last[grant.session_id] = grant.url

    def pick(self, number: int) -> Grant | None:
        tickets = sorted(self.running)
        return self.running[tickets[number % len(tickets)]] if tickets else None

    @rule(sessions=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def arrive(self, sessions: list[int]) -> None:
        for session in sessions:
            ticket = self.state.enqueue(f"s{session}")
            assert ticket > max([*self.running, *self.queued], default=-1)
            self.queued[ticket] = f"s{session}"
        self.dispatch()

    @rule(number=NUMBERS)
    def finish(self, number: int) -> None:
        if (grant := self.pick(number)) is not None:
            self.state.release(grant)
            self.state.succeeded(grant.url)
            self.state.withdraw(grant.ticket)
            del self.running[grant.ticket]
            self.leaving.discard(grant.ticket)
            self.dispatch()

    @rule(number=NUMBERS, fails=st.booleans())
    def interrupt(self, number: int, fails: bool) -> None:
        """A call leaves its engine with its part: the drain told it, or the engine failed."""
        if (grant := self.pick(number)) is None:
            return
        assert self.state.moving(grant) == (grant.ticket in self.leaving)
        del self.running[grant.ticket]
        self.leaving.discard(grant.ticket)
        self.state.release(grant)
        if fails:
            self.state.failed(grant.url, self.now_s, grant.granted_s)
        self.dispatch()
        held = self.state.claim(grant.ticket)
        if held is not None:
            self.begin(held)
        else:
            assert self.state.enqueue(grant.session_id, grant.ticket) == grant.ticket
            self.queued[grant.ticket] = grant.session_id
        self.dispatch()

    @rule(number=NUMBERS)
    def give_up(self, number: int) -> None:
        if self.queued:
            ticket = sorted(self.queued)[number % len(self.queued)]
            del self.queued[ticket]
            self.state.withdraw(ticket)
            self.dispatch()

    @rule(number=NUMBERS)
    def drain_an_engine_with_calls(self, number: int) -> None:
        if (grant := self.pick(number)) is not None:
            self.drain(grant.url)

    @rule(number=NUMBERS)
    def drain_an_engine_with_held_slots(self, number: int) -> None:
        if held := sorted({grant.url for grant in self.state.reserved.values()}):
            self.drain(held[number % len(held)])

    @rule(url=URLS)
    def drain(self, url: str) -> None:
        told = self.state.drain(url)
        assert {grant.ticket for grant in told} == {t for t, grant in self.running.items() if grant.url == url}
        self.leaving |= {grant.ticket for grant in told}
        self.listed.pop(url, None)
        self.dispatch()

    @initialize()
    def list_all(self) -> None:
        self.set_engines(set(SLOTS), 1, 0)

    @rule(urls=st.sets(URLS), version=st.integers(1, 3), rank=st.integers(0, 2))
    def set_engines(self, urls: set[str], version: int, rank: int) -> None:
        self.state.set_engines(listed(*sorted(urls), version=version, ranks={B: rank}), version)
        self.listed = dict.fromkeys(urls, version)
        self.dispatch()

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.3, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.dispatch()

    @rule(session=st.integers(0, 5))
    def seal(self, session: int) -> None:
        name = f"s{session}"
        if name not in self.queued.values() and all(grant.session_id != name for grant in self.running.values()):
            self.state.forget(name)
            self.last.pop(name, None)

    @invariant()
    def slots_are_hard_limits_and_counts_are_right(self) -> None:
        state = self.state
        taken = Counter(grant.url for grant in [*self.running.values(), *state.reserved.values()])
        assert state.running == self.running
        for url, slots in SLOTS.items():
            assert taken[url] <= slots
            assert (state.engines[url].busy if url in state.engines else 0) == taken[url]
        for grant in state.reserved.values():
            assert grant.version == self.listed[grant.url], "slots are held on engines that take calls"

    @invariant()
    def every_call_is_in_its_place(self) -> None:
        state = self.state
        assert state.order == sorted(state.waiting)
        assert not state.waiting.keys() & state.reserved.keys()
        assert {t for t, wait in state.waiting.items() if not wait.held} == set(self.queued)
        assert {t for t, wait in state.waiting.items() if wait.held} | set(state.reserved) == self.leaving

    @invariant()
    def residents_are_the_sessions_by_their_last_engine(self) -> None:
        assert self.state.residents() == Counter(self.last.values())

    def teardown(self) -> None:
        """Nobody starves: with engines that work, each waiting call is served after at most as many that end before."""
        self.state.set_engines(listed(A, B, C), 1)
        self.listed = dict.fromkeys(SLOTS, 1)
        self.dispatch()
        for _ in range(len(self.running) + len(self.queued)):
            if self.running:
                oldest = self.running[min(self.running)]
                self.finish(sorted(self.running).index(oldest.ticket))
        assert not self.running and not self.queued and not self.state.reserved


Moves.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestMoves = Moves.TestCase


async def test_router_gives_a_moved_call_the_slot_that_was_held() -> None:
    router = Router(ManualClock())
    router.set_engines(listed(B), 1)
    grant = await router.acquire("s")
    assert router.drain(B) == (grant,)
    router.set_engines(listed(C), 1)
    router.release(grant, failed=None)
    moved = await router.acquire("s", grant.ticket)
    assert (moved.ticket, moved.url) == (grant.ticket, C)
    router.release(moved)
    router.leave(moved.ticket)
    assert router.state.engines[C].busy == 0


@pytest.mark.parametrize("held", [True, False])
async def test_call_that_ends_while_it_moves_leaves_nothing(held: bool) -> None:
    router = Router(ManualClock())
    router.set_engines(listed(B, C) if held else listed(B), 1)
    grant = await router.acquire("s")
    router.drain(B)
    assert bool(router.state.reserved) == held
    router.release(grant)
    router.leave(grant.ticket)
    state = router.state
    assert not state.waiting and not state.reserved and not state.running
    assert sum(engine.busy for engine in state.engines.values()) == 0
