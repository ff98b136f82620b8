"""The simulated world: schedules worked by hand, equal work for all policies, failures, flat memory."""

import gc
import tracemalloc
from dataclasses import replace

import pytest

from gyre_core.scheduler.policy import POLICIES, Plan, Snapshot
from gyre_core.sim.model import Costs
from gyre_core.sim.world import World, simulate
from tests.support.worlds import group, scenario, small


def hours_s(result: object) -> float:
    return round(result.hours * 3600, 6)  # pyright: ignore[reportAttributeAccessIssue]


def test_colocate_synchronous_steps_are_the_longest_rollout_plus_training() -> None:
    batch = [group(100.0, 60.0, train=40.0)]
    world = scenario(batch, cells=1, slots=2, steps=3, phi=0)
    assert hours_s(simulate(world, "colocate", source=lambda _: batch)) == 3 * (100 + 40)


def test_colocate_one_step_ahead_parks_the_next_batch_while_it_trains() -> None:
    # Both batches run from 0: rollouts end at 100, train until 140; then batch 1 (ended at 100 too) trains until 180
    # while batch 2, dispatched at 140, is parked: it samples from 180 to 280 and trains until 320.
    batch = [group(100.0, train=40.0)]
    world = scenario(batch, cells=1, slots=2, steps=3, phi=1)
    assert hours_s(simulate(world, "colocate", source=lambda _: batch)) == 320


def test_fixed_split_one_step_off_has_half_the_rollout_and_training_in_turns() -> None:
    # Published at p1 = 140, p2 = 180 (batch 1 has waited), p3 = max(180, 140 + 100) + 40 = 280.
    batch = [group(100.0, train=40.0)]
    world = scenario(batch, cells=2, slots=4, steps=3, phi=1)
    assert hours_s(simulate(world, "async_off1", source=lambda _: batch)) == 280


def test_streaming_trains_the_early_group_while_the_late_one_samples() -> None:
    # The groups end at 10 and 100 and train for 40 s each. Streaming: 10 to 50, 100 to 140; a barrier: 100 to 180.
    batch = [group(10.0, train=40.0), group(100.0, train=40.0)]
    world = scenario(batch, cells=2, slots=4, steps=1, phi=0)
    assert hours_s(simulate(world, "async_stream", source=lambda _: batch)) == 140
    assert hours_s(simulate(world, "async_off1", source=lambda _: batch)) == 180


def test_elastic_cells_join_the_training_as_the_water_level_falls() -> None:
    # Two cells of two slots. The first group ends at 10 and the core trains it; the second ends at 30 and the
    # satellite joins: 40 s of training in two pieces of 20.
    batch = [group(10.0, train=5.0), group(30.0, train=40.0)]
    world = scenario(batch, cells=2, slots=2, steps=1, phi=0, micro_steps=2)
    assert hours_s(simulate(world, "elastic", source=lambda _: batch)) == 50


def test_moved_call_keeps_what_it_has_sampled_and_pays_for_its_prefix() -> None:
    # At 10 the core leaves with a rollout that has 90 of 100 tokens left; its prefix of 50 tokens loads in 5 s.
    batch = [group(10.0, train=5.0), group(100.0, train=5.0)]
    batch[1].rollouts[0].contexts[0] = 50.0
    world = scenario(batch, cells=2, slots=2, steps=1, phi=0, kv_fetch_tokens_per_s=10.0)
    placed = simulate(world, "elastic", source=lambda _: batch)
    # Least loaded first: the short rollout is on the core, the long one on the satellite, nothing moves but roles.
    assert (hours_s(placed), placed.relocated_calls) == (105, 0)
    swapped = [batch[1], batch[0]]
    moved = simulate(world, "elastic", source=lambda _: swapped)
    assert (hours_s(moved), moved.relocated_calls) == (110, 1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_does_the_same_work_within_the_bound_and_the_staleness(policy: str) -> None:
    for phi in (0, 1, 2):
        result = simulate(small(phi=phi), policy, seed=5)
        assert result.rollouts == 3 * 8 * 8
        assert result.tokens_per_step == pytest.approx(simulate(small(phi=0), "colocate", seed=5).tokens_per_step)
        assert result.staleness_max <= phi
        assert 0 < result.fraction_of_bound <= 1
        assert sum(result.shares.values()) == pytest.approx(1.0)


def test_same_seed_gives_the_same_result_and_another_does_not() -> None:
    first, again, other = (simulate(small(), "elastic_predictive", seed=seed) for seed in (1, 1, 2))
    assert first.as_json() == again.as_json()
    assert first.hours != other.hours


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_failing_cells_lose_no_rollout_and_no_group(policy: str) -> None:
    result = simulate(small(mtbf_node_s=1_500.0, restart_s=60.0), policy, seed=3)
    assert result.rollouts == 3 * 8 * 8
    assert result.shares["dead"] > 0
    assert result.hours > simulate(small(), policy, seed=3).hours


def test_time_limit_clips_rollouts_and_says_how_many() -> None:
    world = small()
    limited = replace(world, workload=replace(world.workload, limit_s=600.0))
    result = simulate(limited, "elastic", seed=1)
    assert 0 < result.clipped_share < 1
    assert result.tokens_per_step < simulate(world, "elastic", seed=1).tokens_per_step


def test_burst_of_two_steps_publishes_every_second_one() -> None:
    world = replace(small(phi=0, steps=4), mu=2)
    result = simulate(world, "colocate", seed=0)
    assert (world.staleness, result.staleness_max, result.staleness_mean) == (1, 1, 0.5)


def test_policy_that_never_moves_is_found_to_stand_still() -> None:
    with pytest.raises(RuntimeError, match="nothing is due"):
        simulate(small(), "elastic", rule=lambda _: Plan())


def test_decisions_are_made_from_snapshots_that_respect_slots() -> None:
    seen: list[Snapshot] = []

    def watched(snapshot: Snapshot) -> Plan:
        seen.append(snapshot)
        return POLICIES["elastic_predictive"](snapshot)

    simulate(small(slots=24), "elastic_predictive", rule=watched)
    assert len(seen) > 100
    assert all(cell.residents <= cell.slots for snapshot in seen for cell in snapshot.cells)
    assert all(0 <= snapshot.due <= snapshot.water_level for snapshot in seen)


def test_migrated_prefixes_cost_less_than_computed_ones() -> None:
    moved = simulate(small(prefill_tokens_per_s=500.0), "elastic", seed=2)
    computed = simulate(small(prefill_tokens_per_s=500.0, migrate_kv=False), "elastic", seed=2)
    assert moved.hours < computed.hours


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    def peak(steps: int) -> int:
        gc.collect()
        tracemalloc.start()
        World(small(steps=steps), "elastic", seed=0).run()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(2)
    assert peak(36) < 1.6 * peak(12)  # three times the steps


def test_costs_of_a_cell_without_a_whole_engine_count_one() -> None:
    assert Costs(nodes_per_engine=8.0).cell_engines(4.0) == 1.0
