"""Scripted transcripts of the quickstart world: what the warm start imitates.

Enters: jobs (world.py) and a random generator. Leaves: conversations in the chat form that the proxy gives to the
renderer (system, tools, reasoning_content, tool_calls with a dict of arguments, tool results), with the assistant
turns to imitate. The demonstrator has bad habits on purpose: it does not start, stops before the last job, forgets a
redirection, takes mv for cp. So the policy begins imperfect in ways a reward can correct.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from agent.agent import AGENT, BASH, SUB_SYSTEM, SUMMARY_REQUEST, SYSTEM, with_summary
from world import ALL_NAMES, SIMPLE_KINDS, Job, Names, instruction_of, make

LAZY = 0.1  # ends without doing anything
STOP_EARLY = 0.38  # ends after a job although there is another one
LOSE_FINDING = 0.3  # sums up without the line it will need
FINAL_THOUGHT, FINAL_TEXT = "All done.", "Done."


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """An Anthropic tool as the renderer takes it."""
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


MAIN_TOOLS = [function_of(BASH), function_of(AGENT)]
SUB_TOOLS = [function_of(BASH)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One list of messages, of which the last `num_targets` assistant turns are imitated.

    Example: Conversation(messages=[...], tools=MAIN_TOOLS, num_targets=3)
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    num_targets: int


def thought(reasoning: str, text: str = "") -> dict[str, Any]:
    """An assistant message without a tool call."""
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def call(reasoning: str, tool: str, argument: str) -> dict[str, Any]:
    """An assistant message with one tool call."""
    arguments = {"command" if tool == "bash" else "prompt": argument}
    return {
        **thought(reasoning),
        "tool_calls": [{"type": "function", "function": {"name": tool, "arguments": arguments}}],
    }


def demonstrate(jobs: list[Job], rng: Random, *, sub_agent: bool = False) -> list[Conversation]:
    """Play one episode: the main conversation, with its continuation after a compaction and its sub-agents' ones."""
    instruction = instruction_of(jobs)
    head = [
        {"role": "system", "content": SUB_SYSTEM if sub_agent else SYSTEM},
        {"role": "user", "content": instruction},
    ]
    tools = SUB_TOOLS if sub_agent else MAIN_TOOLS
    messages = list(head)
    conversations: list[Conversation] = []
    turns, found, read_at = 0, "", None
    for index, job in enumerate(jobs):
        if rng.random() < (LAZY if index == 0 else STOP_EARLY):
            break
        option = rng.choices(job.options, [option.weight for option in job.options])[0]
        command, output = option.command, option.output
        if job.found and option is job.options[0]:
            output, found, read_at = job.files["log.txt"].rstrip("\n"), job.found, index
        if job.kind == "lookup" and not found:  # it cannot know the answer: it makes one up
            guess = rng.choice(ALL_NAMES[0])
            command, output = (text.replace(job.options[1].output, guess) for text in (command, output))
        if job.inner is not None:
            conversations += demonstrate([job.inner], rng, sub_agent=True)
        messages += [
            call(f"{index + 1}. {job.sentence}", option.tool, command),
            {"role": "tool", "content": output or "(no output)"},
        ]
        turns += 1
        if read_at is not None and index == read_at + 1:
            summary = f"Done: {' '.join(str(number) for number in range(1, index + 2))}. Next: {index + 2}."
            if rng.random() < LOSE_FINDING:
                found = ""
            summary += f" {found}" if found else ""
            request = [{"role": "user", "content": SUMMARY_REQUEST}, thought("Sum up.", summary)]
            conversations.append(Conversation(messages=list(messages), tools=tools, num_targets=turns))
            conversations.append(Conversation(messages=messages + request, tools=tools, num_targets=1))
            messages, turns, read_at = (
                [head[0], {"role": "user", "content": with_summary(instruction, summary)}],
                0,
                None,
            )
    messages.append(thought(FINAL_THOUGHT, FINAL_TEXT))
    conversations.append(Conversation(messages=messages, tools=tools, num_targets=turns + 1))
    return conversations


# Words are harder to copy than file names (there are more of them, in fewer sentences): kinds that name words come
# more often here than in the problems.
KIND_WEIGHTS = {"write": 2.0, "append": 1.5, "replace": 2.5, "find": 2.0}


def draw_kinds(rng: Random, count: int) -> list[str]:
    """Different simple kinds, by weight."""
    kinds: list[str] = []
    while len(kinds) < count:
        weights = [KIND_WEIGHTS.get(kind, 1.0) * (kind not in kinds) for kind in SIMPLE_KINDS]
        kinds += rng.choices(SIMPLE_KINDS, weights)
    return kinds


def draw_jobs(rng: Random, *, max_jobs: int = 3) -> list[Job]:
    """A random instruction from all names, with about the shares of families that the problems have."""
    names = Names.draw(rng, *ALL_NAMES)
    family = rng.random()
    if family < 0.08 and max_jobs >= 3:
        return make("lookup", names, rng)
    if family < 0.22:
        folder = make("folder", names, rng)
        if max_jobs == 1:
            return folder[:1]
        other = make(draw_kinds(rng, 1)[0], names, rng)
        return rng.choice((folder, folder + other, other + folder))[:max_jobs]
    if family < 0.30 and max_jobs >= 2:
        delegated, other = make("delegate", names, rng), make(draw_kinds(rng, 1)[0], names, rng)
        return delegated + other if rng.random() < 0.7 else other + delegated
    count = rng.choice((1, 2, 2, 2, 3, 3)) if max_jobs >= 3 else rng.randint(1, max_jobs)
    return [job for kind in draw_kinds(rng, count) for job in make(kind, names, rng)]
