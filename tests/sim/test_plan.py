"""The planner and sweeps: candidates, what limits a world, refusals."""

from dataclasses import replace

import pytest

from gyre_core.sim.plan import candidates, confidence, limited_by, plan
from gyre_core.sim.sweep import changed, parse_sweep
from tests.support.worlds import small


def test_plan_ranks_rows_by_speed_and_names_what_limits_each() -> None:
    result = plan(small(steps=2), gpus=16, policies=("elastic", "colocate"), max_staleness=0, seeds=(0, 1), rows=2)
    speeds = [row["steps_per_hour"] for row in result["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    assert {row["policy"] for row in result["rows"]} == {"elastic", "colocate"}
    assert all(row["staleness"] == 0 and row["limited_by"] for row in result["rows"])


def test_candidates_keep_the_staleness_and_give_each_cell_an_engine() -> None:
    world = small()
    found = candidates(world, nodes=4.0, policies=("async_stream",), max_staleness=1)
    assert {(one.phi, one.mu) for one in found} == {(0, 1), (0, 2), (1, 1)}
    assert {one.cells for one in found} == {2, 3, 4}
    assert all(0 < one.train_cells < one.cells for one in found)


def test_too_few_gpus_are_refused_with_how_many_are_needed() -> None:
    world = small(nodes_per_engine=4.0)
    with pytest.raises(ValueError, match="at least 64 GPUs"):
        candidates(world, nodes=7.0, policies=("elastic",), max_staleness=0)


def test_slow_trainer_is_what_limits() -> None:
    assert limited_by(small(phi=0, train_tokens_per_node_s=200.0), "colocate", 0)[0] == "train"


def test_confidence_of_three_values_is_students() -> None:
    assert confidence([1.0, 2.0, 3.0]) == pytest.approx(4.30 / 3**0.5)


def test_more_cells_have_the_same_nodes_and_slots() -> None:
    world = changed(small(cells=4, slots=48), "cells", 8)
    assert (world.cluster.cells, world.cluster.nodes_per_cell, world.cluster.slots) == (8, 0.5, 24)


def test_changed_field_keeps_its_type_and_unknown_ones_are_refused() -> None:
    world = small()
    assert changed(world, "cluster.slots", 12.0) == replace(world, cluster=replace(world.cluster, slots=12))
    with pytest.raises(ValueError, match="there is no parameter 'tails'"):
        changed(world, "tails", 1.0)


def test_sweep_text_is_a_name_and_numbers() -> None:
    assert parse_sweep("tail=0.5,2") == ("tail", [0.5, 2.0])
    with pytest.raises(ValueError, match="write a name and numbers"):
        parse_sweep("tail")
