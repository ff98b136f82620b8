"""The real Codex in front of the proxy process: the Responses API, streamed, with namespaced tools."""

from pathlib import Path

import pytest

from gyre_core.types import Role
from tests.support.harnesses import assert_recorded, assert_steps, run_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]


def test_codex_tour_shows_two_sub_agents_at_once_and_a_compaction(tmp_path: Path) -> None:
    run = run_harness("codex", "tour", tmp_path, timeout_s=680)  # with the installation
    # Its compaction call offers no tools, so the whole history is rendered anew.
    assert_recorded(run, {"main": 9, "main-summary": 1, "sub-agent": 4}, {"clean": 13, "forked": 1})
    assert_steps(run, Role.MAIN, "main", 9)
    assert_steps(run, Role.SUB_AGENT, "sub", 2)
    assert_steps(run, Role.SUB_AGENT, "aide", 2)
    assert run.summary["branches"] == {"main": 2, "main-summary": 1, "sub-agent": 2}
    assert (run.workspace / "aide.txt").read_text() == "aide\n"
