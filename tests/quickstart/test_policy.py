"""The quickstart's policy: Qwen3's form, one-token names; and the demonstrator shows what a shell prints."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
POLICY = QUICKSTART / "policy"
sys.path.insert(0, str(QUICKSTART))

import transcripts  # noqa: E402
import world  # noqa: E402

CALL = {"type": "function", "function": {"name": "bash", "arguments": {"command": "echo \"é\" > <a>&'b'.txt"}}}
TOOL = {"role": "tool", "content": "(no output)"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "user only": ([{"role": "user", "content": "hi"}], False),
    "system without tools": ([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], False),
    "tools without system": ([{"role": "user", "content": "hi"}], True),
    "reasoning and tools": (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "Text", "reasoning_content": "why\n", "tool_calls": [CALL, CALL]},
            TOOL,
            TOOL,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            TOOL,
        ],
        True,
    ),
    "reasoning dropped before the last query": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]},
            TOOL,
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "<think>\nx\n</think>\n\nDone."},
        ],
        True,
    ),
    "later system and string arguments": (
        [
            {"role": "user", "content": "a"},
            {"role": "system", "content": "note"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}]},
        ],
        True,
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("generate", [False, True])
def test_chat_template_agrees_with_the_qwen3_renderer(tokenizer: Any, name: str, generate: bool):
    messages, with_tools = CONVERSATIONS[name]
    tools = transcripts.MAIN_TOOLS if with_tools else None
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, return_dict=False)
    rendered = Qwen3Renderer(tokenizer).render_ids(messages, tools=tools, add_generation_prompt=generate)
    assert ids == rendered


def test_tokenizer_names_are_single_tokens(tokenizer: Any):
    words, stems, folders = world.ALL_NAMES
    for name in (*words, *stems, *folders):
        assert len(tokenizer.encode(f" {name}", add_special_tokens=False)) == 1, name


def test_policy_folder_is_small_and_a_plain_qwen3():
    config = json.loads((POLICY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] % 64 == 0 and config["tie_word_embeddings"] is True
    assert (POLICY / "model.safetensors").stat().st_size <= 8 * 2**20


def test_demonstrator_outputs_are_what_the_shell_prints(tmp_path: Path):
    rng = Random(3)
    for kind in (*world.SIMPLE_KINDS, "folder", "lookup"):
        jobs = world.make(kind, world.Names.draw(rng, *world.ALL_NAMES), rng)
        for choice in (0, 1):
            workspace = tmp_path / f"{kind}-{choice}"
            workspace.mkdir()
            for path, text in world.files_of(jobs).items():
                (workspace / path).write_text(text)
            for job in jobs:
                option = job.options[choice]
                ran = subprocess.run(["sh", "-c", option.command], cwd=workspace, capture_output=True, text=True)
                expected = job.files["log.txt"] if job.found and choice == 0 else option.output
                assert (ran.returncode, ran.stdout.strip()) == (0, expected.strip()), option.command
