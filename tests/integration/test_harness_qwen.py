"""The real Qwen Code in front of the proxy process: Chat Completions, streamed."""

from pathlib import Path

import pytest

from gyre_core.types import Role
from tests.support.harnesses import assert_recorded, assert_steps, run_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]


# Not in every run: Node alone took 60 to 80 s to start on a machine twenty times too busy, and once the calls were done
# the program took more than half a minute to end. The 180 s that the problem used to give cut it off, with fewer calls.
@pytest.mark.slow
def test_qwen_tour_shows_two_sub_agents_at_once_and_a_compaction(tmp_path: Path) -> None:
    run = run_harness("qwen-code", "tour", tmp_path, timeout_s=680)  # with the installation
    # Its summary is asked for under another system prompt, and what follows it starts anew.
    assert_recorded(run, {"main": 7, "main-summary": 1, "sub-agent": 4}, {"clean": 10, "forked": 2})
    assert_steps(run, Role.MAIN, "main", 7)
    assert_steps(run, Role.SUB_AGENT, "sub", 2)
    assert_steps(run, Role.SUB_AGENT, "aide", 2)
    assert run.summary["branches"] == {"main": 2, "main-summary": 1, "sub-agent": 2}
    assert (run.workspace / "aide.txt").read_text() == "aide\n"
