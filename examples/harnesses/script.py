"""A scripted policy: what the engine of these examples "samples", decided by the text of the prompt alone.

Enters: the decoded prompt of a call. Leaves: the text of its output in the policy's chat format, and whether the engine
must be silent before it. No state: a repeated call gets the same answer, and the order of calls does not matter. A
thread (the main agent, a sub-agent) is known by its marker in a user turn; its progress by the `[thread step]` marks
that the policy put into its own texts and that a summary carries over a compaction.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_core.engine.fake import FakeCall, FakeEngine
from gyre_core.types import Json

TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)(?=<\|im_end\|>|<\|im_start\|>|\Z)", re.DOTALL)
TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
LOOKUP = re.compile(r"\{\{(.+?)\}\}")  # in a text argument: the last match of this pattern in the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One output of a thread. Example: Step(text="I look.", calls=({"name": "bash", "arguments": {}},))"""

    text: str = ""
    think: str = ""
    calls: tuple[Json, ...] = ()
    stall: bool = False  # the engine is silent before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What every thread does, and how the harness asks for a summary.

    Example: Script(threads={"main": (Step(text="Done."),)}, summary_marks=("Summarize",))
    """

    threads: dict[str, tuple[Step, ...]]  # main first: its marker wins
    summary_marks: tuple[str, ...] = ()  # a prompt whose system or last user turn holds one asks for a summary
    summary_text: str = "I am at {mark} of {marker}."

    @classmethod
    def read(cls, summary: dict[str, Any], scenario: dict[str, Any]) -> "Script":
        """The script of a scenario's TOML: a list of steps for each thread."""
        threads = {
            name: tuple(Step(**{**step, "calls": tuple(step.get("calls", ()))}) for step in steps)
            for name, steps in scenario.items()
        }
        return cls(threads=threads, summary_marks=tuple(summary.get("marks", ())), **_text_of(summary))

    def answer(self, prompt: str) -> Step:
        """The output to a prompt, its texts filled in."""
        turns = TURN.findall(prompt)
        system = "\n".join(text for role, text in turns if role == "system")
        users = [TOOL_RESPONSE.sub("", text) for role, text in turns if role == "user"]
        asked = "\n".join(users)
        thread = next((name for name in self.threads if _marker(name) in asked), None)
        if thread is None:
            return Step(text="I have no part in this script.")
        later = prompt.partition("<|im_start|>user")[2]
        done = max((int(number) for number in re.findall(rf"\[{thread} (\d+)\]", later)), default=0)
        last = users[-1] if users else ""
        if any(mark in system or mark in last for mark in self.summary_marks):
            return Step(text=self.summary_text.format(mark=f"[{thread} {done}]", marker=_marker(thread)))
        steps = self.threads[thread]
        step = steps[min(done, len(steps) - 1)]
        return Step(
            text=f"[{thread} {min(done + 1, len(steps))}] {step.text}",
            think=step.think,
            calls=tuple({"name": call["name"], "arguments": _filled(call["arguments"], prompt)} for call in step.calls),
            stall=step.stall,
        )


def output_text(step: Step) -> str:
    """A step in the policy's chat format (Qwen3's), the end of the turn included."""
    parts = [f"<think>\n{step.think}\n</think>\n\n" if step.think else "", step.text]
    parts += [f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in step.calls]
    return "".join(parts) + "<|im_end|>"


class ScriptedEngine(FakeEngine):
    """A fake engine that follows a script, and is silent for `stall_s` where the script says so.

    Example: ScriptedEngine(script, encode=tokenizer.encode, decode=tokenizer.decode, vocab_size=1024)
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        vocab_size: int,
        stall_s: float = 0.0,
    ) -> None:
        super().__init__(self._output, vocab_size=vocab_size)
        self._policy, self._encode, self._decode, self._stall_s = script, encode, decode, stall_s
        self._crash: Callable[[], None] | None = None
        self.num_stalls = 0

    def crash_once(self, crash: Callable[[], None]) -> None:
        """At the end of the first silence do this and answer nothing; the next time answer at once."""
        self._crash = crash

    async def run(self, rid: str, input_ids: list[int], params: Json, cache_salt: str) -> tuple[FakeCall, Json]:
        if (self._stall_s or self._crash) and self._policy.answer(self._decode(input_ids)).stall:
            self.num_stalls += 1
            await asyncio.sleep(self._stall_s)
            if (crash := self._crash) is not None:
                self._crash, self._stall_s = None, 0.0
                crash()
                raise ConnectionAbortedError("whoever asked is gone")
        return await super().run(rid, input_ids, params, cache_salt)

    def _output(self, input_ids: list[int]) -> list[int]:
        return self._encode(output_text(self._policy.answer(self._decode(input_ids))))


def _marker(thread: str) -> str:
    return f"TOUR-{thread.upper()}"


def _text_of(summary: dict[str, Any]) -> dict[str, str]:
    return {"summary_text": summary["text"]} if "text" in summary else {}


def _filled(value: Any, prompt: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, prompt) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, prompt) for item in value]
    return LOOKUP.sub(lambda match: _last(match[1], prompt), value) if isinstance(value, str) else value


def _last(pattern: str, prompt: str) -> str:
    found = re.findall(pattern, prompt)
    return found[-1] if found else "not-found"
