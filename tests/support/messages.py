"""Messages as harnesses write them, for both message APIs."""

from typing import Any

from tests.support.proxies import Harness, call_text

THINKING = {"thinking": {"type": "adaptive"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def text(value: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": value}


def tool_use(call_id: str, arguments: Any, name: str = "bash") -> dict[str, Any]:
    """A tool call of the Messages API."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(call_id: str, output: str = "r") -> dict[str, Any]:
    """A tool's result, as a block of a user message."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": output}


def bash(arguments: str = '{"command": "ls"}') -> str:
    """A call of bash as the policy writes it."""
    return call_text("bash", arguments)


async def replied(harness: Harness, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """Send a Messages request; the blocks of its reply."""
    response = await harness.messages(messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["content"]


async def chatted(harness: Harness, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Send a Chat Completions request; the message of its reply."""
    response = await harness.chat(messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]
