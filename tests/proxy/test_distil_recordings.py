"""Fixtures without anybody's text: what decides how messages match survives, the words do not."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_core.proxy.conversation import loose_json, trimmed
from infra.recordings import Letters, disguise, disguise_json, distil, read

LETTERS = Letters(b"key")
TEXTS = st.text(alphabet="abAB éß.,/…\n\t 019", max_size=30)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(), lambda v: st.lists(v, max_size=3), max_leaves=5
)


@settings(max_examples=100)
@given(TEXTS, TEXTS)
def test_texts_are_equal_and_begin_alike_exactly_when_they_did(left: str, right: str) -> None:
    one, two = disguise(left, LETTERS), disguise(right, LETTERS)
    assert (one == two) == (left == right)
    assert one.startswith(two) == left.startswith(right)
    assert trimmed(one) == disguise(trimmed(left), LETTERS)
    assert re.sub("[A-Za-z]", "x", one) == re.sub("[A-Za-z]", "x", left)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["command", "b", "c"]), VALUES, max_size=3), st.booleans())
def test_spelled_arguments_mean_the_same_as_the_disguised_value(value: dict[str, Any], ascii_only: bool) -> None:

    spelled = disguise_json(json.dumps(value, ensure_ascii=ascii_only, indent=1), LETTERS)
    assert orjson.loads(spelled) == _disguised(value)


@pytest.mark.parametrize(
    ("sampled", "resent"),
    [
        ('{"command":  "caf\\u00e9 \\/ x\\n"}', {"command": "café / x\n"}),
        ('{"command": "cd /some/place && ls -a"}', {"command": "ls -a"}),
        ('{"flag": "false", "n": "5000", "t": "true"}', {"n": 5000.0, "t": True, "other": False}),
    ],
)
def test_respelled_arguments_still_agree_after_the_disguise(sampled: str, resent: Any) -> None:
    assert loose_json(orjson.loads(sampled)) == loose_json(resent)
    assert loose_json(orjson.loads(disguise_json(sampled, LETTERS))) == loose_json(_disguised(resent))


def test_broken_arguments_stay_as_broken_as_they_were() -> None:
    assert re.fullmatch(r'\{"command": "[a-z]{2}', disguise_json('{"command": "ls', LETTERS))
    assert re.fullmatch(r'\{"command":"[a-z]{4}",\}', disguise_json('{"command":"echo",}', LETTERS))
    assert disguise_json("", LETTERS) == ""


def test_markers_of_the_role_tables_and_cut_lengths_stay() -> None:
    text = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.…[len=6361]"
    shown = disguise(text, LETTERS)
    assert shown.startswith("CRITICAL: Respond with TEXT ONLY") and shown.endswith("…[len=6361]")
    assert "tools" not in shown


def test_distilled_call_holds_no_word_of_its_recording(tmp_path: Path) -> None:
    row = {
        "run": "r",
        "n": 0,
        "t": 0.5,
        "api": "anthropic",
        "method": "POST",
        "path": "/v1/messages",
        "query": "",
        "inflight": 1,
        "headers": {"x-api-key": "secretive", "x-claude-code-agent-id": "a1", "host": "machine"},
        "request": {
            "model": "m",
            "system": [{"type": "text", "text": "secretive prompt"}],
            "metadata": {"user_id": "secretive"},
            "tools": [{"name": "Bash", "params": ["command"]}],
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "secretive"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "secretive"}]},
            ],
        },
        "response": {
            "outcome": "ok",
            "t": 1.0,
            "emitted_blocks": [
                {"type": "tool", "id": "t2", "name": "Bash", "raw": '{"command": "secretive"}', "args": {}}
            ],
        },
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz"
    source.write_bytes(orjson.dumps(row) + b"\n")
    distil(source, target)
    (again,) = read(target)
    assert b"secretive" not in orjson.dumps(again)
    assert again["headers"] == {"x-claude-code-agent-id": "a1"}
    request = again["request"]
    assert request["tools"] == row["request"]["tools"] and "metadata" not in request
    command = request["messages"][0]["content"][0]["input"]["command"]
    assert request["messages"][1]["content"][0]["content"] == command
    assert orjson.loads(again["response"]["emitted_blocks"][0]["raw"]) == {"command": command}


def test_committed_fixtures_are_small_and_name_no_machine() -> None:
    folder = Path(__file__).parent / "recordings"
    assert sum(path.stat().st_size for path in folder.glob("*.gz")) < 400_000
    for path in folder.glob("*.gz"):
        data = b"\n".join(orjson.dumps(row) for row in read(path))
        assert b"/root" not in data and b"api-key" not in data and b"/home" not in data


def test_command_explains_itself() -> None:
    command = [sys.executable, "infra/recordings.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(word in shown for word in ("replay", "distil", "golden"))


def _disguised(value: Any) -> Any:
    if isinstance(value, str):
        return disguise(value, LETTERS)
    if isinstance(value, list):
        return [_disguised(item) for item in value]
    if isinstance(value, dict):
        return {key: _disguised(item) for key, item in value.items()}
    return value
