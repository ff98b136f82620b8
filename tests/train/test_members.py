"""Core and satellites of one step over real HTTP and real shared memory; the model is a counter with exact sums."""

import json
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from gyre_core.cells.members import HubSettings, MemberHub
from gyre_core.errors import TrainError, TransferError
from gyre_core.train.members import Satellite
from gyre_core.train.queue import CutOffError
from gyre_core.train.queue_client import CoreUnreachableError, MemberWork, QueueClient
from gyre_core.train.queue_rates import LeaseRule
from gyre_core.train.queue_records import QueueRules, StaleStepError, StepAccount
from gyre_core.train.queue_step import StepQueue
from gyre_core.transfer.gradients import BufferOffer, flat_bytes, flatten
from gyre_core.transfer.shared_memory import SharedMemoryBuffer, SharedMemoryReader
from gyre_core.types import TrainingBranch
from tests.support.members import (
    SECRET,
    CountingReplica,
    counting_hub,
    group,
    satellite_thread,
    target_counts,
    until,
)

RULES = QueueRules(micro_step_tokens=16, tail_tokens=8, lease=LeaseRule(min_s=20.0, slack=0.0), silence_s=10.0)


def run(hub: MemberHub, queue: StepQueue, replica: CountingReplica) -> StepAccount:
    account, _ = hub.run_step(queue, lambda _: replica.step())
    return account


def client(hub: MemberHub) -> QueueClient:
    return QueueClient(hub.url, SECRET, wait_s=0.2)


def hold(hub: MemberHub) -> tuple[int, str]:
    found = hub.board.weights
    assert found is not None
    return found[0], found[1].checksum


def joined(hub: MemberHub, peer: QueueClient, name: str = "cell-9") -> str:
    version, weights = hold(hub)
    session = peer.join(name, policy_version=version, weights=weights)
    assert session is not None
    return session


def claimed(peer: QueueClient, session: str) -> MemberWork:
    found = peer.claim(session)
    assert isinstance(found, MemberWork), found
    return found


def test_members_share_steps_and_the_sum_is_what_one_would_have(tmp_path: Path) -> None:
    core = CountingReplica()
    gate = threading.Event()
    satellites = [CountingReplica() for _ in range(3)]
    with counting_hub(tmp_path, core) as hub, ExitStack() as stack:
        for index, replica in enumerate(satellites):
            stack.enter_context(satellite_thread(f"cell-{index + 1}", hub.url, replica))
        expected = torch.zeros_like(core.weight)
        for step in range(3):
            core.before = lambda _: gate.wait(20.0)  # the core is slow: the others must do some of it
            gate.clear()
            queue = hub.open_step(step, RULES)
            groups = [group(f"s{step}-g{index}", rollouts=5, token=step) for index in range(6)]
            expected += target_counts(groups)

            def feed(queue: StepQueue = queue, groups: list[list[TrainingBranch]] = groups) -> None:
                for branches in groups:  # while the members work
                    queue.add_group(branches[0].group_id, branches)
                queue.seal()
                until(lambda: queue.status()["completed"] >= 3)
                gate.set()

            feeder = threading.Thread(target=feed)
            feeder.start()
            account = run(hub, queue, core)
            feeder.join()
            assert torch.equal(core.weight, expected), "a branch was trained twice or not at all"
            assert set(account.groups) == {f"s{step}-g{index}" for index in range(6)}
            assert len({session.rsplit("#")[0] for session in account.taken.values()}) > 1
            assert account.cut_off == ()
        until(lambda: all(torch.equal(replica.weight, core.weight) for replica in satellites))


def test_members_die_late_and_rejoin_at_random_and_the_sum_stays_exact(tmp_path: Path) -> None:
    """Scripted members that stop at a random point of the protocol, beside honest ones."""
    chance = random.Random(5)
    core = CountingReplica()
    rules = QueueRules(micro_step_tokens=16, tail_tokens=8, lease=LeaseRule(min_s=0.3, slack=0.0), silence_s=0.5)
    with counting_hub(tmp_path, core) as hub, satellite_thread("cell-1", hub.url, CountingReplica()):
        expected = torch.zeros_like(core.weight)
        for step in range(4):
            queue = hub.open_step(step, rules)
            groups = [group(f"s{step}-g{index}", rollouts=6, token=index) for index in range(5)]
            expected += target_counts(groups)
            with client(hub) as dying:
                for branches in groups:
                    queue.add_group(branches[0].group_id, branches)
                for name in ("cell-7", "cell-8"):
                    session = joined(hub, dying, name)
                    for _ in range(chance.randrange(3)):
                        work = claimed(dying, session)
                        if chance.random() < 0.7:
                            dying.complete(session, work, {})
                queue.seal()
                account = run(hub, queue, core)
            assert torch.equal(core.weight, expected)
            assert not any("cell-7" in session or "cell-8" in session for session in account.taken.values())


def test_members_long_micro_step_is_not_cut_off_but_a_hung_one_is(tmp_path: Path) -> None:
    core = CountingReplica()
    rules = QueueRules(
        micro_step_tokens=4096, lease=LeaseRule(min_s=0.05, slack=1.0, assumed_tokens_per_s=1000.0), silence_s=5.0
    )
    with counting_hub(tmp_path, core) as hub, client(hub) as peer:
        queue = hub.open_step(0, rules)
        queue.add_group("long", group("long", rollouts=1, length=2000))  # has 2 s
        queue.add_group("short", group("short", rollouts=1, length=20))  # has 0.07 s
        long, short = joined(hub, peer, "cell-1"), joined(hub, peer, "cell-2")
        first, second = claimed(peer, long), claimed(peer, short)
        until(lambda: queue.owner_next() and queue.status()["cut_off"], 5.0)
        assert queue.status()["cut_off"] == [short]
        with pytest.raises(CutOffError):
            peer.complete(short, second, {})
        peer.complete(long, first, {})
        queue.abort("enough")


def test_members_join_at_the_last_micro_step_without_harm(tmp_path: Path) -> None:
    core = CountingReplica()
    with counting_hub(tmp_path, core) as hub, ExitStack() as stack:
        queue = hub.open_step(0, RULES)
        late = CountingReplica()

        def join_late(_: Sequence[TrainingBranch]) -> None:
            core.before = lambda branches: None
            stack.enter_context(satellite_thread("cell-1", hub.url, late))
            until(lambda: len(queue.status()["sessions"]) == 2)

        core.before = join_late
        queue.add_group("g0", group("g0"))
        queue.seal()
        run(hub, queue, core)
        assert torch.equal(core.weight, target_counts([group("g0")]))
        assert late.num_computed == 0
        until(lambda: torch.equal(late.weight, core.weight))  # and it follows


def test_members_gradient_not_finite_on_a_satellite_is_tried_by_the_core_and_the_step_refused(tmp_path: Path) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    tried = threading.Event()
    with counting_hub(tmp_path, core) as hub:
        queue = hub.open_step(0, RULES)
        queue.add_group("bad", group("bad", poison=True))
        with satellite_thread("cell-1", hub.url, satellite) as thread:
            until(lambda: thread.counts["failed"] == 1)
            tried.set()
            queue.seal()
            with pytest.raises(TrainError, match="not finite"):
                run(hub, queue, core)
        assert queue.status()["failed"] == 1
        assert not core.weight.any()
        assert not core.sums.any()
        again = hub.open_step(0, RULES)  # the data are kept: without the bad group it goes on
        again.add_group("good", group("good"))
        again.seal()
        run(hub, again, core)
        assert torch.equal(core.weight, target_counts([group("good")]))


def test_members_micro_step_that_fails_on_a_satellite_alone_costs_nothing(tmp_path: Path) -> None:
    core = CountingReplica()

    def broken(_: Sequence[TrainingBranch]) -> None:
        satellite.reset_gradients()
        raise TrainError("a bad card")

    satellite = CountingReplica(broken)
    with counting_hub(tmp_path, core) as hub:
        queue = hub.open_step(0, RULES)
        queue.add_group("g0", group("g0", rollouts=6))
        with satellite_thread("cell-1", hub.url, satellite) as thread:
            until(lambda: thread.counts["failed"] >= 2)
            queue.seal()
            account = run(hub, queue, core)
        assert account.failed >= 2
        assert torch.equal(core.weight, target_counts([group("g0", rollouts=6)]))


def scripted_hand_over(hub: MemberHub, queue: StepQueue, peer: QueueClient, buffer: SharedMemoryBuffer) -> str:
    """A member that computes one micro-step of `queue` and offers its gradient; returns its session."""
    session = joined(hub, peer)
    work = claimed(peer, session)
    peer.complete(session, work, {})
    queue.seal()
    offered: list[Any] = []

    def go_on() -> None:
        while (found := peer.claim(session)) != "hand_over":
            assert found is None
        peer.offer(session, buffer.offer(session), [work.micro_step])
        offered.append(True)

    threading.Thread(target=go_on, daemon=True).start()
    return session


@pytest.mark.parametrize("what", ["gone", "changed", "nan"])
def test_members_gradient_that_cannot_be_read_whole_is_computed_again(tmp_path: Path, what: str) -> None:
    """The satellite dies or writes in the middle of the pull, or its memory holds nonsense."""
    core = CountingReplica()
    reads = []

    class Reader(SharedMemoryReader):
        def read(self, offer: BufferOffer, into: torch.Tensor) -> None:
            reads.append(offer.label)
            if what == "gone":
                raise TransferError("the peer is gone")
            super().read(offer, into)
            if what == "changed":
                into[5] ^= 1

    with (
        counting_hub(tmp_path, core, reader=Reader()) as hub,
        client(hub) as peer,
        SharedMemoryBuffer(256) as buffer,
    ):
        queue = hub.open_step(0, RULES)
        queue.add_group("g0", group("g0"))
        flatten([torch.full((64,), float("nan") if what == "nan" else 7.0)], buffer.memory)
        session = scripted_hand_over(hub, queue, peer, buffer)
        account = run(hub, queue, core)
        assert reads == [session]
        assert account.cut_off == (session,)
        assert torch.equal(core.weight, target_counts([group("g0")]))


def test_members_gradient_of_a_dead_satellite_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    core = CountingReplica()
    with counting_hub(tmp_path, core) as hub, client(hub) as peer, SharedMemoryBuffer(256) as buffer:
        queue = hub.open_step(0, RULES)
        queue.add_group("g0", group("g0", rollouts=2))  # one micro-step, all of it the satellite's
        flatten([target_counts([group("g0")])], buffer.memory)
        session = scripted_hand_over(hub, queue, peer, buffer)
        account = run(hub, queue, core)
        assert set(account.taken.values()) == {session}
        assert torch.equal(core.weight, target_counts([group("g0")]))


def test_members_stale_weights_and_sessions_are_refused(tmp_path: Path) -> None:
    core = CountingReplica()
    with counting_hub(tmp_path, core) as hub, client(hub) as peer:
        version, weights = hold(hub)
        queue = hub.open_step(0, RULES)
        queue.add_group("g0", group("g0"))
        session = joined(hub, peer)
        work = claimed(peer, session)
        queue.abort("refused")
        with pytest.raises(StaleStepError, match="over"):
            peer.complete(session, work, {})
        assert peer.claim(session) == "over"
        assert peer.join("cell-9", policy_version=version, weights=weights) is None  # between two steps
        queue = hub.open_step(0, RULES)
        with pytest.raises(CutOffError):
            peer.claim(session)
        queue.add_group("g0", group("g0"))
        queue.seal()
        run(hub, queue, core)
        queue = hub.open_step(1, RULES)
        with pytest.raises(StaleStepError, match="pull the weights"):
            peer.join("cell-9", policy_version=version, weights=weights)
        found = peer.weights(version, weights)
        assert found is not None
        assert found[0] == 1
        assert peer.weights(1, found[1].checksum) is None


def test_members_follow_a_step_that_changed_no_weight(tmp_path: Path) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    with counting_hub(tmp_path, core) as hub, satellite_thread("cell-1", hub.url, satellite) as thread:
        queue = hub.open_step(0, RULES)
        until(lambda: queue.status()["sessions"])
        queue.seal()
        hub.run_step(queue, lambda _: {})
        again = hub.open_step(1, RULES)
        until(lambda: again.status()["sessions"])
        assert thread.counts["pulls"] == 1
        again.abort("enough")


def test_members_core_restart_keeps_what_satellites_did(tmp_path: Path) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    groups = [group(f"g{index}", rollouts=4) for index in range(3)]
    with ExitStack() as stack:
        first = stack.enter_context(counting_hub(tmp_path, core))
        port = int(first.url.rsplit(":", 1)[1])
        queue = first.open_step(0, RULES)
        for branches in groups:
            queue.add_group(branches[0].group_id, branches)
        thread = stack.enter_context(satellite_thread("cell-1", first.url, satellite))
        until(lambda: queue.status()["completed"] == 6)
        first.close()  # as a kill does it: the journal stays, the sums are gone
        until(lambda: not first._thread.is_alive())
        again = CountingReplica()
        with counting_hub(tmp_path, again, port=port) as second:
            until(lambda: second.board._listeners)  # it asks before the step is open again, and keeps its gradient
            queue = second.open_step(0, RULES)
            assert all(queue.has_group(branches[0].group_id) for branches in groups)
            queue.seal()
            account = run(second, queue, again)
            assert thread.counts["cut_off"] == 0
            assert again.num_computed == 0
            assert satellite.num_computed == 6
            assert len(set(account.taken.values())) == 1
            assert torch.equal(again.weight, target_counts(groups))


def test_members_leave_and_come_back_in_one_step_and_the_core_that_dies_then_takes_both(tmp_path: Path) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    groups = [group(f"g{index}", rollouts=2) for index in range(3)]
    with ExitStack() as stack:
        first = stack.enter_context(counting_hub(tmp_path, core))
        port = int(first.url.rsplit(":", 1)[1])
        queue = first.open_step(0, RULES)
        peer = stack.enter_context(client(first))
        buffers = [stack.enter_context(SharedMemoryBuffer(flat_bytes(satellite.gradients()))) for _ in range(2)]
        made = iter(buffers[1:])
        member = Satellite("cell-1", peer, satellite, buffers[0], SharedMemoryReader(), make_buffer=lambda: next(made))
        for count, branches in enumerate(groups[:2], start=1):
            queue.add_group(branches[0].group_id, branches)
            stop = threading.Event()
            satellite.before = lambda _, stop=stop: stop.set()  # told to leave in the middle of a micro-step
            member.run(stop)
            assert (member.counts["left"], member.counts["micro_steps"]) == (count, count)
        queue.add_group("g2", groups[2])
        takes = queue.owner_next()
        assert isinstance(takes, tuple) and len(takes) == 2
        first.close()
        until(lambda: not first._thread.is_alive())
        again = CountingReplica()
        with counting_hub(tmp_path, again, port=port) as second:
            queue = second.open_step(0, RULES)
            queue.seal()
            account = run(second, queue, again)
            assert (again.num_computed, account.requeued) == (len(account.groups["g2"]), 0)
            assert not any("cell-1" in session for session in account.cut_off)
            assert [part.owner for part in account.sums] == [False, False, True]
            assert torch.equal(again.weight, target_counts(groups))


def test_members_that_leave_while_the_core_is_dead_go_after_their_limit_and_their_work_is_done_again(
    tmp_path: Path,
) -> None:
    core, satellite = CountingReplica(), CountingReplica()
    with ExitStack() as stack:
        first = stack.enter_context(counting_hub(tmp_path, core))
        port = int(first.url.rsplit(":", 1)[1])
        queue = first.open_step(0, RULES)
        queue.add_group("g0", group("g0"))
        peer = stack.enter_context(client(first))
        buffer = stack.enter_context(SharedMemoryBuffer(flat_bytes(satellite.gradients())))
        member = Satellite("cell-1", peer, satellite, buffer, SharedMemoryReader(), leave_limit_s=0.2)
        stop = threading.Event()

        def die(_: Sequence[TrainingBranch]) -> None:
            first.close()
            stop.set()

        satellite.before = die
        member.run(stop)
        assert (member.counts["left"], float(satellite.sums.sum())) == (0, 0.0)
        again = CountingReplica()
        rules = QueueRules(micro_step_tokens=16, lease=LeaseRule(min_s=0.3, slack=0.0), silence_s=0.3)
        with counting_hub(tmp_path, again, port=port) as second:
            queue = second.open_step(0, rules)
            queue.seal()
            account = run(second, queue, again)
            assert len(account.cut_off) == 1
            assert torch.equal(again.weight, target_counts([group("g0")]))


def presence(hub: MemberHub, name: str) -> socket.socket:
    """A member's standing connection, which its process's end closes."""
    body = json.dumps({"trainer": name})
    head = f"POST /members/presence HTTP/1.1\r\nhost: core\r\nauthorization: Bearer {SECRET}\r\n"
    connection = socket.create_connection(("127.0.0.1", int(hub.url.rsplit(":", 1)[1])))
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def test_members_process_that_ends_is_cut_off_when_its_connection_breaks(tmp_path: Path) -> None:
    """Long before its lease ends; one whose connection comes back at once is not."""
    with counting_hub(tmp_path) as hub, client(hub) as peer, ExitStack() as stack:
        queue = hub.open_step(0, RULES)
        queue.add_group("g0", group("g0", rollouts=4))
        sessions = {name: joined(hub, peer, name) for name in ("cell-1", "cell-2")}
        for session in sessions.values():
            claimed(peer, session)
        connections = {name: stack.enter_context(presence(hub, name)) for name in sessions}
        until(lambda: all(hub.board.present(name, 0) for name in sessions))
        stack.enter_context(presence(hub, "cell-2"))
        until(lambda: hub.board._present["cell-2"] == 2)
        for connection in connections.values():
            connection.close()
        until(lambda: queue.status()["cut_off"], 10.0)
        assert queue.status()["cut_off"] == [sessions["cell-1"]]
        assert hub.board.present("cell-2", 0)
        queue.abort("enough")


def test_leave_ends_requests_that_wait(tmp_path: Path) -> None:
    with counting_hub(tmp_path) as hub, QueueClient(hub.url, SECRET, wait_s=15.0) as peer, client(hub) as other:
        version, weights = hold(hub)
        found: list[Any] = []
        for request in (
            lambda: peer.join("cell-1", policy_version=version, weights=weights),
            lambda: peer.weights(version, weights, trainer="cell-1"),
        ):
            waiting = threading.Thread(target=lambda request=request: found.append(request()))
            waiting.start()
            until(lambda: not hub.board.leaves("cell-1") and hub.board._listeners)
            other.leave("cell-1")
            waiting.join(5.0)
            assert not waiting.is_alive()
        assert found == [None, None]


def test_service_refuses_strangers_and_nonsense(tmp_path: Path) -> None:
    with counting_hub(tmp_path) as hub:
        for key in ("", "Bearer wrong"):
            reply = httpx.get(f"{hub.url}/members/status", headers={"authorization": key}, trust_env=False)
            assert reply.status_code == 401
        for verb, body in (
            ("join", "[]"),
            ("join", "{"),
            ("claim", "{}"),
            ("offer", '{"session": "x", "micro_steps": [], "offer": {"kind": "ftp"}}'),
            ("complete", '{"session": "x", "micro_step": "m", "attempt": "x"}'),
        ):
            hub.open_step(0, RULES)
            reply = httpx.post(
                f"{hub.url}/members/{verb}",
                content=body,
                headers={"authorization": f"Bearer {SECRET}"},
                trust_env=False,
            )
            assert reply.status_code == 400, (verb, body, reply.text)


def test_client_says_when_the_core_is_gone(tmp_path: Path) -> None:
    with counting_hub(tmp_path) as hub:
        url = hub.url
    with QueueClient(url, SECRET) as peer, pytest.raises(CoreUnreachableError):
        peer.status()


def test_claim_wakes_when_work_comes(tmp_path: Path) -> None:
    with counting_hub(tmp_path) as hub, QueueClient(hub.url, SECRET, wait_s=15.0) as peer:
        queue = hub.open_step(0, RULES)
        session = joined(hub, peer)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(peer.claim(session)))
        waiting.start()
        queue.add_group("g0", group("g0"))
        waiting.join(5.0)
        assert isinstance(found[0], MemberWork)


def test_hub_settings_name_the_owner(tmp_path: Path) -> None:
    assert HubSettings(secret="s", work_dir=tmp_path).owner == "core"
