"""Request options that nothing here can honour: found, so that they can be counted.

Enters: request bodies. Leaves: names of options that ask for more than the neutral value does. They are ignored and
counted, never refused: a harness that asks for top_p must still get its reply.
"""

from collections.abc import Mapping
from typing import Any, Literal

from gyre_core.types import Json

ToolChoice = Literal["auto", "none", "required"]

# Option -> values that ask for nothing. The session decides how tokens are sampled (decision 9).
CHAT_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "seed": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
}
MESSAGES_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "context_management": ({}, {"edits": []}),
    "container": (),
    "mcp_servers": ([],),
}


def ignored_options(body: Json, neutral: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """The options of `body` that ask for something that is not done."""
    return tuple(name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values)


def chat_tool_choice(choice: Any) -> tuple[ToolChoice, str]:
    """How far the policy is free, and the tool that must be called, "" for any: Chat Completions."""
    if isinstance(choice, dict):
        function = choice.get("function") or choice.get("custom")
        if isinstance(function, dict):
            return "required", str(function.get("name", ""))
        allowed = choice.get("allowed_tools")
        choice = allowed.get("mode") if isinstance(allowed, dict) else None
    return _mode(choice), ""


def messages_tool_choice(choice: Any) -> tuple[ToolChoice, str, bool]:
    """The same for Messages, and whether only one tool may be called at once."""
    if not isinstance(choice, dict):
        return "auto", "", False
    kind = choice.get("type")
    single = choice.get("disable_parallel_tool_use") is True
    if kind == "tool":
        return "required", str(choice.get("name", "")), single
    return _mode("required" if kind == "any" else kind), "", single


def _mode(choice: Any) -> ToolChoice:
    return "none" if choice == "none" else "required" if choice == "required" else "auto"
