"""What all dialects read alike: checked numbers and strings, function tools, the facts that role tables ask for.

Enters: values of a request body, of whatever type. Leaves: values of the type asked for, or a Refusal that names the
field.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from gyre_core.proxy.conversation import as_text, require
from gyre_core.proxy.refusal import Refusal, RefusalKind, bad_request
from gyre_core.types import Json

MAX_STOPS = 64  # the APIs allow a few; an engine compares each with every token's text
MAX_STOP_CHARS = 4096

_OPENAI_ERRORS: dict[RefusalKind, tuple[int, str, str | None]] = {  # status, type, code
    RefusalKind.BAD_REQUEST: (400, "invalid_request_error", None),
    RefusalKind.CONTEXT_LENGTH: (400, "invalid_request_error", "context_length_exceeded"),
    RefusalKind.AUTHENTICATION: (401, "invalid_request_error", "invalid_api_key"),
    RefusalKind.FORBIDDEN: (403, "insufficient_permissions", "session_closed"),
    RefusalKind.NOT_FOUND: (404, "invalid_request_error", "unknown_url"),
    RefusalKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    RefusalKind.UNAVAILABLE: (503, "server_error", "overloaded"),
    RefusalKind.INTERNAL: (500, "server_error", None),
}


def positive_int(value: Any, name: str) -> int | None:
    """A positive integer, or None when the field is left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_request(f"{name}: a positive integer is required")
    return value


def number(value: Any, name: str) -> float | None:
    """A number, or None when the field is left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name}: a number is required")
    return float(value)


def stop_strings(value: Any, name: str) -> tuple[str, ...]:
    """One string, a list of strings, or nothing; empty ones are left out."""
    stops = [value] if isinstance(value, str) else value or []
    require(isinstance(stops, list) and all(isinstance(stop, str) for stop in stops), f"{name}: strings are required")
    require(
        len(stops) <= MAX_STOPS and sum(map(len, stops)) <= MAX_STOP_CHARS,
        f"{name}: at most {MAX_STOPS} strings with {MAX_STOP_CHARS} characters are served",
    )
    return tuple(stop for stop in stops if stop)


def tool_list(tools: Any) -> list[Json]:
    """The tools of a request as a list of objects; empty when the field is left out."""
    if not tools:
        return []
    require(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), "tools: a list is required")
    return tools


def function_tool(name: Any, description: Any, parameters: Any) -> Json:
    """A tool as renderers take it."""
    require(isinstance(name, str), "tools: functions with a name are required")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "" if description is None else str(description),
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def last_user(messages: Sequence[Json]) -> tuple[str, ...]:
    """Text blocks of the last user message, for the role table."""
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return (content,)
            if isinstance(content, list):
                texts = (part.get("text") for part in content if isinstance(part, dict))
                return tuple(text for text in texts if isinstance(text, str))
            return ()
    return ()


def system_text(contents: Iterable[Any]) -> str:
    """All system text before the first other message, for the role table. `contents`: strings or lists of blocks."""
    blocks = (block for content in contents for block in (content if isinstance(content, list) else [content]))
    return "\n".join(as_text(block) for block in blocks if block)


def openai_error(refusal: Refusal) -> tuple[int, Json]:
    """Status and body of a refusal in the form of both OpenAI APIs."""
    status, kind, code = _OPENAI_ERRORS[refusal.kind]
    return status, {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}
