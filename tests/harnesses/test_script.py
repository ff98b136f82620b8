"""The scripted policy of examples/harnesses: stateless, in the policy's own chat format."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from gyre_core.proxy.conversation import Message
from gyre_core.proxy.render import PromptRenderer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HARNESSES = sorted((EXAMPLES / "harnesses").glob("*.toml"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("harness_script", EXAMPLES / "harnesses" / "script.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    return PromptRenderer.load(EXAMPLES / "quickstart" / "policy")


def prompt(*turns: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


def two_threads(script: ModuleType):
    return script.Script.read(
        {"marks": ["Summarize now"], "text": "At {mark} of {marker}."},
        {
            "main": [{"text": "one", "calls": [{"name": "go", "arguments": {"to": "{{id=(\\w+)}}"}}]}, {"text": "two"}],
            "sub": [{"text": "mine"}],
        },
    )


def test_script_answers_by_the_marks_in_the_prompt(script: ModuleType) -> None:
    policy = two_threads(script)
    start = ("user", "TOUR-MAIN: do it")
    first = policy.answer(prompt(("system", "s"), start))
    assert first == policy.answer(prompt(("system", "s"), start))  # a retry gets the same
    assert first.text == "[main 1] one" and first.calls[0]["arguments"] == {"to": "not-found"}
    assert policy.answer(prompt(start, ("assistant", "[main 1] one"))).text == "[main 2] two"
    assert policy.answer(prompt(start, ("assistant", "[main 2] two"))).text == "[main 2] two"


def test_script_looks_arguments_up_in_the_prompt(script: ModuleType) -> None:
    step = two_threads(script).answer(prompt(("user", "TOUR-MAIN id=a1 then id=b2")))
    assert step.calls[0]["arguments"] == {"to": "b2"}


def test_script_knows_a_sub_agent_by_its_user_turn_not_by_tool_results(script: ModuleType) -> None:
    policy = two_threads(script)
    assert policy.answer(prompt(("user", "TOUR-SUB: write"))).text == "[sub 1] mine"
    response = "<tool_response>\nTOUR-MAIN\n</tool_response>"
    assert policy.answer(prompt(("user", "TOUR-SUB"), ("assistant", "x"), ("user", response))).text == "[sub 1] mine"
    assert "no part" in policy.answer(prompt(("user", "something else"))).text


def test_script_summary_carries_the_progress_over(script: ModuleType) -> None:
    policy = two_threads(script)
    asked = prompt(("user", "TOUR-MAIN"), ("assistant", "[main 1] one"), ("user", "Summarize now, please"))
    summary = policy.answer(asked).text
    assert summary == "At [main 1] of TOUR-MAIN."
    assert policy.answer(prompt(("user", f"Earlier: {summary}"))).text == "[main 2] two"


@pytest.mark.parametrize("path", HARNESSES, ids=lambda path: path.stem)
@pytest.mark.parametrize("scenario", ["tour", "silence"])
def test_scripts_outputs_are_read_as_they_are_meant(
    script: ModuleType, renderer: PromptRenderer, path: Path, scenario: str
) -> None:
    data = tomllib.loads(path.read_text())
    policy = script.Script.read(data.get("summary", {}), data["scripts"][scenario])
    for thread, steps in policy.threads.items():
        for number in range(len(steps)):
            messages = [Message(role="user", text=f"TOUR-{thread.upper()}: do it [{thread} {number}]")]
            step = policy.answer(renderer.decode(renderer.render(messages, [])))
            ids = renderer._tokenizer.encode(script.output_text(step))
            reply = renderer.parse(ids, [], [])
            assert reply.text == step.text and reply.reasoning == step.think and not reply.num_malformed
            assert reply.tool_calls == tuple((call["name"], call["arguments"]) for call in step.calls)
            assert ids[-1] in renderer.stop_token_ids
    assert sum(step.stall for step in policy.threads["main"]) == (scenario == "silence")
