"""Worlds from stored runs: the fit of the engine's speed to measured calls."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre_core.sim.trace import Call, EngineFit, TracedRollout, build_trace, fit_engine, start_delays
from gyre_core.sim.world import simulate
from tests.support.runs import small_config


def call(start_s: float, end_s: float, tokens: int) -> Call:
    return Call(start_s=start_s, end_s=end_s, prompt_tokens=10, output_tokens=tokens)


def test_engine_fit_finds_the_time_of_a_token_and_of_its_neighbours() -> None:
    # Alone 10 tokens take 1 + 10 * (0.1 + 0.05) s; beside one other the load is 2.
    alone = [call(100.0 * n, 100.0 * n + 1 + tokens * 0.15, tokens) for n, tokens in enumerate((10, 20, 40))]
    pair = [call(1_000.0 + 100 * n, 1_000.0 + 100 * n + 1 + 20 * 0.2, 20) for n in (0, 1) for _ in range(2)]
    constant_s, alpha_s, beta_s = fit_engine([*alone, *pair])
    assert (constant_s, alpha_s, beta_s) == pytest.approx((1.0, 0.1, 0.05))


def test_engine_fit_without_load_leaves_the_load_out() -> None:
    constant_s, alpha_s, beta_s = fit_engine([call(0.0, 2.0, 10), call(10.0, 14.0, 20)])
    assert (alpha_s + beta_s, constant_s) == pytest.approx((0.2, 0.0), abs=1e-9)


def rollout(name: str, start_s: float, end_s: float) -> TracedRollout:
    return TracedRollout(rollout_id=name, group_id="g", problem_id="p", step=0, start_s=start_s, end_s=end_s, calls=())


def test_start_delays_count_from_the_slot_that_a_rollout_took() -> None:
    # Two slots. b starts 0.5 s after a; c takes a's slot 2 s after its end, d b's after 1 s, e that of c at once.
    batch = [
        rollout("a", 10.0, 20.0),
        rollout("b", 10.5, 30.0),
        rollout("c", 22.0, 40.0),
        rollout("d", 31.0, 50.0),
        rollout("e", 40.0, 60.0),
    ]
    assert start_delays(batch, slots=2) == pytest.approx({"a": 0.0, "b": 0.5, "c": 2.0, "d": 1.0, "e": 0.0})


def test_start_delays_with_slots_for_all_count_from_the_first_start() -> None:
    batch = [rollout("a", 10.0, 20.0), rollout("b", 10.5, 30.0), rollout("c", 12.0, 40.0)]
    assert start_delays(batch, slots=8) == pytest.approx({"a": 0.0, "b": 0.5, "c": 2.0})


def test_trace_counts_what_the_run_itself_took(tmp_path: Path) -> None:
    """6 s until the last group is complete, 1 s of training after it, 2 s until the next dispatch."""
    config = small_config(tmp_path, rollout__slots=6)
    rollouts = [
        replace(rollout(f"s0000-{problem}-{member}", 100.0 + member, 104.0), group_id=f"s0000-{problem}")
        for problem in "ab"
        for member in range(3)
    ]
    record = SimpleNamespace(
        step=0,
        stats={"step_s": 9.0, "rollout_s": 6.0, "train_tail_s": 1.0, "optimizer_s": 0.25, "forward_backward_s": 0.5},
        micro_steps=((), ()),
        extra={
            "decisions": [
                {"moves": [{"to": "train"}], "outcomes": [{"seconds": 0.5, "failed": ""}]},
                {"moves": [{"to": "train"}], "outcomes": [{"seconds": 9.0, "failed": "refused"}]},
                {"moves": [{"to": "rollout"}], "outcomes": [{"seconds": 3.0, "failed": ""}]},
            ]
        },
    )
    trace = build_trace("r1", config, [record], rollouts)  # type: ignore[list-item]
    costs = trace.scenario.costs
    assert costs.grade_s == pytest.approx(6.0 - 4.0), "from the last rollout's end to the last complete group"
    assert costs.optimizer_s == pytest.approx(0.25 + 2.0)
    assert (costs.to_train_s, costs.to_rollout_s, costs.sync_s) == (0.5, 0.0, 0.0), "returns are part of the close"
    assert trace.batches[0][0].rollouts[2].tools_s[0] == pytest.approx(2.0 + 2.0), "started 2 s late, then ran for 2 s"
    assert trace.step_s == (9.0,)


def test_a_call_is_as_much_work_as_it_took() -> None:
    """Beside as many calls as when it was measured it takes as long, whatever the fit says of its tokens."""
    calls = [call(0.0, 2.5, 10), call(1.0, 4.0, 25), call(10.0, 10.7, 30), call(20.0, 26.0, 20)]
    fit = EngineFit.of(calls, cells=1)
    for one in calls:
        work, constant_s = fit.work(one)
        seconds = constant_s + work * (fit.alpha_s + fit.beta_s * fit.at_once[one])
        assert seconds == pytest.approx(one.end_s - one.start_s)
        assert work >= 0
    nothing = call(30.0, 30.0, 5)
    assert fit.work(nothing) == (0.0, 0.0)


@pytest.mark.parametrize("cells", [1, 3])
def test_a_run_without_limits_takes_in_its_world_what_it_took(tmp_path: Path, cells: int) -> None:
    """Three rollouts with slots of their own, one after the other's calls: the step ends when the slowest is graded."""
    config = small_config(tmp_path, rollout__slots=6, scheduler__cells=cells)
    rollouts = []
    for member, lengths in enumerate(((2.0, 1.0), (4.0, 3.5), (1.0, 6.0))):
        start_s, calls, at_s = 100.0, [], 100.5
        for seconds in lengths:
            calls.append(call(at_s, at_s + seconds, round(10 * seconds) + member))
            at_s += seconds + 0.25
        name = f"s0000-a-{member}"
        rollouts.append(replace(rollout(name, start_s, at_s), calls=tuple(calls), reward=1.0, group_id="s0000-a"))
    stats = {"step_s": 12.0, "rollout_s": 9.0, "train_tail_s": 1.0, "optimizer_s": 0.5, "forward_backward_s": 0.5}
    record = SimpleNamespace(step=0, stats=stats, micro_steps=((),), extra={})
    trace = build_trace("r1", config, [record], rollouts)  # type: ignore[list-item]
    assert trace.scenario.cluster.one_machine == (cells == 3)
    longest_s = max(one.end_s for one in rollouts) - 100.0
    result = simulate(trace.scenario, "elastic", source=trace.source)
    # The tail until the last complete group, the close after training, the optimizer step; no branch was selected.
    assert result.hours * 3600 == pytest.approx(longest_s + (9.0 - longest_s) + 0.5 + 2.0, abs=0.05)
