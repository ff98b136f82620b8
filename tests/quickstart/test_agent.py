"""The quickstart agent as a program: its requests against a scripted Messages server, its work in a folder."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

AGENT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "agent" / "agent.py"


class ScriptedServer:
    """Answers POST /v1/messages with the given replies in order and keeps the requests."""

    def __init__(self) -> None:
        self.replies: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append(body)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                reply = outer.replies.pop(0) if outer.replies else {"status": 400}
                data = json.dumps(reply).encode()
                self.send_response(reply.get("status", 200))
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, instruction: str, workspace: Path, **env: str) -> subprocess.CompletedProcess[str]:
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        settings = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "policy", **env}
        command = [sys.executable, "-I", str(AGENT), instruction]
        path = {"PATH": os.environ["PATH"]}
        return subprocess.run(command, cwd=workspace, env=path | settings, capture_output=True, text=True, timeout=60)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.server.shutdown()
    scripted.server.server_close()


def reply(*content: dict[str, Any], prompt_tokens: int = 100) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": list(content),
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 10},
    }


def use(call_id: str, tool: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": tool, "input": arguments}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_agent_runs_a_command_echoes_thinking_and_ends_without_a_tool_call(server: ScriptedServer, tmp_path: Path):
    thinking = {"type": "thinking", "thinking": "1. Write", "signature": "s"}
    server.replies = [reply(thinking, use("t1", "bash", command="echo apple > a.txt")), reply(text("Done."))]
    ended = server.run("1. Write apple to a.txt.", tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "Done.\n")
    assert (tmp_path / "a.txt").read_text() == "apple\n"
    first, second = server.requests
    assert [tool["name"] for tool in first["tools"]] == ["bash", "agent"] and isinstance(first["system"], str)
    assert first["messages"] == [{"role": "user", "content": "1. Write apple to a.txt."}]
    assert second["messages"][1]["content"] == [thinking, use("t1", "bash", command="echo apple > a.txt")]
    result = second["messages"][2]["content"][0]
    assert (result["tool_use_id"], result["content"], result["is_error"]) == ("t1", "(no output)", False)
    assert "x-agent-parent" not in server.headers[0]


def test_agent_sub_agent_has_own_history_headers_and_returns_its_text(server: ScriptedServer, tmp_path: Path):
    server.replies = [
        reply(use("t1", "agent", prompt="1. Delete b.txt.")),
        reply(use("t2", "bash", command="rm b.txt")),
        reply(text("Deleted.")),
        reply(text("Done.")),
    ]
    (tmp_path / "b.txt").write_text("x")
    assert server.run("1. Let a sub-agent do this: Delete b.txt.", tmp_path).returncode == 0
    assert not (tmp_path / "b.txt").exists()
    sub = server.requests[1]
    assert sub["messages"] == [{"role": "user", "content": "1. Delete b.txt."}]
    assert [tool["name"] for tool in sub["tools"]] == ["bash"] and len(sub["system"]) < len(
        server.requests[0]["system"]
    )
    roles = [(headers.get("x-agent-parent"), headers.get("x-agent-id")) for headers in server.headers]
    assert roles == [(None, None), ("main", "1"), ("main", "1"), (None, None)]
    assert server.requests[3]["messages"][2]["content"][0]["content"] == "Deleted."


def test_agent_compaction_asks_for_a_summary_and_goes_on_from_it(server: ScriptedServer, tmp_path: Path):
    server.replies = [
        reply(use("t1", "bash", command="echo hi"), prompt_tokens=51),
        reply(text("Half done."), prompt_tokens=90),
        reply(text("Done."), prompt_tokens=30),
    ]
    assert server.run("1. Say hi.", tmp_path, QUICKSTART_COMPACT_TOKENS="50").returncode == 0
    summary_call, after = server.requests[1], server.requests[2]
    assert summary_call["messages"][:3] == [
        {"role": "user", "content": "1. Say hi."},
        {"role": "assistant", "content": [use("t1", "bash", command="echo hi")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "hi", "is_error": False}]},
    ]
    assert summary_call["messages"][3]["content"].startswith("Write a summary")
    assert summary_call["tools"] == after["tools"]
    assert after["messages"] == [{"role": "user", "content": "1. Say hi.\nSummary: Half done."}]


def test_agent_bad_calls_become_errors_the_model_can_read(server: ScriptedServer, tmp_path: Path):
    server.replies = [
        reply(use("t1", "fly", to="moon"), use("t2", "bash", cmd="ls"), use("t3", "bash", command="cat none.txt")),
        reply(),
    ]
    ended = server.run("1. Fly.", tmp_path)
    results = server.requests[1]["messages"][2]["content"]
    assert [result["is_error"] for result in results] == [True, True, False]
    assert "none.txt" in results[2]["content"]
    assert ended.returncode == 0


def test_agent_turn_limit_and_api_failure_exit_with_one(server: ScriptedServer, tmp_path: Path):
    server.replies = [reply(use(f"t{i}", "bash", command="true")) for i in range(50)]
    assert server.run("1. Loop.", tmp_path).returncode == 1
    assert len(server.requests) == 8
    server.replies = []
    failed = server.run("1. Fail.", tmp_path)
    assert failed.returncode == 1 and "BadRequestError" in failed.stderr
