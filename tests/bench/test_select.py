"""`gyre bench select`: the costs by hand and against the packing that training uses, and the command."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from gyre_core.bench.select import bench_select, select_rows, selection_costs, synthetic_trajectory
from gyre_core.bench.tree_rollout import synthetic_calls
from gyre_core.cli.main import app
from gyre_core.config.models import SelectionConfig
from gyre_core.selection.batch import selection_rng, training_branches
from gyre_core.selection.branches import select_branches
from gyre_core.train.packing import pack_branches
from gyre_core.types import Role
from tests.support.random_trees import make_tree, rng
from tests.support.rollouts import finished

ORDER = SelectionConfig().role_order


def test_selection_costs_by_hand() -> None:
    # <0 1> [2 3] <4> [5]  and after the same [2 3] a sample without a prompt: [6 7 8]
    main = Role.MAIN
    tree = make_tree(
        [(-1, 2, False, main), (0, 2, True, main), (1, 1, False, main), (2, 1, True, main), (1, 3, True, main)]
    )
    selected = select_branches(tree, max_branches=0, role_order=ORDER, rng=rng(1))
    costs = selection_costs(tree, selected, ORDER)

    lengths = [{3: 6, 4: 7}[branch.leaf] for branch in selected]
    assert costs.flat_tokens.tolist() == [0, lengths[0], 13]
    assert costs.packed_tokens.tolist() == [0, lengths[0], 9]  # <0 1> [2 3] are shared
    assert costs.flat_pairs.tolist()[-1] == 6 * 7 // 2 + 7 * 8 // 2
    assert costs.packed_pairs.tolist()[-1] == 6 * 7 // 2 + 5 + 6 + 7  # 10 pairs of the shared four once
    assert costs.targets.tolist()[-1] == 6 and costs.repeated_targets.tolist()[-1] == 3 + 5


@pytest.mark.parametrize("cap", [1, 3, 5, 0])
def test_selection_costs_are_those_of_the_trainers_packing(cap: int) -> None:
    trajectory = synthetic_trajectory(synthetic_calls(num_calls=80, num_tokens=8_000, seed=2))
    tree, spec = trajectory.tree, finished("r").spec
    everything = select_branches(tree, max_branches=0, role_order=ORDER, rng=selection_rng(0, 0, "r"))
    costs = selection_costs(tree, everything, ORDER)

    selected = select_branches(tree, max_branches=cap, role_order=ORDER, rng=selection_rng(0, 0, "r"))
    branches = training_branches(spec, tree, selected, advantage=1.0, temperature=1.0)
    (step,) = pack_branches(branches, 10**6)
    at = len(selected)
    assert costs.flat_tokens[at] == step.num_branch_tokens
    assert costs.packed_tokens[at] == step.num_tokens
    assert costs.packed_pairs[at] == int((step.position + 1).sum())
    assert costs.targets[at] == step.rows.num_rows


def test_bench_select_adds_up_and_the_same_seed_gives_the_same_costs() -> None:
    first, second = (bench_select(num_rollouts=18, num_calls=40, num_tokens=4_000, seed=3) for _ in range(2))

    assert (first["rollouts"], first["calls"]) == (18, 720)
    assert first["caps"] == second["caps"] and first["targets"] == second["targets"]
    assert first["training_branches"] <= 5 * 18
    assert 0 < first["targets"] <= first["tree_targets"] < first["unique_tokens"]
    assert first["tokens_per_s"] == pytest.approx(first["unique_tokens"] / first["process_s"], rel=0.1)
    shares = [first["caps"][cap] for cap in ("1", "3", "5", "10", "uncapped")]
    for name in ("flat_tokens", "flat_pairs", "packed_tokens", "targets"):
        assert np.all(np.diff([share[name] for share in shares]) >= 0), name
    assert shares[-1]["flat_tokens"] == shares[-1]["targets"] == 1.0
    assert all(share["packed_tokens"] <= share["flat_tokens"] for share in shares)
    assert shares[0]["packed_tokens"] == shares[0]["flat_tokens"], "one branch shares with nobody"


def test_bench_select_less_branching_gives_fewer_branches() -> None:
    many, few = (
        bench_select(num_rollouts=4, num_calls=60, num_tokens=3_000, seed=0, branching=branching)
        for branching in (2.0, 0.0)
    )
    assert few["branches_per_rollout"] < many["branches_per_rollout"]
    assert few["caps"]["5"]["flat_tokens"] > many["caps"]["5"]["flat_tokens"]


def test_bench_select_cli_json_is_one_object_and_the_table_names_every_cap() -> None:
    arguments = ["bench", "select", "--rollouts", "2", "--calls", "20", "--tokens", "1000"]
    done = CliRunner().invoke(app, [*arguments, "--json"])

    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"tokens_per_s", "process_s", "caps", "once_only_target_rows", "peak_rss_mb"} <= result.keys()
    firsts = [line.split()[0] for line in select_rows(result) if line]
    assert firsts[-5:] == ["1", "3", "5", "10", "uncapped"]


@pytest.mark.parametrize("sizes", [{"num_rollouts": 0}, {"num_rollouts": 1, "branching": -1.0}])
def test_bench_select_of_nothing_is_refused(sizes: dict) -> None:
    with pytest.raises(ValueError, match="at least one"):
        bench_select(**{"num_calls": 20, "num_tokens": 1000, "seed": 0, **sizes})
