"""Real harnesses in front of an engine that is silent for a while, and of a proxy that is killed meanwhile."""

from pathlib import Path

import pytest

from tests.support.harnesses import assert_survived_crash, assert_survived_silence, run_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(700)]  # with the installation


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code"])
def test_harness_silent_engine_is_waited_for(name: str, tmp_path: Path) -> None:
    run = run_harness(name, "silence", tmp_path, "--stall-s", "4", "--keepalive-s", "0.5", timeout_s=680)
    assert_survived_silence(run, stall_s=4, keepalive_s=0.5)


@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_harness_proxy_killed_behind_an_open_reply_goes_on(name: str, tmp_path: Path) -> None:
    options = ("--crash", "--stall-s", "2", "--keepalive-s", "0.5")
    assert_survived_crash(run_harness(name, "silence", tmp_path, *options, timeout_s=680))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_harness_six_minutes_of_silence_are_waited_for(name: str, tmp_path: Path) -> None:
    run = run_harness(name, "silence", tmp_path, timeout_s=680)
    assert_survived_silence(run, stall_s=360, keepalive_s=15)
