"""`gyre bench elastic`: the scaled scenario by hand, the configuration it writes, its arithmetic."""

from pathlib import Path

import pytest

from gyre_core.bench.elastic import (
    bench_elastic,
    bound_of,
    effort_of,
    headlines,
    source_of_emulation,
    worst,
)
from gyre_core.bench.elastic_inputs import save_emulated_model
from gyre_core.bench.elastic_run import run_config, to_toml, write_inputs
from gyre_core.bench.elastic_scale import scale
from gyre_core.bench.elastic_soak import growth
from gyre_core.config import load_run_config
from gyre_core.proxy.conversation import Message
from gyre_core.proxy.render import PromptRenderer
from gyre_core.rollout.dispatch import problems_of_step
from gyre_core.rollout.workload import TURN_TOKENS, plan_rollout
from gyre_core.sim.model import Cluster, Costs, Scenario, Workload
from gyre_core.sim.world import simulate

SCENARIO = Scenario(
    workload=Workload(
        groups=16, group_size=4, sampled_tokens=1000.0, max_tokens=4000.0, unique_ratio=3.0, prompt_tokens=0.0
    ),
    costs=Costs(nodes_per_engine=2.0, alpha_s=0.01, beta_s=0.001, train_tokens_per_node_s=100.0, micro_overhead_s=1.0),
    cluster=Cluster(cells=2, nodes_per_cell=8.0, slots=64),
    steps=2,
)


def test_scale_a_token_takes_as_long_as_in_the_whole_cluster_at_the_same_fill():
    scaled = scale(SCENARIO, groups=4, steps=2, compression=1.0, mean_tokens=300.0)
    assert (scaled.share, scaled.tokens_per_token) == (0.25, 10.0)
    assert scaled.scenario.cluster.slots == 16
    # full: 4 engines, 64 calls, 16 on each: 0.01 + 0.016. Emulated: ten tokens at once, 16 calls on one engine
    assert scaled.emulation.engine.token_s(16) == pytest.approx(10 * (0.01 + 0.016))
    # full: 800 tokens a second and cell for 16 groups; emulated: 200 for 4, ten at once
    assert scaled.emulation.train.compute_s(1) == pytest.approx(1.0 + 10 / 200)
    assert scaled.emulation.workload.sampled_tokens == 100.0
    assert scaled.emulation.workload.max_tokens == 400.0


def test_scale_whole_batch_changes_nothing_for_the_simulator():
    scaled = scale(SCENARIO, groups=16, steps=2, compression=1.0)
    whole, small = simulate(SCENARIO, "elastic", seed=3), simulate(scaled.scenario, "elastic", seed=3)
    assert small.hours == pytest.approx(whole.hours, rel=0.02)


def test_source_is_the_work_that_the_run_dispatches():
    scaled = scale(SCENARIO, groups=4, steps=2, compression=1.0, mean_tokens=300.0)
    (first, *rest) = source_of_emulation(scaled)(1)
    assert len(rest) == 3 and len(first.rollouts) == 4
    names = problems_of_step([f"p{number:03d}" for number in range(64)], seed=0, step=1, groups_per_step=4)
    plan = plan_rollout(scaled.emulation.workload, f"s0001-{names[0]}-02")
    assert first.rollouts[2].tokens == [10.0 * tokens for tokens in plan.call_tokens]
    assert first.rollouts[2].tools_s == list(plan.tools_s)
    assert bound_of(scaled.scenario, source_of_emulation(scaled)) > 0


@pytest.mark.parametrize("policy", ["elastic", "async_stream"])
def test_config_written_is_a_run_configuration(tmp_path: Path, policy: str):
    write_inputs(tmp_path, problems=3)
    scaled = scale(SCENARIO, groups=4, steps=2, compression=1.0)
    tree = run_config(tmp_path, scaled, name="case", policy=policy, train_cells=1, steps=5, compression=250.0)
    path = tmp_path / "case.toml"
    path.write_text(to_toml(tree))
    config = load_run_config(path)
    assert config.emulate is not None and config.emulate.compression == 250.0
    assert config.emulate.engine == scaled.emulation.engine
    assert (config.scheduler.policy, config.scheduler.cells, config.scheduler.staleness) == (policy, 2, 1)
    assert (config.rollout.slots, config.slots_per_cell, config.train.steps) == (32, 16, 5)


def test_model_folder_has_a_token_a_letter_and_the_turns_that_the_workload_counts(tmp_path: Path):
    renderer = PromptRenderer.load(save_emulated_model(tmp_path))
    user = Message(role="user", text="abcde")
    prompt = renderer.render([user], ())
    assert len(prompt) == 5 + 8
    reply = [renderer.render([Message(role="user", text="f")], ())[3], renderer.stop_token_ids[0]]
    tail = renderer.extend(prompt, reply, [Message(role="user", text="gh")], (), lambda: [user])
    assert tail is not None and len(tail) == 2 + TURN_TOKENS + 1


def test_headlines_are_ratios_of_steps_per_hour_and_the_worst_preset_counts():
    first = headlines({"elastic": 3.0, "colocate": 2.0, "async_off1": 1.5, "async_stream": 3.0}, {"elastic": 0.9})
    assert (first["elastic_over_colocate"], first["elastic_over_async"], first["elastic_over_async_stream"]) == (
        1.5,
        2.0,
        1.0,
    )
    assert first["predictive_over_elastic"] is None and first["fraction_of_bound"] == 0.9
    second = headlines({"elastic": 3.0, "colocate": 2.5, "async_off1": 1.0, "async_stream": 2.0}, {"elastic": 0.95})
    assert worst([first, second])["elastic_over_colocate"] == 1.2
    assert worst([first, second])["elastic_over_async"] == 2.0
    assert worst([first, second])["predictive_over_elastic"] is None


def test_growth_is_the_slope_of_the_second_half():
    samples = [{"at_s": 600.0 * i, "flow MB": 100.0 if i < 6 else 100.0 + 2 * (i - 6)} for i in range(12)]
    assert growth(samples)["flow MB"] == 12.0  # 2 MB in ten minutes
    stepped = [{**sample, "steps": 2.0 * i} for i, sample in enumerate(samples)]
    assert growth(stepped, against="steps", unit=1.0)["flow MB"] == 1.0
    assert growth([{**sample, "steps": 4.0} for sample in samples], against="steps", unit=1.0)["flow MB"] == 0.0


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown presets"):
        bench_elastic(["nothing"], effort_of(quick=True), folder=Path("nowhere"))
    with pytest.raises(ValueError, match="unknown policies"):
        effort_of(policies=["best"])
