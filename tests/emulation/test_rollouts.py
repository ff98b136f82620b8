"""Emulated rollouts: what they draw, and that they go through the real proxy as a harness does."""

from pathlib import Path

import numpy as np
import pytest

from gyre_core.bench.elastic_inputs import save_emulated_model, save_emulated_problems
from gyre_core.config.emulation import EmulationConfig, EngineCosts, Workload
from gyre_core.config.models import GradingConfig, HarnessConfig, RolloutConfig
from gyre_core.engine.emulated import EmulatedEngine
from gyre_core.engine.emulated_server import EmulatedServer
from gyre_core.engine.sglang_client import SGLangClient
from gyre_core.grading.problems import load_problem
from gyre_core.proxy.admin_client import ProxyAdmin
from gyre_core.rollout.emulated import API_KEY, BASE_URL, EmulatedEnvironment
from gyre_core.rollout.runner import run_rollout
from gyre_core.rollout.workload import plan_rollout
from gyre_core.types import Outcome, RolloutSpec
from tests.support.proxies import ADMIN_SECRET, running_proxy, serving

WORKLOAD = Workload(sampled_tokens=40.0, unique_ratio=3.0, segments=4, tool_s=100.0, grade_s=10.0)
HARNESS = HarnessConfig(name="emulated", command=("emulated",), env={BASE_URL: "{base_url}", API_KEY: "{api_key}"})
ROLLOUT = RolloutConfig(harness=HARNESS, time_limit_s=20.0, overall_limit_s=40.0)


def plans(workload: Workload, groups: int, members: int = 16) -> np.ndarray:
    return np.array(
        [[plan_rollout(workload, f"s0-g{g}-{m:02d}").sampled_tokens for m in range(members)] for g in range(groups)]
    )


def test_plan_same_id_same_work_and_another_seed_other_work():
    assert plan_rollout(WORKLOAD, "s0-p1-03") == plan_rollout(WORKLOAD, "s0-p1-03")
    other = WORKLOAD.model_copy(update={"seed": 1})
    assert plan_rollout(WORKLOAD, "s0-p1-03") != plan_rollout(other, "s0-p1-03")


def test_plan_lengths_have_the_configured_mean_and_are_alike_within_a_group():
    tokens = plans(WORKLOAD.model_copy(update={"sigma_rollout": 0.1, "max_tokens": 1e6}), groups=200)
    assert tokens.mean() == pytest.approx(40.0, rel=0.12)  # 200 groups with sigma 0.5: 4 % standard error
    assert np.log(tokens).mean(axis=1).std() == pytest.approx(0.5, rel=0.2)
    assert np.log(tokens).std(axis=1).mean() == pytest.approx(0.1, rel=0.3)


def test_plan_without_spread_has_the_numbers_worked_by_hand():
    workload = WORKLOAD.model_copy(update={"sigma_group": 0.0, "sigma_rollout": 0.0, "tool_sigma": 0.0})
    plan = plan_rollout(workload, "s0-p1-03")
    assert plan.sampled_tokens == 40
    assert sum(plan.tools_s) == pytest.approx(100.0)
    assert plan.reward == 1.0 and plan_rollout(workload, "s0-p1-02").reward == 0.0
    assert plan_rollout(workload.model_copy(update={"max_tokens": 12.0}), "s0-p1-03").sampled_tokens == 12


def test_plan_id_without_member_refused():
    with pytest.raises(ValueError, match="member"):
        plan_rollout(WORKLOAD, "rollout")


async def run_one(tmp_path: Path, workload: Workload, member: int, *, time_limit_s: float = 20.0):
    """One emulated rollout through a real proxy and an emulated engine; the result and the engine."""
    config = EmulationConfig(compression=2000.0, engine=EngineCosts(alpha_s=1.0), workload=workload)
    model = save_emulated_model(tmp_path / "model")
    problem = load_problem(save_emulated_problems(tmp_path / "problems", 1) / "p000")
    name = f"s0000-p000-{member:02d}"
    spec = RolloutSpec(
        rollout_id=name,
        group_id="s0000-p000",
        problem_id="p000",
        step=0,
        member=member,
        dispatch_version=0,
        seed=1,
    )
    with EmulatedServer(EmulatedEngine(config, slots=4, letters=[64, 65]), api_key="secret") as server:
        async with (
            SGLangClient(server.url, vocab_size=400, api_key="secret", timeout_s=10) as engine,
            running_proxy(model, {server.url: engine}) as proxy,  # type: ignore[dict-item]
            serving(proxy) as url,
            ProxyAdmin(url, ADMIN_SECRET) as admin,
        ):
            finished = await run_rollout(
                spec,
                problem,
                rollout=ROLLOUT.model_copy(update={"time_limit_s": time_limit_s}),
                grading=GradingConfig(),
                proxy=admin,
                sandbox=EmulatedEnvironment(config),
                workdir=tmp_path / "rollouts" / name,
            )
        return finished, server.engine


async def test_rollout_is_recorded_as_planned_and_graded(tmp_path: Path):
    finished, engine = await run_one(tmp_path, WORKLOAD, member=1)
    plan = plan_rollout(WORKLOAD, "s0000-p000-01")
    tree = finished.trajectory.tree
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.FINISHED, 1.0)
    assert [call.output_tokens for call in finished.trajectory.calls] == list(plan.call_tokens)
    assert tree.sampled_tokens == plan.sampled_tokens
    assert len(list(tree.leaves())) == 1  # one conversation, token by token
    # the last tool's answer is in no prompt; template and prompt are 8 tokens each
    shown = sum(plan.tool_tokens[:-1])
    assert tree.unique_tokens == pytest.approx(plan.sampled_tokens + shown + 9 * 4 + 8, abs=4)
    assert engine.counters["sampled_tokens"] == plan.sampled_tokens
    assert engine.counters["prefill_tokens"] <= tree.unique_tokens  # the cache holds all that was there before


async def test_rollout_failing_for_reasons_outside_is_excluded(tmp_path: Path):
    finished, _ = await run_one(tmp_path, WORKLOAD.model_copy(update={"failing_share": 1.0}), member=0)
    assert finished.grade.reward is None
    assert "machine was lost" in finished.grade.reason


async def test_rollout_beyond_its_time_limit_is_graded(tmp_path: Path):
    workload = WORKLOAD.model_copy(update={"tool_s": 1e9})
    finished, _ = await run_one(tmp_path, workload, member=1, time_limit_s=0.5)
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.TIME_LIMIT, 1.0)
