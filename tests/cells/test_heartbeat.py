"""When a cell counts as dead: by hand, on a clock that only moves when told."""

from typing import Any

import httpx

from gyre_core.cells.heartbeat import Pulse, PulseRule, engine_answers
from gyre_core.clock import ManualClock
from gyre_core.engine.fake import FakeEngineServer

RULE = PulseRule(heartbeat_s=2.0, dead_after_s=20.0, stalled_after_s=100.0)


def status(state: str = "rollout", **step: Any) -> dict[str, Any]:
    return {"state": state, "epoch": 1, "policy_version": 0, "served_version": 0, "step": step or None}


def test_pulse_silence_is_death_after_the_allowed_time_and_an_answer_forgives_it() -> None:
    clock = ManualClock()
    pulse = Pulse(RULE, clock)
    clock.advance(19.9)
    assert pulse.silent() is None
    assert pulse.answered(status(), busy=False) is None
    clock.advance(19.9)
    assert pulse.silent() is None
    clock.advance(0.1)
    assert pulse.silent() == "it did not answer for 20.0 s"


def test_pulse_engine_that_ended_is_death_only_when_it_stays_and_no_request_mends_it() -> None:
    pulse = Pulse(RULE, ManualClock())
    assert [pulse.answered(status("dead"), busy=False) for _ in range(3)] == [None, None, "its engine ended"]
    pulse = Pulse(RULE, ManualClock())
    looks = [pulse.answered(status("dead"), busy=True) for _ in range(3)]
    looks += [pulse.answered(status("rollout"), busy=True), pulse.answered(status("dead"), busy=False)]
    assert looks == [None] * 5


def test_pulse_engine_that_should_serve_and_is_silent_is_death_after_the_allowed_time() -> None:
    clock = ManualClock()
    pulse = Pulse(RULE, clock)
    clock.advance(19.0)
    assert pulse.answered(status(), busy=False, engine_silent=True) is None
    assert pulse.answered(status(), busy=False) is None
    clock.advance(19.0)
    assert pulse.answered(status(), busy=False, engine_silent=True) is None
    clock.advance(1.0)
    reason = pulse.answered(status(), busy=False, engine_silent=True)
    assert reason == "its engine did not answer for 20.0 s"


def test_engine_that_refuses_lives_and_one_that_nobody_serves_does_not() -> None:
    with httpx.Client(timeout=2.0, trust_env=False) as http:
        with FakeEngineServer(api_key="right") as server:
            assert engine_answers(http, (server.url, "right"))
            assert engine_answers(http, (server.url, "wrong"))
        assert not engine_answers(http, (server.url, None))


def test_pulse_work_without_progress_is_death_and_idleness_is_not() -> None:
    clock = ManualClock()
    pulse = Pulse(RULE, clock)
    for _ in range(3):  # serving, nothing to do: nothing changes for long
        clock.advance(99.0)
        assert pulse.answered(status(), busy=False) is None
    clock.advance(99.0)
    assert pulse.answered(status("training", pending=3, completed=1), busy=False) is None
    clock.advance(99.0)
    assert pulse.answered(status("training", pending=2, completed=2), busy=False) is None  # it gets on
    clock.advance(99.0)
    assert pulse.answered(status("training", pending=2, completed=2), busy=False) is None
    clock.advance(1.0)
    reason = pulse.answered(status("training", pending=2, completed=2), busy=False)
    assert reason == "it has work and made no progress for 100 s"


def test_pulse_request_of_ours_that_never_ends_is_death() -> None:
    clock = ManualClock()
    pulse = Pulse(RULE, clock)
    assert pulse.answered(status("returning"), busy=True) is None
    clock.advance(100.0)
    assert pulse.answered(status("returning"), busy=True) == "it has work and made no progress for 100 s"


def test_rule_several_looks_fit_into_the_allowed_silence() -> None:
    assert PulseRule(dead_after_s=20.0).look_timeout_s == 20.0 / 3
    assert PulseRule(dead_after_s=0.3).look_timeout_s == 0.2
