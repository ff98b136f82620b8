"""A step's queue with its data: packing, the account, hand-over rules, and the journal that survives its owner."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_core.clock import ManualClock
from gyre_core.errors import TrainError
from gyre_core.train.queue import CutOffError, Lease
from gyre_core.train.queue_rates import LeaseRule, Rates
from gyre_core.train.queue_records import QueueRules, StaleStepError, StepAccount, StepIdentity, Work
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.branches import branches_from_ipc
from gyre_core.transfer.gradients import BufferOffer
from tests.support.members import group
from tests.support.training import make_branch

IDENTITY = StepIdentity(step=3, policy_version=3, weights="w3")
RULES = QueueRules(micro_step_tokens=16, tail_tokens=4, lease=LeaseRule(min_s=10.0, slack=0.0), silence_s=8.0)


def make(folder: Path | None = None, *, clock: ManualClock | None = None, rates: Rates | None = None) -> StepQueue:
    return StepQueue(IDENTITY, RULES, journal_folder=folder, clock=clock or ManualClock(), rates=rates)


def join(queue: StepQueue, name: str = "cell-1") -> str:
    return queue.join(name, policy_version=3, weights="w3")


def work(queue: StepQueue, session: str) -> Lease:
    found = queue.claim(session)
    assert isinstance(found, Work), found
    return found.lease


def compute(queue: StepQueue, session: str) -> str:
    lease = work(queue, session)
    queue.complete(lease, {"loss": 1.0})
    return lease.micro_step_id


def offer(session: str) -> BufferOffer:
    return BufferOffer(kind="shared_memory", where="b", address=0, size_bytes=4, checksum="c", label=session)


def finish_alone(queue: StepQueue) -> None:
    """The owner does all that is left and takes over whoever has offered."""
    while (found := queue.owner_next()) != "closed":
        assert found is not None, queue.status()
        if isinstance(found, Work):
            queue.complete(found.lease, {"loss": 1.0})
        else:
            for take in found:
                queue.taken(take.session)


def test_step_groups_become_micro_steps_that_fit_and_hold_every_branch_once() -> None:
    queue = make()
    groups = {name: group(name, rollouts=5) for name in ("g0", "g1")}
    for name, branches in groups.items():
        assert queue.add_group(name, branches) == (f"{name}.0", f"{name}.1", f"{name}.2")
    queue.seal()
    seen = []
    while isinstance(found := queue.owner_next(), Work):
        branches = branches_from_ipc(found.body)
        assert sum(len(branch.token_ids) for branch in branches) <= 16
        seen += [(branch.rollout_id, branch.branch) for branch in branches]
        queue.complete(found.lease, {"loss": 2.0})
    assert found == "closed"
    assert sorted(seen) == sorted((b.rollout_id, b.branch) for branches in groups.values() for b in branches)
    account = queue.account()
    assert account.stats["loss"] == 12.0
    assert set(account.groups) == {"g0", "g1"}
    assert sorted(account.taken) == sorted(name for steps in account.groups.values() for name in steps)


def test_step_group_without_signal_counts_and_has_no_micro_step() -> None:
    queue = make()
    assert queue.add_group("flat", [make_branch([1, 2, 3], [1, 2], advantage=0.0)]) == ()
    queue.seal()
    assert queue.owner_next() == "closed"
    assert queue.account().groups == {"flat": ()}


def test_step_known_group_and_sealed_step_refuse() -> None:
    queue = make()
    queue.add_group("g0", group("g0"))
    with pytest.raises(ValueError, match="already"):
        queue.add_group("g0", group("g0"))
    queue.seal()
    with pytest.raises(ValueError, match="sealed"):
        queue.add_group("g1", group("g1"))
    with pytest.raises(TrainError, match="not closed"):
        queue.account()


def test_step_tail_is_split_for_several_members_and_the_account_lists_the_parts() -> None:
    queue = make(rates=Rates({"core": 100.0, "cell-1": 100.0}))
    join(queue)
    queue.add_group("g0", group("g0", rollouts=2))
    queue.seal()
    assert queue.status()["pending"] == 2  # the one micro-step of two rollouts
    finish_alone(queue)
    assert queue.account().groups == {"g0": ("g0.0.0", "g0.0.1")}


def test_step_stale_weights_may_not_join() -> None:
    queue = make()
    for version, weights in ((2, "w3"), (3, "w2")):
        with pytest.raises(StaleStepError, match="pull the weights"):
            queue.join("cell-1", policy_version=version, weights=weights)
    with pytest.raises(ValueError, match="owner's name"):
        join(queue, "core")
    queue.abort("refused")
    with pytest.raises(StaleStepError, match="over"):
        join(queue)


def test_step_member_hands_over_when_all_is_done_and_is_taken_in_order() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=6))
    first, second = join(queue, "cell-1"), join(queue, "cell-2")
    done = {second: [compute(queue, second)], first: [compute(queue, first)]}
    own = queue.owner_next()
    assert isinstance(own, Work)
    assert queue.claim(first) is None  # open: more may come
    queue.seal()
    assert queue.claim(first) is None  # the owner computes: its death would bring work back
    queue.complete(own.lease, {})
    assert queue.claim(first) == queue.claim(second) == "hand_over"
    assert queue.owner_next() is None
    for session in (second, first):
        queue.offer(session, offer(session), done[session])
        queue.offer(session, offer(session), done[session])
        assert queue.claim(session) is None
    takes = queue.owner_next()
    assert isinstance(takes, tuple)
    assert [take.session for take in takes] == [first, second]  # as they joined
    assert queue.taken(first) == 1
    assert queue.claim(first) is None  # taken: keep the gradient until the step is over
    queue.taken(second)
    assert queue.owner_next() == "closed"
    assert set(queue.account().taken.values()) >= {first, second}
    queue.finish()
    assert queue.claim(first) == "over"


def test_step_lost_gradient_is_computed_again_by_whoever_is_left() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=4))
    first, second = join(queue, "cell-1"), join(queue, "cell-2")
    done = {first: [compute(queue, first)], second: [compute(queue, second)]}
    queue.seal()
    for session, steps in done.items():
        assert queue.claim(session) == "hand_over"
        queue.offer(session, offer(session), steps)
    assert isinstance(queue.owner_next(), tuple)
    queue.lost(first, "it died in the middle of the read")
    assert queue.claim(second) is None  # being read: no more work for it
    queue.taken(second)
    assert queue.claim(second) == "rejoin"
    with pytest.raises(CutOffError):
        queue.claim(first)
    third = join(queue, "cell-2")
    assert compute(queue, third) == done[first][0]
    assert queue.claim(third) == "hand_over"
    queue.offer(third, offer(third), done[first])
    finish_alone(queue)
    assert queue.account().requeued == 1
    assert queue.account().cut_off == (first,)


def test_step_offer_gives_way_to_work_that_came_back() -> None:
    clock = ManualClock()
    queue = make(clock=clock)
    queue.add_group("g0", group("g0", rollouts=4))
    first, second = join(queue, "cell-1"), join(queue, "cell-2")
    mine, lost = compute(queue, first), compute(queue, second)
    queue.seal()
    assert queue.claim(first) == "hand_over"
    queue.offer(first, offer(first), [mine])
    clock.advance(7.0)
    assert queue.claim(first) is None
    clock.advance(1.0)  # the second is silent for too long
    assert compute(queue, first) == lost
    assert queue.claim(first) == "hand_over"
    queue.offer(first, offer(first), [mine, lost])
    finish_alone(queue)
    assert queue.account().cut_off == (second,)


def test_step_gradient_that_holds_something_else_is_not_taken() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    compute(queue, session)
    queue.seal()
    with pytest.raises(CutOffError, match="offers 2 micro-steps"):
        queue.offer(session, offer(session), ["g0.0", "g0.1"])
    assert queue.status()["pending"] == 1


def test_step_lost_answer_to_a_claim_gives_the_same_lease_again() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=4))
    session = join(queue)
    assert work(queue, session) == work(queue, session)


def test_step_refused_by_a_member_goes_to_the_owner() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    queue.fail(work(queue, session), "nan")
    with pytest.raises(CutOffError):
        queue.claim(session)
    queue.seal()
    assert queue.claim(join(queue)) is None
    finish_alone(queue)
    assert queue.account().failed == 1


# -- members that leave --------------------------------------------------------------------------------------------


def left(queue: StepQueue, session: str, done: list[str], trainer: str = "cell-1") -> None:
    """The member leaves: told, asked for its gradient, offered, gone."""
    queue.leave(trainer)
    assert queue.claim(session) == "hand_over"
    queue.offer(session, offer(session), done)
    assert queue.claim(session) == "left"


def test_step_member_that_leaves_is_taken_over_between_two_of_the_owners_micro_steps() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=6))
    session = join(queue)
    done = [compute(queue, session)]
    own = queue.owner_next()
    assert isinstance(own, Work)
    left(queue, session, done)
    queue.leave("cell-1")  # again, after a lost answer
    queue.complete(own.lease, {"loss": 1.0})
    takes = queue.owner_next()  # the queue is open and one micro-step is pending
    assert isinstance(takes, tuple)
    assert [take.session for take in takes] == [session]
    assert queue.claim(session) == "left"  # also while it is read
    assert queue.taken(session) == 1
    last = queue.owner_next()
    assert isinstance(last, Work)
    queue.complete(last.lease, {"loss": 1.0})
    queue.seal()
    finish_alone(queue)
    account = queue.account()
    assert account.cut_off == () and account.requeued == 0
    own_session = account.taken[own.lease.micro_step_id]
    assert [(part.session, part.owner, part.micro_steps) for part in account.sums] == [
        (own_session, True, (own.lease.micro_step_id,)),
        (session, False, tuple(done)),
        (own_session, True, (last.lease.micro_step_id,)),
    ]
    assert sorted(name for part in account.micro_steps for name in part) == [(f"g0-r{n}", 0) for n in range(6)]


def test_step_member_that_leaves_in_a_micro_step_ends_it_first_and_one_with_nothing_just_goes() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=4))
    session, idle = join(queue), join(queue, "cell-2")
    lease = work(queue, session)
    queue.leave("cell-1")
    queue.leave("cell-2")
    assert work(queue, session) == lease  # a repeated claim: the answer was lost
    queue.complete(lease, {"loss": 1.0})
    assert queue.claim(idle) == "left"
    left(queue, session, [lease.micro_step_id])
    again = join(queue)  # back in the same step, with an empty gradient
    assert compute(queue, again) != lease.micro_step_id
    queue.seal()
    assert isinstance(queue.owner_next(), tuple)


def test_step_member_that_left_is_not_cut_off_for_its_silence(tmp_path: Path) -> None:
    clock = ManualClock()
    queue = make(clock=clock)
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    done = [compute(queue, session)]
    left(queue, session, done)
    clock.advance(1000.0)
    queue.seal()
    finish_alone(queue)
    assert queue.account().taken == {done[0]: session}


def test_step_member_waiting_for_the_end_may_leave_its_offer_behind() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    done = [compute(queue, session)]
    queue.seal()
    assert queue.claim(session) == "hand_over"
    queue.offer(session, offer(session), done)
    queue.leave("cell-1")
    assert queue.claim(session) == "left"
    finish_alone(queue)
    assert queue.account().taken == {done[0]: session}


def test_step_dead_members_work_goes_back_at_once_but_what_it_offered_is_tried() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=6))
    parked, dead, other = join(queue), join(queue, "cell-2"), join(queue, "cell-3")
    done = [compute(queue, parked)]
    left(queue, parked, done)
    compute(queue, dead)
    work(queue, other)
    assert queue.gone("cell-2", "killed") == (dead,)
    assert queue.gone("cell-2", "killed") == ()
    assert queue.gone("cell-1", "killed") == ()  # its memory may outlive it: the read will tell
    assert queue.status()["requeued"] == 1
    with pytest.raises(CutOffError):
        queue.claim(dead)
    takes = queue.owner_next()
    assert isinstance(takes, tuple) and takes[0].session == parked
    queue.lost(parked, "its file is gone")
    assert queue.status()["requeued"] == 2


def test_step_member_that_joins_again_gives_up_what_it_had() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=4))
    empty = join(queue)
    full = join(queue)  # the answer to the first was lost
    compute(queue, full)
    join(queue)
    assert queue.status()["cut_off"] == [full]
    for session in (empty, full):
        with pytest.raises(CutOffError):
            queue.offer(session, offer(session), [])


def test_step_sealed_with_its_rollouts_keeps_the_number(tmp_path: Path) -> None:
    queue = make(tmp_path / "step")
    queue.add_group("g0", group("g0", rollouts=2))
    queue.seal(7)
    queue.seal(7)
    with pytest.raises(ValueError, match="divides by 7, not by 8"):
        queue.seal(8)
    assert make(tmp_path / "step").num_rollouts == 7


def test_account_survives_json() -> None:
    queue = make()
    queue.add_group("g0", group("g0", rollouts=3))
    queue.seal()
    finish_alone(queue)
    account = queue.account()
    assert StepAccount.from_json(json.loads(json.dumps(account.to_json()))) == account
    with pytest.raises(ValueError, match="not a step's account"):
        StepAccount.from_json({"taken": []})


# -- the journal ---------------------------------------------------------------------------------------------------


def test_journal_owners_death_loses_what_it_computed_and_keeps_what_satellites_did(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    queue = make(folder)
    queue.add_group("g0", group("g0", rollouts=6))
    first, second = join(queue, "cell-1"), join(queue, "cell-2")
    done, busy = compute(queue, first), work(queue, second)
    own = queue.owner_next()
    assert isinstance(own, Work)
    queue.complete(own.lease, {})

    again = make(folder)  # the owner's process was killed here and started anew
    assert again.name == queue.name
    assert again.has_group("g0")
    assert again.status()["completed"] == 1
    again.complete(busy, {})  # the lease holds on
    again.add_group("g1", group("g1", rollouts=2))
    assert again.status()["groups"] == 2
    mine = again.owner_next()
    assert isinstance(mine, Work)
    assert (mine.lease.micro_step_id, mine.lease.attempt) == (own.lease.micro_step_id, 2)
    again.complete(mine.lease, {})
    again.seal()
    while isinstance(found := again.owner_next(), Work):
        again.complete(found.lease, {})
    again.offer(first, offer(first), [done])
    again.offer(second, offer(second), [busy.micro_step_id])
    finish_alone(again)
    taken = again.account().taken
    assert taken[done] == first
    assert taken[busy.micro_step_id] == second
    again.finish()
    assert not folder.exists()


def test_journal_owners_death_between_take_over_and_step_takes_again(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    queue = make(folder)
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    done = compute(queue, session)
    queue.seal()
    queue.offer(session, offer(session), [done])
    finish_alone(queue)
    assert queue.claim(session) is None  # it keeps its gradient

    again = make(folder)
    assert again.claim(session) == "hand_over"
    again.offer(session, offer(session), [done])
    finish_alone(again)
    assert again.account().taken == {done: session}


def test_journal_satellite_that_vanished_with_the_owner_is_cut_off(tmp_path: Path) -> None:
    clock = ManualClock()
    queue = make(tmp_path / "step", clock=clock)
    queue.add_group("g0", group("g0", rollouts=2))
    session = join(queue)
    compute(queue, session)
    queue.seal()
    again = make(tmp_path / "step", clock=clock)
    assert again.owner_next() is None
    clock.advance(8.0)
    finish_alone(again)
    assert again.account().cut_off == (session,)


def test_journal_splits_failures_and_cut_offs_are_told_again(tmp_path: Path) -> None:
    clock = ManualClock()
    rates = Rates({"core": 100.0, "cell-1": 100.0})
    queue = make(tmp_path / "step", clock=clock, rates=rates)
    queue.add_group("g0", group("g0", rollouts=3))
    join(queue)
    queue.seal()
    failed = work(queue, join(queue))
    queue.fail(failed, "nan")
    late = work(queue, join(queue, "cell-2"))
    clock.advance(20.0)
    assert queue.owner_next() is not None
    again = make(tmp_path / "step", clock=clock, rates=rates)
    assert again.status()["pending"] == queue.status()["pending"] + 1  # what the owner was computing
    assert again.status()["failed"] == 1
    with pytest.raises(CutOffError):
        again.complete(late, {})
    finish_alone(again)
    assert len(again.account().groups["g0"]) > 1
    assert rates.all() == {"core": 100.0, "cell-1": 100.0}  # telling again measures nothing


def test_journal_gradient_that_was_left_behind_is_read_by_the_owner_that_comes_after(tmp_path: Path) -> None:
    clock = ManualClock()
    queue = make(tmp_path / "step", clock=clock)
    queue.add_group("g0", group("g0", rollouts=4))
    session = join(queue)
    done = [compute(queue, session)]
    left(queue, session, done)
    takes = queue.owner_next()
    assert isinstance(takes, tuple)
    queue.taken(session)  # the sum that it was added to died with the owner
    again = make(tmp_path / "step", clock=clock)
    clock.advance(1000.0)
    assert again.owner_next() == takes
    again.taken(session)
    again.seal()
    finish_alone(again)
    assert again.account().taken[done[0]] == session
    assert again.account().stats["loss"] == 2.0  # also what was told to the owner that died


def test_journal_half_written_line_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    queue = make(folder)
    queue.add_group("g0", group("g0"))
    with (folder / "queue.jsonl").open("ab") as file:
        file.write(b'{"event":"group","gro')
    again = make(folder)
    again.add_group("g1", group("g1"))
    third = make(folder)
    assert third.has_group("g0")
    assert third.has_group("g1")


@pytest.mark.parametrize("other", [{"step": 4}, {"weights": "w4"}, {"policy_version": 4}])
def test_journal_of_another_step_is_not_used(tmp_path: Path, other: dict[str, object]) -> None:
    folder = tmp_path / "step"
    make(folder).add_group("g0", group("g0"))
    fresh = StepQueue(replace(IDENTITY, **other), RULES, journal_folder=folder)
    assert not fresh.has_group("g0")
    with pytest.raises(CutOffError):
        fresh.claim("step-3-0000/cell-1#1")
