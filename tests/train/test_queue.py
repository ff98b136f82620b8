import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_core.clock import ManualClock
from gyre_core.train.queue import CutOffError, Lease, MicroStepQueue


def make_queue(num: int = 3) -> tuple[MicroStepQueue, ManualClock]:
    clock = ManualClock()
    return MicroStepQueue([f"m{i}" for i in range(num)], lease_s=10.0, clock=clock), clock


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
    with pytest.raises(ValueError, match="unique"):
        MicroStepQueue(["m0", "m0"], lease_s=1.0, clock=ManualClock())


def test_queue_without_micro_steps_is_closed_at_once() -> None:
    queue, _ = make_queue(0)
    assert queue.drained
    assert queue.closed
    assert queue.next_deadline_s() is None


class QueueMachine(RuleBasedStateMachine):
    """Trainers join, work, die and come late in any order; gradients are modelled as lists of micro-steps."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = make_queue(5)
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

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def wait(self, seconds) -> None:
        self.clock.advance(seconds)
        self.queue.expire()

    @invariant()
    def every_micro_step_is_somewhere_once(self) -> None:
        counts = self.queue.counts()
        assert counts.pending + counts.leased + counts.completed + counts.taken == 5
        assert len(set(self.summed)) == len(self.summed), "a micro-step was summed twice"
        assert set(self.queue.taken()) == set(self.summed)
        assert self.queue.closed == (len(self.summed) == 5)

    def teardown(self) -> None:
        """Whatever happened, one healthy trainer can always finish the step."""
        for session in list(self.buffers):
            with contextlib.suppress(CutOffError):
                self.queue.cut_off(session)
        session = self.queue.join("last")
        while lease := self.queue.claim(session):
            self.queue.complete(lease)
        self.queue.take_over(session)
        assert self.queue.closed


TestQueueMachine = QueueMachine.TestCase
