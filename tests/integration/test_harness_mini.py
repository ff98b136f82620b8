"""The real mini-swe-agent in front of the proxy process: Chat Completions without streaming."""

from pathlib import Path

import pytest

from gyre_core.types import Role
from tests.support.harnesses import assert_recorded, assert_steps, assert_survived_silence, run_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]


def test_mini_tour_is_one_branch_of_main_calls(tmp_path: Path) -> None:
    run = run_harness("mini-swe-agent", "tour", tmp_path, timeout_s=680)  # with the installation
    assert_recorded(run, {"main": 5}, {"clean": 5})
    assert_steps(run, Role.MAIN, "main", 5)
    assert run.summary["branches"] == {"main": 1}
    assert (run.workspace / "notes.txt").read_text() == "first line\n"


def test_mini_silent_engine_is_waited_for(tmp_path: Path) -> None:
    run = run_harness("mini-swe-agent", "silence", tmp_path, "--stall-s", "4", "--keepalive-s", "0.5", timeout_s=680)
    assert_survived_silence(run, stall_s=4, keepalive_s=0.5)
