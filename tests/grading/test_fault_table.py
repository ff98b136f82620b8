"""The readable index of "grading and groups" in the fault table: one test a row, each the whole way.

A harness runs in a sandbox and calls the proxy, its rollout is sealed and graded by a real verifier in a sandbox, and
where the row is about a group, the grades go through advantage and selection. Variants of the rows are in
test_verifier.py, test_outcomes.py, ../rollout/test_runner.py and ../selection/.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from gyre_core.config.models import GradingConfig, HarnessConfig, RolloutConfig, SelectionConfig
from gyre_core.grading.problems import Problem
from gyre_core.rollout.runner import FinishedRollout, run_rollout
from gyre_core.rollout.sandbox import Sandbox
from gyre_core.selection.batch import GroupBranches, build_branches
from gyre_core.types import Outcome, RolloutSpec
from tests.support.fake_proxy import CALL_SH, FakeProxy
from tests.support.problems import TASK_TOML, make_problem
from tests.support.sandboxes import new_marker, processes_with

CALL = 'call "$BASE" "$KEY" > reply; '
# The verifier of the group rows: what the agent wrote is its reward; `broken` makes the verifier fail.
COPY_ANSWER = "[ -e broken ] && exit 3; cat answer > /logs/verifier/reward.txt"


@pytest.fixture(scope="module")
def one_sandbox() -> Sandbox:
    """The back end that a run would take on this machine."""
    return Sandbox("auto")


class Rows:
    """Runs rollouts of one problem the whole way."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.proxy = FakeProxy()
        self.grading = GradingConfig(timeout_s=20.0, attempts=2)

    def problem(self, test_sh: str, name: str = "p1", **times: str) -> Problem:
        agent_s, verifier_s = times.get("agent", "20.0"), times.get("verifier", "30.0")
        toml = TASK_TOML.replace("timeout_sec = 20.0", f"timeout_sec = {agent_s}")
        toml = toml.replace("timeout_sec = 30.0", f"timeout_sec = {verifier_s}")
        return make_problem(self.folder / name, test_sh=test_sh, task_toml=toml)

    async def rollout(self, problem: Problem, script: str, *, member: int = 0, group: str = "") -> FinishedRollout:
        group_id = group or f"s0000-{problem.problem_id}"
        spec = RolloutSpec(
            rollout_id=f"{group_id}-{member:02d}",
            group_id=group_id,
            problem_id=problem.problem_id,
            step=0,
            member=member,
            dispatch_version=0,
            seed=member,
        )
        harness = HarnessConfig(
            command=("bash", "-c", CALL_SH + script), env={"BASE": "{base_url}", "KEY": "{api_key}", "MODEL": "{model}"}
        )
        return await run_rollout(
            spec,
            problem,
            rollout=RolloutConfig(harness=harness, time_limit_s=20.0, overall_limit_s=60.0),
            grading=self.grading,
            proxy=self.proxy,
            sandbox=self.sandbox,
            workdir=self.folder / "work" / spec.rollout_id,
        )

    async def group(self, problem: Problem, answers: list[str], group: str = "") -> list[FinishedRollout]:
        """A member for each answer; the answer "broken" is one whose verifier fails."""
        members = []
        for member, answer in enumerate(answers):
            script = CALL + ("touch broken" if answer == "broken" else f"echo {answer} > answer")
            members.append(await self.rollout(problem, script, member=member, group=group))
        return members


@pytest.fixture
async def rows(one_sandbox: Sandbox, tmp_path: Path):
    made = Rows(one_sandbox, tmp_path)
    async with made.proxy:
        yield made


def trained(members: list[FinishedRollout], *, min_group: int = 2) -> GroupBranches:
    return build_branches(
        members,
        selection=SelectionConfig(min_group=min_group),
        run_seed=0,
        trainer_version=0,
        max_staleness=0,
        temperature=1.0,
    )


async def excluded(rows: Rows, test_sh: str, reason: str, **times: str) -> FinishedRollout:
    """A verifier that fails: tried twice, then the rollout is excluded with the reason and never a 0."""
    problem = rows.problem(f"echo attempt >> /app/attempts; {test_sh}", **times)
    finished = await rows.rollout(problem, CALL + "echo 1 > answer")
    grade = finished.grade
    assert (grade.outcome, grade.reward, grade.included) == (Outcome.VERIFIER_FAILED, None, False)
    assert grade.verifier_attempts == 2
    assert reason in grade.reason and "the verifier failed 2 time(s)" in grade.reason
    assert len(finished.trajectory.calls) == 1, "what was recorded is kept for the store"
    others = [await rows.rollout(rows.problem("echo 1 > /logs/verifier/reward.txt", "p1"), CALL, member=1)]
    group = trained([finished, *others], min_group=1)
    assert list(group.left_out) == [finished.spec.rollout_id] and list(group.advantages.values()) == [0.0]
    return finished


async def test_row_verifier_crashes_is_retried_then_excluded(rows: Rows):
    await excluded(rows, "kill -SEGV $$", "exit code 139")


async def test_row_verifier_writes_no_file_is_retried_then_excluded(rows: Rows):
    await excluded(rows, "true", "it wrote neither reward.txt nor reward.json")


async def test_row_verifier_writes_nan_is_retried_then_excluded(rows: Rows):
    await excluded(rows, "echo nan > /logs/verifier/reward.txt", "must be a finite number")


async def test_row_verifier_writes_text_is_retried_then_excluded(rows: Rows):
    await excluded(rows, "echo all passed > /logs/verifier/reward.txt", "holds no number: 'all passed'")


async def test_row_verifier_hangs_is_ended_retried_then_excluded(rows: Rows):
    marker = new_marker()
    script = f"echo 1 > /logs/verifier/reward.txt; sleep 1000 # {marker}"
    finished = await excluded(rows, script, "it reached its time limit of 0.4 s", verifier="0.4")
    assert 0.8 <= finished.grade.verifier_s < 15, "both attempts, measured"
    assert processes_with(marker) == []


async def test_row_verifier_fails_once_then_grades(rows: Rows):
    problem = rows.problem("[ -e tried ] && echo 0.75 > /logs/verifier/reward.txt; touch tried")
    grade = (await rows.rollout(problem, CALL)).grade
    assert (grade.outcome, grade.reward, grade.verifier_attempts) == (Outcome.FINISHED, 0.75, 2)


async def test_row_agent_uses_its_whole_time_is_graded_with_the_verifiers_own_budget(rows: Rows):
    problem = rows.problem("sleep 0.7; cat answer > /logs/verifier/reward.txt", agent="0.6", verifier="20.0")
    finished = await rows.rollout(problem, CALL + "echo 0.5 > answer; sleep 1000")
    assert finished.harness.timed_out
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.TIME_LIMIT, 0.5)
    assert finished.grade.verifier_attempts == 1, "not ended by the agent's limit and tried again"
    assert finished.grade.verifier_s >= 0.7, "longer than the agent's whole time"


@pytest.mark.parametrize("ending", ["true", "sleep 1000"])
async def test_row_agent_made_no_call_is_an_infrastructure_failure_not_a_time_out(rows: Rows, ending: str):
    problem = rows.problem("touch /app/graded; echo 1 > /logs/verifier/reward.txt", agent="0.4")
    finished = await rows.rollout(problem, f"echo 1 > answer; {ending}")
    assert (finished.grade.outcome, finished.grade.reward) == (Outcome.NO_ARTIFACT, None)
    assert finished.grade.verifier_attempts == 0 and "without a model call" in finished.grade.reason


async def test_row_14_of_16_members_left_gives_statistics_over_14(rows: Rows):
    answers = ["broken", *["1"] * 7, "broken", *["0"] * 7]
    group = trained(await rows.group(rows.problem(COPY_ANSWER), answers))
    assert group.num_included == 14 and len(group.left_out) == 2
    assert all(reason.startswith("verifier_failed: ") for reason in group.left_out.values())
    # Mean 1/2 and deviation 1/2 over 14; with zeros for the two it would be 7/16.
    expected = [0.5 / (0.5 + SelectionConfig().advantage_eps)] * 7
    np.testing.assert_allclose(sorted(group.advantages.values()), [-value for value in expected] + expected, rtol=1e-12)


async def test_row_1_member_left_gives_advantage_0_or_drops_the_group(rows: Rows):
    members = await rows.group(rows.problem(COPY_ANSWER), ["broken", "0.7", "broken"])
    alone = trained(members, min_group=1)
    assert list(alone.advantages.values()) == [0.0]
    assert all(branch.advantage == 0.0 for branch in alone.branches)
    dropped = trained(members)
    assert dropped.branches == () and "1 of 3 members are included, 2 are needed" in str(dropped.dropped_reason)


async def test_row_all_equal_at_0_1_gives_exactly_0(rows: Rows):
    group = trained(await rows.group(rows.problem(COPY_ANSWER), ["0.1"] * 10))
    assert list(group.advantages.values()) == [0.0] * 10
    assert {branch.advantage for branch in group.branches} == {0.0}


async def test_row_excluded_member_with_an_extreme_value_does_not_shift_the_mean(rows: Rows):
    problem = rows.problem(COPY_ANSWER)
    members = await rows.group(problem, ["0", "1", "1000000"])
    assert members[2].grade.outcome is Outcome.VERIFIER_FAILED and "[0, 1]" in members[2].grade.reason
    with_it, without = trained(members), trained(members[:2])
    assert with_it.advantages == without.advantages
    assert sum(with_it.advantages.values()) == 0.0


async def test_row_members_in_any_order_mixed_with_other_groups_are_grouped_by_id(rows: Rows):
    problem = rows.problem(COPY_ANSWER)
    # The same problem dispatched twice: two groups.
    first, second = "s0000-p1", "s0000-p1.2"
    low, high = await asyncio.gather(
        rows.group(problem, ["0", "0.5", "broken"], first), rows.group(problem, ["0.25", "1", "1"], second)
    )
    expected = {group.group_id: group.advantages for group in (trained(low), trained(high))}
    arrived = [*low, *high]
    for seed in range(5):
        random.Random(seed).shuffle(arrived)
        grouped = {
            group_id: trained([member for member in arrived if member.spec.group_id == group_id])
            for group_id in (first, second)
        }
        assert {name: group.advantages for name, group in grouped.items()} == expected
    with pytest.raises(ValueError, match="members of one group"):
        trained(arrived)
