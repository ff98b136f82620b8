"""All policies on random worlds: the invariants hold, and seeded bugs break them."""

from dataclasses import replace

import pytest

from gyre_core.scheduler.mechanism import dispatch_depth, enforce, stale_reason
from gyre_core.scheduler.policy import POLICIES, Move, Plan, Policy, Snapshot, elastic
from tests.scheduler.worlds import World

WORLDS_A_POLICY = 320  # 1,600 worlds in all


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policy_on_random_worlds_keeps_every_invariant(name: str) -> None:
    for seed in range(WORLDS_A_POLICY):
        World(seed, POLICIES[name]).run()


def never_moves(_: Snapshot) -> Plan:
    return Plan()


def never_returns(snapshot: Snapshot) -> Plan:
    plan = elastic(snapshot)
    return replace(plan, moves=tuple(move for move in plan.moves if move.to == "train"))


def all_train_at_once(snapshot: Snapshot) -> Plan:
    return Plan(moves=tuple(Move(cell_id=cell.cell_id, to="train", reason="bug") for cell in snapshot.serving))


def satellites_first(snapshot: Snapshot) -> Plan:
    serving = snapshot.serving[-1:] if snapshot.untrained_groups else ()
    return Plan(moves=tuple(Move(cell_id=cell.cell_id, to="train", reason="bug") for cell in serving))


def ignores_live_rollouts(snapshot: Snapshot) -> Plan:
    return elastic(replace(snapshot, finished=snapshot.dispatched))


def without_reasons(snapshot: Snapshot) -> Plan:
    plan = elastic(snapshot)
    return replace(plan, moves=tuple(replace(move, reason="") for move in plan.moves))


def thrashes(snapshot: Snapshot) -> Plan:
    if snapshot.training and snapshot.pending_microsteps == 0 and snapshot.water_level:
        return Plan(moves=(Move(cell_id=snapshot.training[-1].cell_id, to="rollout", reason="bug"),))
    return elastic(snapshot)


def fails(policy: Policy, *, enforced: bool) -> bool:
    for seed in range(60):
        world = World(seed, policy, enforcing=enforce if enforced else lambda _, plan: plan)
        try:
            world.run()
        except (AssertionError, ValueError):
            return True
    return False


@pytest.mark.parametrize(
    "mutant",
    [never_moves, never_returns, all_train_at_once, satellites_first, ignores_live_rollouts, without_reasons, thrashes],
)
def test_seeded_bug_without_the_mechanism_is_caught(mutant: Policy) -> None:
    assert fails(mutant, enforced=False)


@pytest.mark.parametrize("mutant", [ignores_live_rollouts, all_train_at_once, satellites_first])
def test_mechanism_with_a_bad_policy_refuses_and_gives_reasons(mutant: Policy) -> None:
    for seed in range(60):
        world = World(seed, mutant)
        try:
            world.run(steps=1)
        except AssertionError as error:  # it may stand still, it may not break a rollout or the order of cells
            assert "deadlock" in str(error) or "after a burst" in str(error)


def test_dispatch_depth_and_staleness_follow_phi_and_mu() -> None:
    assert dispatch_depth(phi=1, mu=1, batch_groups=64) == 128
    assert stale_reason(dispatched_version=3, training_version=4, staleness=1) is None
    assert (
        stale_reason(dispatched_version=3, training_version=5, staleness=1) == "stale: 2 versions old, the bound is 1"
    )
