"""The real Claude Code in front of the proxy process: the Messages API, streamed."""

from pathlib import Path

import pytest

from gyre_core.types import Role
from tests.support.harnesses import assert_recorded, assert_steps, run_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]


def test_claude_code_tour_shows_two_sub_agents_at_once_and_a_compaction(tmp_path: Path) -> None:
    run = run_harness("claude-code", "tour", tmp_path, timeout_s=680)  # with the installation
    # After a compaction it repeats its newest assistant turn behind the summary: known tokens at a new place.
    assert_recorded(run, {"main": 7, "main-summary": 1, "sub-agent": 4}, {"clean": 11, "forked": 1})
    assert_steps(run, Role.MAIN, "main", 7)
    assert_steps(run, Role.SUB_AGENT, "sub", 2)
    assert_steps(run, Role.SUB_AGENT, "aide", 2)
    # It sends their results as they end; the policy reads them in the order of its calls.
    (results,) = run.prompts_with("[aide 2]")
    assert results.index("[sub 2]") < results.index("[aide 2]")
    assert run.summary["branches"] == {"main": 2, "main-summary": 1, "sub-agent": 2}
    assert (run.workspace / "aide.txt").read_text() == "aide\n"
