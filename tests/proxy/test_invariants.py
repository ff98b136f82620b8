"""Random conversations: whatever harnesses do, engines saw the recorded paths and nothing is recorded twice.

A harness here branches, goes back, retries, starts sub-agents, compacts, drops and rewrites what it was given, in all
dialects, while the policy writes text, thoughts and tool calls, good and broken.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.proxies import BASH, ProxyUnderTest, assert_exact, call_text, fake_engine, outputs, running_proxy

CHAT_BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
RESPONSES_BASH = {"type": "function", "name": "bash", "parameters": {"type": "object"}}
TOOLS = {"messages": BASH, "chat": CHAT_BASH, "responses": RESPONSES_BASH}
WORDS = ("a", "bb", " c ", "ünï", "line\nline  ", "<tool_call>", "</think>", "<|im_end|>", "")


def policy_output(rng: random.Random) -> list[int]:
    """Something a policy may write: mostly sane, sometimes not."""
    parts = []
    if rng.random() < 0.4:
        parts.append(f"<think>\n{rng.choice(WORDS)}\n" + ("</think>\n\n" if rng.random() < 0.8 else ""))
    parts.append("".join(rng.choice(WORDS) for _ in range(rng.randrange(3))))
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        arguments = rng.choice(('{"command": "ls"}', '{"b": 1.0, "a": "x "}', "{}", "{broken", "[]", '{"x": NaN}'))
        parts.append("\n" + call_text("bash", arguments))
    text = "".join(parts)
    return outputs(text + ("…" if text and rng.random() < 0.2 else ""))[0]


class RandomHarness:
    """Keeps conversations as a client does and continues any of them."""

    def __init__(self, rng: random.Random, proxy: ProxyUnderTest, harness: Any) -> None:
        self.rng = rng
        self.proxy = proxy
        self.harness = harness
        self.histories: list[tuple[str, list[Any], dict[str, Any]]] = []  # dialect, messages, fields

    async def step(self) -> None:
        rng = self.rng
        if not self.histories or rng.random() < 0.2:
            dialect = rng.choice(tuple(TOOLS))
            tools = {"tools": [TOOLS[dialect]]} if rng.random() < 0.7 else {}
            thinking = {"thinking": {"type": "adaptive"}} if dialect == "messages" and rng.random() < 0.5 else {}
            opening = [{"role": "user", "content": rng.choice(("task", "task one", "task two"))}]
            self.histories.append((dialect, opening, {**tools, **thinking}))
        dialect, messages, fields = rng.choice(self.histories[-6:])
        if rng.random() < 0.1:
            messages = self.moved(messages)
        self.proxy.engine.add_outputs([policy_output(rng)])
        extra = {"max_output_tokens" if dialect == "responses" else "max_tokens": rng.choice((3, 8, 500))}
        headers = {"x-agent-parent": "main"} if rng.random() < 0.2 else {}
        send = getattr(self.harness, dialect)
        repeat = 2 if rng.random() < 0.15 else 1  # two of the same body: joined or sampled anew
        if repeat == 2:
            self.proxy.engine.add_outputs([policy_output(rng)])
        replies = await asyncio.gather(*(send(messages, headers=headers, **fields, **extra) for _ in range(repeat)))
        for reply in replies:
            assert reply.status_code == 200, reply.text
        body = replies[-1].json()
        if dialect == "responses":
            turn = self.items(body)
        else:
            turn = [self.assistant(dialect, body), *self.answers(dialect, body)]
        self.histories.append((dialect, [*messages, *turn], fields))

    def assistant(self, dialect: str, body: Any) -> dict[str, Any]:
        """The reply as this harness sends it back: as it came, or changed in one of the usual ways."""
        rng = self.rng
        if dialect == "chat":
            message = {key: value for key, value in body["choices"][0]["message"].items() if value is not None}
            if rng.random() < 0.3:
                message.pop("reasoning_content", None)
            if rng.random() < 0.3 and message.get("content"):
                message["content"] = self.rewritten(message["content"])
            if rng.random() < 0.1:
                message.pop("tool_calls", None)
            message.setdefault("content", None)
            return message
        content = body["content"]
        if rng.random() < 0.3:
            content = [block for block in content if block["type"] != "thinking"]
        if rng.random() < 0.2:
            content = [
                {**block, "input": dict(reversed(block["input"].items()))} if block["type"] == "tool_use" else block
                for block in content
            ]
        if rng.random() < 0.15:
            content = [
                {**block, "text": self.rewritten(block["text"])} if block["type"] == "text" else block
                for block in content
                if block["type"] != "tool_use"
            ]
        if rng.random() < 0.1:
            content = [{"type": "text", "text": "No response requested."}]
        return {"role": "assistant", "content": content}

    def rewritten(self, text: str) -> str:
        """A text trimmed, cut, with something behind it, or another one."""
        cut = text[: self.rng.randrange(len(text) + 1)]
        return self.rng.choice((text.strip(), cut, text + " and more", "rewritten"))

    def moved(self, messages: list[Any]) -> list[Any]:
        """A history as after a compaction, with a turn left out, or with a note about it."""
        rng = self.rng
        if len(messages) < 3:
            return messages
        position = rng.randrange(1, len(messages))
        if rng.random() < 0.5:
            return [{"role": "user", "content": "summary"}, *messages[position:]]
        return messages[:position] + messages[position + 1 :]

    def items(self, body: Any) -> list[dict[str, Any]]:
        """The reply's items as this harness sends them back, and what follows them."""
        rng = self.rng
        items = [dict(item) for item in body["output"]]
        if rng.random() < 0.2:
            items = [item for item in items if item["type"] != "reasoning"]
        if rng.random() < 0.2:
            items = [{key: value for key, value in item.items() if key != "id"} for item in items]
        if rng.random() < 0.1:  # the stream was cut and the items that were whole are kept
            return items[: rng.randrange(len(items) + 1)]
        calls = [item for item in items if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "out"} for call in calls]
        text = {"role": "user", "content": rng.choice(("ok", "and now?", "Write a summary", "<tool_response>"))}
        return [*items, *results, text] if not results or rng.random() < 0.3 else [*items, *results]

    def answers(self, dialect: str, body: Any) -> list[dict[str, Any]]:
        """What follows a reply: tool results and sometimes text."""
        rng = self.rng
        text = rng.choice(("ok", "and now?", "Write a summary", "<tool_response>"))
        if dialect == "chat":
            calls = body["choices"][0]["message"].get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in calls]
            return [*results, {"role": "user", "content": text}] if not results or rng.random() < 0.3 else results
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "out"}]}
            for block in body["content"]
            if block["type"] == "tool_use"
        ]
        more = [{"type": "text", "text": text}] if not results or rng.random() < 0.3 else []
        return [{"role": "user", "content": [*results, *more]}]


@pytest.fixture(scope="module")
def stage(model_path: Path) -> Iterator[tuple[asyncio.Runner, ProxyUnderTest]]:
    """One proxy for all examples, each with a session of its own."""
    with asyncio.Runner() as runner:
        context = running_proxy(model_path, fake_engine(), context_length=100_000)
        proxy = runner.run(context.__aenter__())
        yield runner, proxy
        runner.run(context.__aexit__(None, None, None))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 14))
def test_random_conversations_keep_every_invariant(
    stage: tuple[asyncio.Runner, ProxyUnderTest], seed: int, num_steps: int
) -> None:
    runner, proxy = stage
    first_call = len(proxy.engine.calls)

    async def play() -> None:
        harness = await proxy.open(f"r{seed}", on_change=random.Random(seed).choice(("keep", "fork")))
        player = RandomHarness(random.Random(seed), proxy, harness)
        for _ in range(num_steps):
            await player.step()
        proxy.engine.forget_outputs()
        trajectory = await harness.seal()
        assert_exact(trajectory, proxy.engine)
        calls = proxy.engine.calls[first_call:]
        assert len(trajectory.calls) == len(calls)
        assert trajectory.tree.sampled_tokens == sum(len(call.output_ids) for call in calls)
        counted = sum(count for name, count in trajectory.counters.items() if name.startswith("substitution_"))
        assert counted == len(calls)
        # Sharing is real: no prompt node repeats what a sibling prompt node begins with.
        for siblings in trajectory.tree.children():
            firsts = [trajectory.tree.nodes[i].token_ids[0] for i in siblings if not trajectory.tree.nodes[i].call_id]
            assert len(firsts) == len(set(firsts))

    runner.run(play())
