import contextlib
import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_core.clock import ManualClock
from gyre_core.train.queue import CutOffError, Lease, MicroStepQueue
from gyre_core.train.queue_rates import LeaseRule


def make_queue(num: int = 3, *, seal: bool = True, silence_s: float = math.inf) -> tuple[MicroStepQueue, ManualClock]:
    clock = ManualClock()
    queue = MicroStepQueue(clock=clock, rule=LeaseRule(min_s=10.0, slack=2.0), silence_s=silence_s)
    for index in range(num):
        queue.add(f"m{index}")
    if seal:
        queue.seal()
    return queue, clock


def test_queue_one_trainer_takes_all_in_order() -> None:
    queue, _ = make_queue()
    session = queue.join("cell-0")
    done = []
    while lease := queue.claim(session):
        done.append((lease.micro_step_id, lease.attempt, lease.deadline_s))
        queue.complete(lease)
    assert done == [("m0", 1, 10.0), ("m1", 1, 10.0), ("m2", 1, 10.0)]
    assert queue.drained
    assert not queue.closed
    assert queue.take_over(session) == ("m0", "m1", "m2")
    assert queue.closed
    assert queue.taken() == {"m0": "cell-0#1", "m1": "cell-0#1", "m2": "cell-0#1"}


def test_queue_late_trainer_loses_everything_it_did() -> None:
    queue, clock = make_queue()
    slow, quick = queue.join("slow"), queue.join("quick")
    first = queue.claim(slow)
    assert first
    queue.complete(first)
    second = queue.claim(slow)
    assert second
    clock.advance(10.0)
    assert queue.expire() == (slow,)
    with pytest.raises(CutOffError, match="clear the gradient and join again"):
        queue.complete(second)
    with pytest.raises(CutOffError):
        queue.take_over(slow)
    order = []
    while lease := queue.claim(quick):
        order.append((lease.micro_step_id, lease.attempt))
        queue.complete(lease)
    assert order == [("m0", 2), ("m1", 2), ("m2", 1)]  # what came back goes first
    queue.take_over(quick)
    assert set(queue.taken().values()) == {quick}
    assert queue.counts().requeued == 2


def test_queue_repeated_completion_counts_once() -> None:
    queue, _ = make_queue(2)
    session = queue.join("cell-0")
    lease = queue.claim(session)
    assert lease
    queue.complete(lease)
    queue.complete(lease)
    assert queue.counts().completed == 1
    queue.claim(session)
    queue.complete(lease)  # still only the first one
    assert queue.counts().leased == 1


def test_queue_taken_micro_steps_survive_the_trainers_death() -> None:
    queue, _ = make_queue(2)
    session = queue.join("cell-1")
    lease = queue.claim(session)
    assert lease
    queue.complete(lease)
    queue.take_over(session)
    with pytest.raises(CutOffError):
        queue.cut_off(session)
    assert queue.counts().taken == 1
    assert queue.counts().pending == 1


def test_queue_open_lease_forbids_a_second_claim_and_a_take_over() -> None:
    queue, _ = make_queue()
    session = queue.join("cell-0")
    queue.claim(session)
    with pytest.raises(ValueError, match="must complete m0"):
        queue.claim(session)
    with pytest.raises(ValueError, match="its gradient is not whole"):
        queue.take_over(session)


def test_queue_forged_lease_is_refused() -> None:
    queue, _ = make_queue()
    session = queue.join("cell-0")
    with pytest.raises(CutOffError, match="m2 is not leased"):
        queue.complete(Lease(micro_step_id="m2", session=session, attempt=1, deadline_s=10.0))


def test_queue_duplicate_ids_are_refused() -> None:
    queue, _ = make_queue(1, seal=False)
    with pytest.raises(ValueError, match="unique"):
        queue.add("m0")


def test_queue_without_micro_steps_is_closed_at_once() -> None:
    queue, _ = make_queue(0)
    assert queue.drained
    assert queue.closed
    assert queue.next_deadline_s() is None


def test_queue_grows_while_it_is_open_and_is_not_drained_before_it_is_sealed() -> None:
    queue, _ = make_queue(0, seal=False)
    session = queue.join("cell-0")
    assert queue.claim(session) is None
    assert not queue.drained
    queue.add("g0", 100)
    lease = queue.claim(session)
    assert lease is not None
    queue.complete(lease)
    assert not queue.drained
    queue.seal()
    queue.seal()
    assert queue.drained
    with pytest.raises(ValueError, match="sealed"):
        queue.add("g1")


def test_queue_deadline_grows_with_tokens_and_with_the_trainers_own_slowness() -> None:
    queue, clock = make_queue(0, seal=False)
    for name, tokens in (("short", 1000), ("warm", 1000), ("long", 100_000), ("again", 100_000)):
        queue.add(name, tokens)
    quick, slow = queue.join("quick"), queue.join("slow")
    first, second = queue.claim(quick), queue.claim(slow)
    assert first is not None and second is not None
    assert first.deadline_s == 10.0 + 2.0 * 1000 / 100.0  # nothing measured yet
    clock.advance(1.0)
    queue.complete(first)
    clock.advance(9.0)
    queue.complete(second)
    assert queue.rates.all() == {"quick": 1000.0, "slow": 100.0}
    long, again = queue.claim(quick), queue.claim(slow)
    assert long is not None and again is not None
    assert long.deadline_s == 10.0 + 10.0 + 2.0 * 100
    assert again.deadline_s == 10.0 + 10.0 + 2.0 * 1000
    clock.advance(500.0)
    assert queue.expire() == (quick,)
    retry = queue.claim(queue.join("newcomer"))
    assert retry is not None and retry.attempt == 2
    assert retry.deadline_s - clock.monotonic_s() == 2 * (10.0 + 2.0 * 1000 / 100)  # as slow as the slowest, doubled


def test_queue_owner_has_no_deadline() -> None:
    queue, clock = make_queue(1)
    owner = queue.join("core", owner=True)
    lease = queue.claim(owner)
    clock.advance(1e9)
    assert queue.expire() == ()
    assert queue.next_deadline_s() is None
    assert lease is not None
    queue.complete(lease)
    assert queue.take_over(owner) == ("m0",)


def test_queue_failed_micro_step_is_for_the_owner_alone() -> None:
    queue, _ = make_queue(2)
    satellite, owner = queue.join("cell-1"), queue.join("core", owner=True)
    first = queue.claim(satellite)
    assert first is not None
    queue.complete(first)
    second = queue.claim(satellite)
    assert second is not None
    assert queue.fail(second) == ("m0", "m1")  # the buffer held both
    with pytest.raises(CutOffError):
        queue.fail(second)
    again = queue.join("cell-1")
    lease = queue.claim(again)
    assert lease is not None and lease.micro_step_id == "m0"
    queue.complete(lease)
    assert queue.claim(again) is None
    assert not queue.drained
    lease = queue.claim(owner)
    assert lease is not None and lease.micro_step_id == "m1"
    assert queue.counts().failed == 1


def test_queue_silent_session_without_a_lease_is_cut_off() -> None:
    queue, clock = make_queue(2, silence_s=5.0)
    silent, present, busy = queue.join("silent"), queue.join("present"), queue.join("busy")
    done = queue.claim(silent)
    assert done is not None
    queue.complete(done)
    assert queue.claim(busy) is not None
    clock.advance(4.0)
    queue.seen(present)
    assert queue.next_deadline_s() == 5.0
    clock.advance(1.0)
    assert queue.expire() == (silent,)
    assert queue.ended(silent) == "cut_off"
    with pytest.raises(CutOffError):
        queue.seen(silent)
    assert queue.pending() == (("m0", 0),)


def test_queue_split_keeps_the_place_and_only_pending_ones_can_be_split() -> None:
    queue, _ = make_queue(3)
    lease = queue.claim(queue.join("cell-0"))
    assert lease is not None
    queue.split("m1", [("m1.0", 5), ("m1.1", 6)])
    assert queue.pending() == (("m1.0", 5), ("m1.1", 6), ("m2", 0))
    for wrong in ("m0", "m1", "m9"):
        with pytest.raises(ValueError, match="not pending"):
            queue.split(wrong, [("x", 1)])
    with pytest.raises(ValueError, match="nothing"):
        queue.split("m2", [])
    with pytest.raises(ValueError, match="unique"):
        queue.split("m2", [("m1.0", 1)])


class QueueMachine(RuleBasedStateMachine):
    """Trainers join, work, die and come late in any order; gradients are modelled as lists of micro-steps."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = make_queue(5, seal=False, silence_s=9.0)
        self.num = 5
        self.buffers: dict[str, list[str]] = {}  # what each session's gradient holds
        self.leases: dict[str, Lease] = {}
        self.summed: list[str] = []  # what the owner's gradient holds

    @rule()
    def join(self) -> None:
        if len(self.buffers) < 4:
            self.buffers[self.queue.join("cell")] = []

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def claim(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.buffers)))
        if session not in self.leases:
            try:
                lease = self.queue.claim(session)
            except CutOffError:
                del self.buffers[session]
                return
            if lease:
                self.leases[session] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def complete(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(session)
        self.buffers[session].append(lease.micro_step_id)
        try:
            self.queue.complete(lease)
            self.queue.complete(lease)
        except CutOffError:
            del self.buffers[session]

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def take_over(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.buffers)))
        if session in self.leases:
            return
        try:
            ids = self.queue.take_over(session)
        except CutOffError:
            del self.buffers[session]
            return
        assert sorted(ids) == sorted(self.buffers[session])
        self.summed += self.buffers.pop(session)

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def die(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.buffers)))
        self.buffers.pop(session)
        self.leases.pop(session, None)
        with contextlib.suppress(CutOffError):
            self.queue.cut_off(session)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data) -> None:
        session = data.draw(st.sampled_from(sorted(self.leases)))
        self.buffers.pop(session)
        with contextlib.suppress(CutOffError):
            self.queue.fail(self.leases.pop(session))

    @precondition(lambda self: not self.queue.sealed)
    @rule()
    def add(self) -> None:
        self.queue.add(f"m{self.num}", 10)
        self.num += 1

    @precondition(lambda self: self.queue.pending())
    @rule(data=st.data())
    def split(self, data) -> None:
        micro_step, _ = data.draw(st.sampled_from(self.queue.pending()))
        self.queue.split(micro_step, [(f"{micro_step}.{part}", 1) for part in range(2)])
        self.num += 1

    @rule()
    def seal(self) -> None:
        self.queue.seal()

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, seconds) -> None:
        self.clock.advance(seconds)
        self.queue.expire()

    @invariant()
    def every_micro_step_is_somewhere_once(self) -> None:
        counts = self.queue.counts()
        assert counts.pending + counts.leased + counts.completed + counts.taken == self.num
        assert len(set(self.summed)) == len(self.summed), "a micro-step was summed twice"
        assert set(self.queue.taken()) == set(self.summed)
        assert self.queue.closed == (self.queue.sealed and len(self.summed) == self.num)

    def teardown(self) -> None:
        """Whatever happened, one healthy trainer can always finish the step."""
        for session in list(self.buffers):
            with contextlib.suppress(CutOffError):
                self.queue.cut_off(session)
        self.queue.seal()
        session = self.queue.join("last", owner=True)
        while lease := self.queue.claim(session):
            self.queue.complete(lease)
        self.queue.take_over(session)
        assert self.queue.closed


TestQueueMachine = QueueMachine.TestCase
