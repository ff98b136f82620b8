"""The quickstart agent: a separate program that does a job in the current folder through a language model.

Enters: the instruction as the only argument, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ANTHROPIC_MODEL. Leaves:
changes in the current folder, the model's last text on stdout, exit code 0 (the model ended by itself) or 1 (turn
limit, API failure). It speaks the Anthropic Messages API and knows nothing about training. Two tools: `bash`, and
`agent`, which starts a sub-agent with a history of its own. A conversation whose prompt grew beyond
QUICKSTART_COMPACT_TOKENS is summarised by the model and goes on in a new one. Every prompt token costs, so all texts
are short.

Run: python -I agent.py "1. Write apple to notes.txt."
"""

import gc
import os
import signal
import subprocess
import sys

SYSTEM = "You are a coding agent. Do the jobs in order with the tools, then stop."
SUB_SYSTEM = "You are a sub-agent. Do the jobs in order, then stop."
SUMMARY_REQUEST = "Write a summary of your work so far."
BASH = {
    "name": "bash",
    "description": "Run a shell command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
AGENT = {
    "name": "agent",
    "description": "Let a sub-agent do a job.",
    "input_schema": {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
}

MAX_TURNS = 8  # model calls of one conversation chain, compactions not counted
MAX_SUMMARIES = 2  # of one run: a summary that does not help must not go on for ever
MAX_TOKENS = 200  # of one reply; an honest one takes about 60
COMMAND_TIMEOUT_S = 5.0
MAX_OUTPUT_CHARS = 2000
COMPACT_TOKENS = 500  # prompt tokens; three jobs stay below 440, a long file brings it to 560


def run_bash(command: str) -> str:
    """Run a command with `sh -c` in a process group of its own and return what it printed, bounded in time and size."""
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        raw, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        note = ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raw, _ = process.communicate()
        note = "\n(stopped: too slow)"
    text = raw.decode("utf-8", "replace").rstrip("\n")
    if len(text) > MAX_OUTPUT_CHARS:
        text = text[:MAX_OUTPUT_CHARS] + "\n(cut)"
    return text + note or "(no output)"


def echo_block(block) -> dict:
    """The request form of a reply's content block: what the API needs back, nothing else."""
    if block.type == "tool_use":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
    if block.type == "thinking":
        return {"type": "thinking", "thinking": block.thinking, "signature": block.signature or ""}
    return {"type": "text", "text": getattr(block, "text", "")}


def text_of(reply) -> str:
    """The text blocks of a reply, joined."""
    return "\n".join(block.text for block in reply.content if block.type == "text").strip()


class Conversation:
    """One history: of the main agent, or of a sub-agent (headers tell the server which)."""

    def __init__(self, client, model: str, *, compact_tokens: int, agent_id: int = 0):
        self.client, self.model, self.compact_tokens, self.agent_id = client, model, compact_tokens, agent_id
        self.num_agents = 0
        self.num_summaries = 0

    def ask(self, messages: list[dict]):
        sub = self.agent_id > 0
        return self.client.messages.create(
            model=self.model,
            max_tokens=MAX_TOKENS,
            system=SUB_SYSTEM if sub else SYSTEM,
            tools=[BASH] if sub else [BASH, AGENT],
            messages=messages,
            extra_headers={"x-agent-parent": "main", "x-agent-id": str(self.agent_id)} if sub else {},
        )

    def run(self, instruction: str) -> tuple[str, bool]:
        """Work until a reply has no tool call; returns the last text and whether the model ended by itself."""
        messages = [{"role": "user", "content": instruction}]
        for _ in range(MAX_TURNS):
            reply = self.ask(messages)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return text_of(reply), True
            messages.append({"role": "assistant", "content": [echo_block(block) for block in reply.content]})
            messages.append({"role": "user", "content": [self.result(call) for call in calls]})
            if reply.usage.input_tokens > self.compact_tokens and self.num_summaries < MAX_SUMMARIES:
                messages = self.compact(instruction, messages)
        return "", False

    def result(self, call) -> dict:
        """Execute one tool call; a call that makes no sense is an error the model can read."""
        wanted = {"bash": "command", "agent": "prompt"}.get(call.name)
        argument = call.input.get(wanted) if wanted and isinstance(call.input, dict) else None
        known = isinstance(argument, str) and (call.name == "bash" or self.agent_id == 0)
        if not known:
            content = "Error: no such tool or argument."
        elif call.name == "bash":
            content = run_bash(argument)
        else:
            content = self.delegate(argument)
        return {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": not known}

    def delegate(self, prompt: str) -> str:
        self.num_agents += 1
        sub = Conversation(
            self.client, self.model, compact_tokens=self.compact_tokens, agent_id=self.agent_id + self.num_agents
        )
        return sub.run(prompt)[0] or "(no text)"

    def compact(self, instruction: str, messages: list[dict]) -> list[dict]:
        """Let the model sum up, in the same conversation, and start a new one from instruction and summary."""
        self.num_summaries += 1
        summary = text_of(self.ask([*messages, {"role": "user", "content": SUMMARY_REQUEST}])) or "(none)"
        return [{"role": "user", "content": with_summary(instruction, summary)}]


def with_summary(instruction: str, summary: str) -> str:
    """The first user text of a conversation that continues a summarised one."""
    return f"{instruction}\nSummary: {summary}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    # A rollout is a process of a second or two, and half of it was the import of the SDK (0.8 s of CPU, now 0.45 s):
    # no garbage collection in so short a life, and none of the optional packages that httpx takes when it finds them.
    gc.disable()
    sys.modules.update(dict.fromkeys(("rich", "click", "pygments", "aiohttp", "h2")))
    # Imported late: tests and the warm start read this file's texts without the SDK.
    from anthropic import Anthropic, AnthropicError

    compact_tokens = int(os.environ.get("QUICKSTART_COMPACT_TOKENS", COMPACT_TOKENS))
    try:
        main_agent = Conversation(Anthropic(), os.environ["ANTHROPIC_MODEL"], compact_tokens=compact_tokens)
        text, ended = main_agent.run(sys.argv[1])
    except (AnthropicError, KeyError) as error:
        print(f"agent: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
